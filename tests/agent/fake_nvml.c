/* A libnvidia-ml.so.1 for tests: two A100-like devices whose energy counter follows clock^3, and errors on demand.

   NVML_FAKE_<FUNCTION>=<code> makes a function answer with an error code, e.g. NVML_FAKE_TOTAL_ENERGY=3 (not
   supported), NVML_FAKE_SET_LIMIT=4 (no permission). NVML_FAKE_<FUNCTION>_<INDEX> is for one device, and
   NVML_FAKE_XID_<INDEX>, _TEMPERATURE_<INDEX>, _ECC_<INDEX> and _PID_<INDEX> are what it reports. The environment is read
   at each call. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int status;
enum { OK = 0, INVALID = 2, NO_SUPPORT = 3, SMALL = 7, DEVICES = 2 };
struct device { unsigned clock, limit; double energy_mj, at; };
struct util { unsigned gpu, memory; };
struct memory { unsigned long long total, free, used; };

static struct device devices[DEVICES];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec / 1e9;
}
static status fault(const char *name) {
  char variable[64];
  snprintf(variable, sizeof variable, "NVML_FAKE_%s", name);
  const char *code = getenv(variable);
  return code ? atoi(code) : OK;
}
static double power_mw(struct device *d) {
  double share = d->clock / 1410.0, mw = 52000 + 348000 * share * share * share;
  return mw < d->limit ? mw : d->limit;
}
static void advance(struct device *d) {
  double t = now();
  d->energy_mj += power_mw(d) * (t - d->at);
  d->at = t;
}
static struct device *of(void *handle) { return handle; }
static long said(const char *name, void *handle, long otherwise) {
  char variable[64];
  snprintf(variable, sizeof variable, "NVML_FAKE_%s_%d", name, (int)(of(handle) - devices));
  const char *value = getenv(variable);
  return value ? atol(value) : otherwise;
}
static status lost(void *handle) { return said("LOST", handle, OK); }

static void make_whole(void);
static int instance_of(void *h); /* of fake_nvml_mig.h: the number of a MIG device, -1 for a GPU */
static void name_slice(int number, char *uuid, unsigned length);
static unsigned long long slice_bytes(int number);

status nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  status failed = fault("INIT");
  if (failed) return failed;
  for (int i = 0; i < DEVICES; i++) devices[i] = (struct device){1410, 400000, 1e6 * (i + 1), now()};
  if (!getenv("NVML_FAKE_KEEP_CUT")) make_whole();
  return OK;
}
status nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(status s) { (void)s; return "a fake fault"; }
status nvmlDeviceGetCount_v2(unsigned *n) { *n = DEVICES; return OK; }
status nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) {
  if (i >= DEVICES) return INVALID;
  *handle = &devices[i];
  return OK;
}
status nvmlDeviceGetName(void *h, char *name, unsigned length) {
  if (instance_of(h) < 0 && lost(h)) return lost(h);
  snprintf(name, length, "NVIDIA A100-SXM4-40GB");
  return OK;
}
status nvmlDeviceGetUUID(void *h, char *uuid, unsigned length) {
  if (instance_of(h) >= 0) { name_slice(instance_of(h), uuid, length); return OK; }
  snprintf(uuid, length, "GPU-00000000-0000-0000-0000-%012d", (int)(of(h) - devices));
  return OK;
}
struct pci { char legacy[16]; unsigned domain, bus, device, ids, subsystem; char address[32]; };
status nvmlDeviceGetPciInfo_v3(void *h, struct pci *pci) {
  *pci = (struct pci){.bus = 0x3b + (unsigned)(of(h) - devices)};
  snprintf(pci->address, sizeof pci->address, "00000000:%02X:00.0", pci->bus);
  return fault("PCI");
}
status nvmlDeviceGetPowerUsage(void *h, unsigned *mw) {
  *mw = power_mw(of(h));
  return lost(h) ? lost(h) : fault("POWER");
}
status nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *mj) {
  advance(of(h));
  *mj = of(h)->energy_mj;
  return fault("TOTAL_ENERGY");
}
status nvmlDeviceGetUtilizationRates(void *h, struct util *u) {
  (void)h;
  *u = (struct util){75, 30};
  return fault("UTILIZATION");
}
status nvmlDeviceGetMemoryInfo(void *h, struct memory *m) {
  unsigned long long total = instance_of(h) < 0 ? 40ULL << 30 : slice_bytes(instance_of(h));
  *m = (struct memory){total, total / 4, total - total / 4};
  return fault("MEMORY");
}
status nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *mhz) {
  if (type != 1) return INVALID;
  *mhz = of(h)->clock;
  return OK;
}
status nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *count, unsigned *mhz) {
  (void)h;
  if (fault("CLOCKS")) return fault("CLOCKS");
  if (*count < 1) { *count = 1; return SMALL; }
  *count = 1;
  mhz[0] = 1215;
  return OK;
}
status nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory_mhz, unsigned *count, unsigned *mhz) {
  (void)h;
  if (memory_mhz != 1215) return INVALID;
  if (*count < 81) { *count = 81; return SMALL; }
  *count = 81;
  for (int i = 0; i < 81; i++) mhz[i] = 1410 - 15 * i;
  return OK;
}
status nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) { *mw = of(h)->limit; return fault("LIMIT"); }
status nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *mw) { (void)h; *mw = 400000; return OK; }
static void note_set(void) { /* in a file, where a test wants to know whether anything was set */
  const char *path = getenv("NVML_FAKE_SET_NOTED");
  FILE *file = path ? fopen(path, "a") : 0;
  if (file) { fputs("set\n", file); fclose(file); }
}
status nvmlDeviceSetPowerManagementLimit(void *h, unsigned mw) {
  note_set();
  if (fault("SET_LIMIT")) return fault("SET_LIMIT");
  if (mw < 100000 || mw > 400000) return INVALID;
  advance(of(h));
  of(h)->limit = mw;
  return OK;
}
status nvmlDeviceSetGpuLockedClocks(void *h, unsigned low, unsigned high) {
  note_set();
  if (fault("SET_CLOCK")) return fault("SET_CLOCK");
  (void)low;
  advance(of(h));
  of(h)->clock = high;
  return OK;
}
status nvmlDeviceResetGpuLockedClocks(void *h) {
  note_set();
  if (fault("SET_CLOCK")) return fault("SET_CLOCK");
  advance(of(h));
  of(h)->clock = 1410;
  return OK;
}
status nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *celsius) {
  (void)sensor;
  *celsius = said("TEMPERATURE", h, 55);
  return lost(h);
}
status nvmlDeviceGetTemperatureThreshold(void *h, unsigned which, unsigned *celsius) {
  *celsius = which == 1 ? 89 : 95;
  return lost(h);
}
status nvmlDeviceGetTotalEccErrors(void *h, unsigned type, unsigned counter, unsigned long long *count) {
  (void)counter;
  *count = type == 1 ? said("ECC", h, 0) : 0;
  return lost(h);
}
struct process { unsigned pid; unsigned long long memory; unsigned instance, compute; };
status nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, struct process *found) {
  long pid = said("PID", h, 0);
  if (!pid) { *count = 0; return OK; }
  if (!found) { *count = 1; return SMALL; }
  *count = 1;
  *found = (struct process){pid, 1 << 20, ~0u, ~0u};
  return OK;
}
struct event { void *device; unsigned long long type, data; unsigned instance, compute; };
static int event_set;
status nvmlEventSetCreate(void **set) { *set = &event_set; return fault("EVENTS"); }
status nvmlEventSetFree(void *set) { (void)set; return OK; }
status nvmlDeviceRegisterEvents(void *h, unsigned long long types, void *set) { (void)h; (void)types; (void)set; return OK; }
status nvmlEventSetWait_v2(void *set, struct event *event, unsigned timeout_ms) {
  (void)set; (void)timeout_ms;
  for (int i = 0; i < DEVICES; i++) {
    long xid = said("XID", &devices[i], 0);
    char variable[64];
    if (!xid) continue;
    snprintf(variable, sizeof variable, "NVML_FAKE_XID_%d", i);
    unsetenv(variable); /* reported once */
    *event = (struct event){&devices[i], 8, xid, ~0u, ~0u};
    return OK;
  }
  return 10;
}
#include "fake_nvml_mig.h"
