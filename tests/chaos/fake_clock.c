/* The wall clock of a host, moved by what the file named by CHAOS_CLOCK holds: seconds, as a 64-bit integer.

   To be preloaded. A process without that variable has the machine's clock; clocks that cannot be set are left alone. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *moved;

static int64_t moved_s(void) {
    const char *path;
    if (!moved && (path = getenv("CHAOS_CLOCK"))) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            void *seen = mmap(NULL, sizeof *moved, PROT_READ, MAP_SHARED, file, 0);
            if (seen != MAP_FAILED) moved = seen;
            close(file);
        }
    }
    return moved ? *moved : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return (time_t)-1;
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
