"""The small process between the agent and one rank: it starts the command, watches its lease and keeps its exit code.

A rank is what a gang runs on one node: one process, or one for each of the node's GPUs. With several, the first that
fails ends the others, and its exit code is the rank's.

Run as ``python -I -S shim.py FOLDER``, in a session of its own, so that the agent may be killed, upgraded or restarted
while ranks run. It imports the standard library only and speaks to the agent through small files in FOLDER:

``spec``     written by the agent: what to run (each entry ends in NUL)
``lease``    written by the agent at every renewal: deadline and length, seconds on ``clock()``
``stop``     written by the agent: ``grace_s`` and ``cause``, and ``detail`` if it is the rank's own fault; then SIGTERM
             to the shim, which looks at once
``lock``     held (flock) for as long as the shim lives: at most one shim runs the command, ever
``started``  written by the shim before the command may run; a second shim that finds it gives up
``stop-at``  written by the shim, before SIGTERM: when the rank will be killed, UTC seconds, for the job to read. With a
             time limit it is there from the start
``exited``   written by the shim when nothing of the rank is left
``order``    written by the shim: in which order ``stdout`` and ``stderr`` grew (see ``Order``)
``times``    written by the shim: when they grew (see ``Times``)
``exec.sock`` made by the agent for a moment, to run another command beside the rank's (see ``exec_shim``)

Secrets come through standard input instead; those that are files go into a folder in memory, which the shim removes
when nothing of the rank is left.

A gang whose lease runs out dies even if the agent is dead: SIGTERM when the last third of the lease (or the grace, if
that is shorter) begins, SIGKILL at the deadline. A time limit is enforced in the same way: SIGTERM when it is over,
SIGKILL after the grace. If the shim is killed, the command is killed with it (PR_SET_PDEATHSIG).
"""

# ruff: noqa: SIM105  contextlib would add a fifth to what a shim takes to start

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import sys
import time
from itertools import pairwise

TYPE_CHECKING = False  # not that of typing, whose import would slow each start
if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_agent.enclosure import Enclosure
    from gpu_agent.exec_shim import Request, Sessions

SPEC, LEASE, STOP, LOCK, STARTED, EXITED = "spec", "lease", "stop", "lock", "started", "exited"
STOP_AT = "stop-at"
STDOUT, STDERR, ORDER, TIMES = "stdout", "stderr", "order", "times"
EXEC_DOOR = "exec.sock"

TWIN_STATUS = 75
LOOK_S = 1.0
"""The longest that the shim sleeps before it reads lease and stop request again."""
LEFTOVER_GRACE_S = 5.0  #: How long processes that the command leaves behind have after SIGTERM
NOT_FOUND, NOT_EXECUTABLE = 127, 126

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESERVED_BYTES = 4096
_MORE_OUTPUT_BYTES = 16 << 20
"""What a rank may still write once the disk has no more to give to its output, or once it is to end for its output."""
_NEAR_FULL_BYTES, _NEAR_FULL_LOOK_S = 4 << 30, 0.1
"""A disk that may be full within a second or so is looked at more often."""
_LONGEST_DETAIL = 900
_LASTING = (
    *(errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS),
    errno.E2BIG,
)
"""Errors of folders and programs that trying again does not mend, besides what is missing."""
_FULL_DISK_PAUSE_S = 1.0
_CLEANUP_S = 30.0
ORDER_RECORD = struct.Struct("<QQ")
_ORDER_SHARE, _ORDER_POLL_S, _ORDER_LONG_PAUSE_S = 0.05, 0.25, 1.0
_ORDER_RECORDS = 1 << 20
_ORDER_END = 1 << 63
"""Of what is put in order: a job can make its output as large as files can be, empty it, and do so again."""
_ORDER_LINES_BYTES = 1 << 20
_ORDER_SNAPSHOTS = 8
TIMES_RECORD = struct.Struct("<dQQQ")
TIMES_RECORDS = 1 << 13
_TIMES_PAUSE_S = 1.0
_IN_MODIFY, _IN_NONBLOCK, _IN_CLOEXEC = 0x2, os.O_NONBLOCK, os.O_CLOEXEC
_INOTIFY_EVENT = struct.Struct("iIII")


def clock() -> float:
    """Return seconds on the clock of leases, which keeps running while the host sleeps and cannot be set."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_facts(path: str) -> dict[str, str] | None:
    """Return the ``name=value`` lines of a file; None if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    except FileNotFoundError:
        return None


def write_facts(path: str, facts: dict[str, object], *, durable: bool = True) -> None:
    """Replace a file by ``name=value`` lines, all or nothing; if ``durable``, they are on disk when this returns."""
    text = "".join(f"{name}={' '.join(str(value).split())}\n" for name, value in facts.items() if value is not None)
    descriptor = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, data := text.encode()) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.ftruncate(descriptor, len(data))  # after the write: the blocks reserved for the exit code stay until then
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(path + ".tmp", path)
    if durable:
        sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder: str) -> None:
    """Make new names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kernel_boot() -> str:
    """Return an id of this boot of the host; empty if there is none. No process of an earlier boot is alive."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class _Process:
    """One process of the rank: its program and arguments, and the variables that only it has."""

    def __init__(self, name: str = "", argv: list[bytes] | None = None) -> None:
        self.name, self.argv = name, argv or []
        self.environment: dict[bytes, bytes] = {}


_SINGLE: dict[bytes, Callable[[bytes], object]] = {
    **{b"grace_s": float, b"time_limit_s": float, b"output_bytes": int, b"reserve_bytes": int},
    **{b"working_dir": bytes, b"make_dir": bytes, b"secrets_dir": bytes},
}
"""Entries of a spec that occur once, and how each is read."""


class _Spec:
    """What the agent asked for; entries are ``name=value``, and some of them repeat."""

    def __init__(self, data: bytes) -> None:
        self.cleanup: list[bytes] = []
        self.environment: dict[bytes, bytes] = {}
        self.grace_s = 0.0
        self.time_limit_s = 0.0
        self.working_dir = b"/"
        self.make_dir = b""
        self.secrets_dir = b""
        self.secret_files: list[tuple[bytes, bytes]] = []
        self.user: list[int] = []
        self.output_bytes = self.reserve_bytes = 0
        self.enclosure: Enclosure | None = None
        common = _Process()
        processes: list[_Process] = []
        for entry in data.split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == b"process":
                processes.append(_Process(os.fsdecode(value)))
            elif name == b"argv":
                (processes[-1] if processes else common).argv.append(value)
            elif name == b"env":
                variable, _, content = value.partition(b"=")
                (processes[-1].environment if processes else self.environment)[variable] = content
            elif name == b"cleanup":
                self.cleanup.append(value)
            elif name in _SINGLE:
                setattr(self, name.decode(), _SINGLE[name](value))
            elif name == b"user":
                self.user = [int(number) for number in value.split()]
            elif name == b"confine":
                if self.enclosure is None:
                    import enclosure  # pyright: ignore[reportMissingImports]  beside this file, which is no package here

                    self.enclosure = enclosure.Enclosure()
                self.enclosure.add(value)
        self.processes = processes or [common]
        for process in self.processes:
            process.argv = process.argv or common.argv

    def add_secrets(self, data: bytes) -> None:
        """Add what came through standard input: entries ``env`` and ``secret_file``, each ``NAME=value``."""
        for entry in data.split(b"\0"):
            kind, _, value = entry.partition(b"=")
            name, _, content = value.partition(b"=")
            if kind == b"env":
                self.environment[name] = content
            elif kind == b"secret_file":
                self.secret_files.append((name, content))


def spec_bytes(entries: list[tuple[str, str]]) -> bytes:
    """Return the content of the ``spec`` file.

    Entries: ``argv``, ``cleanup`` and ``env`` (``NAME=value``), each repeated; ``working_dir``, ``grace_s``,
    ``time_limit_s``, ``make_dir`` (made if it is missing), ``secrets_dir`` (for the secret files among the entries that
    come through standard input), ``user`` (the user id, group id and further groups to run as, separated by spaces),
    ``confine`` (repeated: see ``enclosure``), ``output_bytes`` (what both streams may use of the disk),
    ``reserve_bytes`` (what they must leave free on it). ``process`` begins a process and names it; ``env`` after it is
    for this process alone, and so is ``argv``, which replaces the common one. Without any ``process`` there is one
    process.
    """
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in entries)


def write_lease(path: str, deadline: float, length_s: float) -> None:
    """Renew a lease in place and with constant length, because the disk may be full."""
    line = f"{deadline:020.3f} {length_s:012.3f} "
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, (line * 2).encode(), 0)
    finally:
        os.close(descriptor)


class _Lease:
    """The newest lease that was read; one that cannot be read leaves the previous one in force."""

    def __init__(self) -> None:
        self.deadline = float("-inf")
        self._length_s = 0.0

    def read(self) -> None:
        try:
            with open(LEASE, encoding="ascii") as file:
                deadline, length_s, *again = map(float, file.read().split())
        except (OSError, ValueError):
            return
        if again == [deadline, length_s]:  # else it was read while it was being written
            self.deadline, self._length_s = deadline, length_s

    def warn_at(self, grace_s: float) -> float:
        """The time to send SIGTERM, so that the rank can save its work before the deadline."""
        return self.deadline - min(grace_s, self._length_s / 3)


class _Stop:
    """The newest stop request; a further request may shorten the grace period."""

    def __init__(self) -> None:
        self.cause = ""
        self.detail = ""
        self.kill_at = float("inf")
        self._seen = 0

    def read(self, now: float) -> None:
        try:
            written = os.stat(STOP).st_mtime_ns
        except FileNotFoundError:
            return
        if written != self._seen and (facts := read_facts(STOP)) is not None:
            self._seen = written
            self.cause, self.detail = facts.get("cause", "stop"), facts.get("detail", "")
            self.kill_at = min(self.kill_at, now + float(facts.get("grace_s", 0)))


class Order:
    """Records the order in which the two streams of a rank grow, so that they can be shown together.

    Both streams are files that the job writes itself: nothing is copied, and a job is never slowed down. The kernel
    queues one event for each change from one stream to the other (inotify merges only equal neighbours), and the sizes
    say how much was written. Together they give the order; where the shim finds several changes at once, whole lines
    are distributed over them.

    The file has records of 16 bytes, ``combined_end`` and ``2 * stream_end + stream``: the bytes of the combined output
    from the previous record up to ``combined_end`` are those of ``stream`` (0 is stdout) up to ``stream_end``. Only the
    last record changes, while its stream grows.
    """

    def __init__(self) -> None:
        self._files = [os.open(name, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600) for name in (STDOUT, STDERR)]
        self._file = os.open(ORDER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._known = [0, 0]
        self._pending: list[int] = []  # changes that were seen before what was written there
        self._records: list[tuple[int, int]] = []  # those that are not on disk, and the last one that is
        self._first = 0  # number of the first of them
        self._next_look = 0.0
        self._is_behind = False  # more was written than the last look took in, and its events may have been read
        self._watches: dict[int, int] = {}
        self._events = self._watch()

    def _watch(self) -> int:
        """Return a descriptor for events; -1 if there are none, and only the sizes give the order."""
        if sys.platform != "linux":
            return -1
        library = ctypes.CDLL(None)
        events = int(library.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        if events >= 0:
            for stream, name in enumerate((STDOUT, STDERR)):
                self._watches[library.inotify_add_watch(events, name.encode(), _IN_MODIFY)] = stream
        return events

    def wait(self, wake: int, until: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Record the order until ``wake`` can be read, ``until`` has passed, or there is enough output."""
        while (now := clock()) < until and not is_enough():
            pausing, looks_anyway = now < self._next_look, self._events < 0 or self._is_behind
            watched = [wake] if pausing or self._events < 0 else [wake, self._events]
            limit = min(until, self._next_look) if pausing or looks_anyway else until
            ready = select.select(watched, [], [], max(limit - now, 0.0))[0]
            if self._events in ready or (looks_anyway and clock() >= self._next_look):
                self.look()
            if wake in ready:
                return

    def look(self) -> None:
        """Record what was written since the last call."""
        began = clock()
        sizes = self._sizes()
        runs = self._runs()
        is_quiet = self._sizes() == sizes
        for stream, size in enumerate(sizes):
            if size < self._known[stream]:
                self._known[stream] = 0  # the job has truncated it: what it writes now comes after what it wrote before
        grown = [range(known, size) for known, size in zip(self._known, sizes, strict=True)]
        runs += [stream for stream in (0, 1) if grown[stream] and stream not in runs]
        pieces = [self._pieces(stream, grown[stream], runs.count(stream)) for stream in (0, 1)]
        self._pending = []
        for stream in runs:
            if pieces[stream]:
                self._add(stream, pieces[stream].pop(0))
            elif not is_quiet and self._pending[-1:] != [stream]:
                self._pending.append(stream)
        self._known, self._is_behind = sizes, not is_quiet
        self._write()
        pause_s = _ORDER_POLL_S  # looking takes a small share of a core at most, however much a job writes
        if self._events >= 0:
            pause_s = min((clock() - began) / _ORDER_SHARE, _ORDER_LONG_PAUSE_S)
        if self._first + len(self._records) > _ORDER_RECORDS:
            pause_s = _ORDER_LONG_PAUSE_S
        self._next_look = clock() + pause_s

    def ends(self) -> tuple[int, int, int]:
        """Return the sizes of standard output, of standard error, and of what is in order of both."""
        stdout, stderr = self._sizes()
        return stdout, stderr, self._records[-1][0] if self._records else 0

    def disk_bytes(self) -> int:
        """Return what both streams use of the disk, without what the agent has discarded."""
        return sum(os.fstat(file).st_blocks for file in self._files) * 512

    def _sizes(self) -> list[int]:
        """Return both sizes at one moment: if one is from before or after the other, the order is lost."""
        sizes = [os.fstat(file).st_size for file in self._files]
        for _ in range(_ORDER_SNAPSHOTS):
            if (first := os.fstat(self._files[0]).st_size) == sizes[0]:
                break
            sizes = [first, os.fstat(self._files[1]).st_size]
        return sizes

    def _runs(self) -> list[int]:
        """Return the order in which the streams were written, one entry for each change."""
        runs = self._pending
        while self._events >= 0:
            try:
                data = os.read(self._events, 1 << 16)
            except BlockingIOError:
                break
            for watch, _, _, _ in _INOTIFY_EVENT.iter_unpack(data):
                stream = self._watches.get(watch)
                if stream is not None and runs[-1:] != [stream]:
                    runs.append(stream)
        return runs

    def _pieces(self, stream: int, grown: range, runs: int) -> list[range]:
        """Distribute new output over the times at which it was written: whole lines, evenly."""
        if not grown:
            return []
        if runs <= 1 or len(grown) > _ORDER_LINES_BYTES:
            return [grown]
        text = os.pread(self._files[stream], len(grown), grown.start)
        ends: list[int] = []
        while end := text.find(b"\n", ends[-1] if ends else 0) + 1:
            ends.append(end)
        if ends[-1:] != [len(text)]:
            ends.append(len(text))
        runs = min(runs, len(ends))
        cuts = [0, *(ends[len(ends) * (run + 1) // runs - 1] for run in range(runs))]
        return [range(grown.start + first, grown.start + last) for first, last in pairwise(cuts)]

    def _add(self, stream: int, piece: range) -> None:
        combined_end, last = self._records[-1] if self._records else (0, -1)
        if combined_end + len(piece) > _ORDER_END:
            return
        if self._records and last == 2 * piece.start + stream:
            self._records[-1] = (combined_end + len(piece), 2 * piece.stop + stream)
        else:
            self._records.append((combined_end + len(piece), 2 * piece.stop + stream))

    def _write(self) -> None:
        """Write the records to disk; if it is full, they wait for the next time."""
        data = b"".join(ORDER_RECORD.pack(*record) for record in self._records)
        try:
            written = os.pwrite(self._file, data, self._first * ORDER_RECORD.size)
        except OSError:
            return
        done = min(written // ORDER_RECORD.size, len(self._records) - 1)
        if done > 0:
            self._first += done
            del self._records[:done]


class Times:
    """Records when the output of a rank grew, so that it can be read from a time on.

    The file has records of 32 bytes, one a second while the output grows: a time, UTC seconds, and the output's ends
    at that time (see ``Order.ends``). Once there are ``TIMES_RECORDS``, every other one is dropped and they are made
    half as often, so that the file stays small and a time is exact to a small share of how long the rank has run.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ends: tuple[int, ...] = ()
        self._records = bytearray()
        self._written = 0
        self._pause_s = _TIMES_PAUSE_S
        self._next_look = 0.0

    def look(self, *, is_last: bool = False) -> None:
        """Record the ends if they have moved; what a full disk does not take is tried again at the next look."""
        if not is_last and clock() < self._next_look:
            return
        self._next_look = clock() + self._pause_s
        if (ends := self._order.ends()) != self._ends:
            self._ends = ends
            self._records += TIMES_RECORD.pack(time.time(), *ends)
            if len(self._records) >= TIMES_RECORDS * TIMES_RECORD.size:
                size = TIMES_RECORD.size
                kept = range(size, len(self._records), 2 * size)
                self._records = bytearray().join(self._records[begin : begin + size] for begin in kept)
                self._written, self._pause_s = 0, 2 * self._pause_s
        if self._written < len(self._records):
            self._write()

    def _write(self) -> None:
        try:
            file = os.open(TIMES, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            self._written += os.pwrite(file, self._records[self._written :], self._written)
            os.ftruncate(file, self._written)
        except OSError:
            pass
        finally:
            os.close(file)


class _OutputLimit:
    """What both streams of a rank may use of the disk, checked whenever they have grown.

    Besides the limit there is a share of the disk: half of what is free beyond the reserve, so that no job fills a disk
    that is small, or fuller than usual. A rank over its share because others have filled the disk may continue, as long
    as it hardly writes.
    """

    def __init__(self, output_bytes: int, reserve_bytes: int, taken: Callable[[], int]) -> None:
        self._output_bytes = output_bytes
        self._reserve_bytes = reserve_bytes
        self._taken = taken
        self._fair_bytes = 0  # what it took when that was last within its share
        self._end_bytes = float("inf")
        self.is_near = False

    def excess(self) -> str:
        """Return why the rank must end; empty while its output is within the limit."""
        taken = self._taken()
        if self._output_bytes and taken > self._output_bytes:
            return f"Its output took more than {self._output_bytes / 2**20:,.0f} MiB of the disk at once."
        if not self._reserve_bytes:
            return ""
        try:
            disk = os.statvfs(".")
        except OSError:
            return ""
        left = max(disk.f_bavail * disk.f_frsize - self._reserve_bytes, 0)
        self.is_near = left < _NEAR_FULL_BYTES
        if taken <= left:
            self._fair_bytes = taken
        if taken <= self._fair_bytes + _MORE_OUTPUT_BYTES:
            return ""
        return (
            f"Its output took {taken / 2**20:,.0f} MiB of a disk on which {left / 2**20:,.0f} MiB were left; "
            "what jobs print must not fill it."
        )

    def ends(self) -> None:
        """Record that the rank was told to end because of its output."""
        self._end_bytes = self._taken() + _MORE_OUTPUT_BYTES

    def goes_on(self) -> bool:
        """Return whether a rank that was told to end keeps on writing."""
        return self._taken() > self._end_bytes


class _Shim:
    def __init__(self, spec: _Spec) -> None:
        self._spec = spec
        self._lease = _Lease()
        self._stop = _Stop()
        self._order = Order()
        self._times = Times(self._order)
        self._output = _OutputLimit(spec.output_bytes, spec.reserve_bytes, self._order.disk_bytes)
        self._sessions: Sessions | None = None
        self._running: dict[int, str] = {}
        self._groups: set[int] = set()
        self._limit_at = float("inf")
        self._code: int | None = None
        self._ending = ""  # who ends the rank, once somebody does
        self._ended_by = "itself"
        self._detail = ""
        self._memory_kill: dict[str, int] = {}
        self._kill_at = float("inf")
        self._was_signalled = False
        self._wake, wake_in = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake_in, False)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_stop_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _on_stop_signal(self, *_: object) -> None:
        self._was_signalled = True

    def run(self) -> None:
        gate_out, gate_in = os.pipe()
        self._exec_error, error_in = os.pipe()
        os.set_blocking(self._exec_error, False)
        shim = os.getpid()
        try:
            if self._spec.enclosure is not None:
                self._spec.enclosure.make(self._spec.user)
        except OSError as failure:  # nothing is run
            self._code, self._ended_by = NOT_EXECUTABLE, "refused"
            self._detail = f"its processes cannot be confined on this node: {failure.strerror} ({failure.filename})"
            self._write_exit()
            return
        for process in self._spec.processes:
            pid = os.fork()
            if pid == 0:
                os.close(gate_in)
                _become(self._spec, process, error_in, shim, gate=gate_out)
            self._running[pid] = process.name
            self._groups.add(pid)
        os.close(gate_out)
        os.close(error_in)
        write_facts(
            STARTED, {"pid": min(self._running), "shim": shim, "started_at": time.time(), "kernel_boot": kernel_boot()}
        )
        self._look(clock())
        if self._ending:
            self._signal(signal.SIGKILL)
        else:
            if self._spec.time_limit_s > 0:
                self._limit_at = clock() + self._spec.time_limit_s
                self._say_stop_at(self._limit_at + self._spec.grace_s)
            try:
                os.write(gate_in, b"g" * len(self._running))
            except BrokenPipeError:  # none of them could be set up, as their error says
                pass
        os.close(gate_in)
        while not self._is_empty():
            self._sleep()
            self._look(clock())
        if self._spec.cleanup:
            _run_for(self._spec.cleanup, _CLEANUP_S)
        self._order.look()
        self._times.look(is_last=True)
        if self._spec.secret_files:
            remove_secrets(self._spec.secrets_dir)
        self._write_exit()

    def _look(self, now: float) -> None:
        """Read lease and stop request, and act on them; record when the output grew."""
        self._times.look()
        self._lease.read()
        self._stop.read(now)
        if self._stop.cause:
            if self._stop.detail and not self._ending:
                self._code, self._ended_by = -signal.SIGXFSZ, "itself"  # however it takes that
            self._end(self._stop.cause, self._stop.kill_at, self._stop.detail)
        elif self._was_signalled:
            self._end("host", now + self._spec.grace_s, "the process that supervises the rank was told to end")
        if now >= self._lease.warn_at(self._spec.grace_s):
            self._end("lease", now + self._spec.grace_s, "the lease expired: no contact with the control plane")
        if now >= self._limit_at:
            limit = f"It reached its time limit of {self._spec.time_limit_s:g} s."
            self._end("time_limit", now + self._spec.grace_s, limit)
        if not self._ending and (excess := self._output.excess()):
            self._code, self._ended_by = -signal.SIGXFSZ, "itself"  # however it takes that
            self._end("output", now + min(self._spec.grace_s, LEFTOVER_GRACE_S), excess)
            self._output.ends()
        if self._output.goes_on():
            self._kill_at = now
        if now >= min(self._kill_at, self._lease.deadline):
            if self._code is None and not self._detail:
                self._detail = "it outlived its grace period and was killed"
            self._signal(signal.SIGKILL)
        self._look_at_sessions(now)

    def _look_at_sessions(self, now: float) -> None:
        """Start what the agent asks for beside the rank, and end sessions that nobody is connected to any more."""
        if self._sessions is None:
            if not os.path.exists(EXEC_DOOR):
                return
            try:
                import exec_shim  # pyright: ignore[reportMissingImports]  beside this file, which is no package here
            except ImportError:  # an upgrade has removed it: the rank goes on, and the agent says that nobody answers
                return
            self._sessions = exec_shim.Sessions(self._enter)
        self._sessions.look(now)

    def _enter(self, request: Request, error: int) -> int:
        """Start a command in the environment of one of the rank's processes; return its process id."""
        process = _Process("", request.argv)
        process.environment = {**self._spec.processes[request.process].environment, **request.variables}
        shim = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(self._spec, process, error, shim, connect=request.connect)
        return pid

    def _end(self, cause: str, kill_at: float, detail: str = "") -> None:
        """Send SIGTERM the first time; later requests may shorten the grace period but never lengthen it."""
        earlier = self._kill_at
        self._kill_at = min(self._kill_at, kill_at) if cause == "stop" or not self._ending else self._kill_at
        if self._kill_at < earlier:
            self._say_stop_at(self._lease.deadline if cause == "lease" else self._kill_at)
        if not self._ending:
            self._ending, self._detail = cause, self._detail or detail
            self._signal(signal.SIGTERM)

    def _say_stop_at(self, kill_at: float) -> None:
        """Tell the job by when it must have saved its work."""
        try:
            with open(STOP_AT + ".tmp", "w", encoding="ascii") as file:
                file.write(f"{time.time() + kill_at - clock():.3f}\n")
            os.chmod(STOP_AT + ".tmp", 0o644)
            os.replace(STOP_AT + ".tmp", STOP_AT)
        except OSError:  # a full disk: SIGTERM tells it all the same
            pass

    def _signal(self, number: int) -> None:
        """Signal the processes' groups, and processes that left them and became children of this process."""
        for group in (*self._groups, *(self._sessions.pids() if self._sessions else ())):
            try:
                os.killpg(group, number)
            except (ProcessLookupError, PermissionError):
                pass
        if not self._running or number == signal.SIGKILL:
            for pid in _children():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    pass

    def _is_empty(self) -> bool:
        """Collect exited processes; return True once nothing of the rank is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid, status = -1, 0
            if pid > 0:
                if pid in self._running:
                    self._process_exited(self._running.pop(pid), os.waitstatus_to_exitcode(status))
                elif self._sessions is not None:
                    self._sessions.exited(pid, os.waitstatus_to_exitcode(status))
                continue
            # A group that has become empty is forgotten at once: its number may be given to a stranger.
            self._groups = {group for group in self._groups if group in self._running or _group_exists(group)}
            return pid < 0 and not self._groups

    def _process_exited(self, name: str, code: int) -> None:
        """Record how a process ended: the first that fails ends the others, and decides how the rank ended."""
        if code and not self._code:
            self._code, self._ended_by = code, self._ending or "itself"
            could_run = self._read_exec_error()
            if could_run and not self._ending:
                how = f"exited with status {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
                self._detail = f"The process of {name} {how}." if name else ""
                self._memory_kill = self._spec.enclosure.memory_kill() if self._spec.enclosure is not None else {}
            if self._running:
                self._end("failed", clock() + self._spec.grace_s)
        if self._running:
            return
        if not self._code:
            self._code, self._ended_by = 0, self._ending or "itself"
        leftover_kill_at = clock() + LEFTOVER_GRACE_S
        if self._ending == "failed":
            self._kill_at = min(self._kill_at, leftover_kill_at)
        self._end("leftover", leftover_kill_at)
        if self._sessions is not None:
            self._sessions.hang_up(clock())
        self._signal(signal.SIGTERM)

    def _read_exec_error(self) -> bool:
        """Return True unless the command could not be run; then code and detail say why."""
        try:
            failure = os.read(self._exec_error, 4096).decode(errors="replace").partition("\n")[0]
        except BlockingIOError:
            failure = ""
        if not failure:
            return True
        number, _, what = failure.partition(" ")
        missing = int(number) in (errno.ENOENT, errno.ENOTDIR)
        self._code = NOT_FOUND if missing else NOT_EXECUTABLE
        if not self._ending and what.startswith("cannot ") and (missing or int(number) in _LASTING):
            self._ended_by = "cannot_start"
        self._detail = f"{what}: {os.strerror(int(number))}"
        if int(number) == errno.E2BIG:  # secrets may have become longer since the submission
            self._detail += " (arguments, variables and secrets together)"
        return False

    def _sleep(self) -> None:
        """Wait for a signal, or until something is due; meanwhile record the order of the output."""
        due, now = min(self._kill_at, self._lease.deadline), clock()
        if not self._ending:
            due = min(due, self._lease.warn_at(self._spec.grace_s), self._limit_at)
        look_s = LOOK_S if self._running else 0.05
        if self._output.is_near:
            look_s = min(look_s, _NEAR_FULL_LOOK_S)
        self._order.wait(self._wake, now + min(max(due - now, 0.02), look_s), self._is_too_much)
        try:
            os.read(self._wake, 512)
        except BlockingIOError:
            pass

    def _is_too_much(self) -> bool:
        """Return whether the next look ends or kills the rank because of its output."""
        return self._output.goes_on() if self._ending else bool(self._output.excess())

    def _write_exit(self) -> None:
        """Write the end to disk, however long it takes: nobody else knows it, and without it the job runs again."""
        detail = self._detail[:_LONGEST_DETAIL] or None  # what is reserved on the disk has room for that
        facts: dict[str, object] = {"code": self._code, "ended_by": self._ended_by, "detail": detail}
        facts |= self._memory_kill
        facts["ended_at"] = time.time()
        while True:
            try:
                write_facts(EXITED, facts)
                return
            except OSError:
                time.sleep(_FULL_DISK_PAUSE_S)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _to_files() -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, name in ((1, STDOUT), (2, STDERR)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), target)


def _become(
    spec: _Spec,
    process: _Process,
    error: int,
    shim: int,
    *,
    gate: int | None = None,
    connect: Callable[[], None] = _to_files,
) -> None:
    """Turn the forked child into the command, which waits at the ``gate``; never returns."""
    what = "the rank cannot be set up"
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        _be_killable()
        for number in (*_STOP_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        connect()
        if spec.enclosure is not None:
            what = "its processes cannot be confined on this node"
            spec.enclosure.enter()
        _change_user(spec.user)
        if spec.enclosure is not None:
            spec.enclosure.seal()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # not before: becoming another user clears it
        if os.getppid() != shim or (gate is not None and os.read(gate, 1) != b"g"):
            os._exit(NOT_EXECUTABLE)
        if spec.make_dir:
            what = f"cannot make the folder {os.fsdecode(spec.make_dir)}"
            os.makedirs(spec.make_dir, exist_ok=True)
        what = f"cannot enter the working directory {os.fsdecode(spec.working_dir)}"
        os.chdir(spec.working_dir)
        what = f"cannot run {os.fsdecode(process.argv[0])}"
        _execute(process.argv, {**spec.environment, **process.environment})
    except OSError as failure:
        os.write(error, f"{failure.errno} {what}".encode(errors="replace")[:500] + b"\n")
    finally:
        os._exit(NOT_FOUND)


def _execute(argv: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Replace this process by the program, looked up as a shell would; raise an error if it cannot be run.

    Not ``os.execvpe``: that imports a module, which another user may not be able to read.
    """
    refusal: OSError = FileNotFoundError(errno.ENOENT, "")
    folders = [b""] if b"/" in argv[0] else environment.get(b"PATH", os.defpath.encode()).split(b":")
    for folder in folders:
        try:
            os.execve(os.path.join(folder, argv[0]), argv, environment)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                refusal = error
    raise refusal


def _change_user(user: list[int]) -> None:
    """Become the user that jobs run as; the output becomes theirs too."""
    if not user or user[0] == os.geteuid():
        return
    os.fchown(1, user[0], user[1])
    os.fchown(2, user[0], user[1])
    os.setgroups(user[2:])
    os.setgid(user[1])
    os.setuid(user[0])


def _be_killable() -> None:
    """Let the kernel kill jobs before the agent and the shims if memory runs out, whatever protects these."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < 0:
                file.write("0")
    except (OSError, ValueError):
        pass


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _run_for(argv: list[bytes], seconds: float) -> None:
    try:
        pid = os.posix_spawnp(argv[0], argv, os.environ)
    except OSError:
        return
    deadline = clock() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if clock() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(folder: str) -> int:
    """Run the rank in this folder; return 75 if another shim is running it, or ran it."""
    os.chdir(folder)
    lock = os.open(LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return TWIN_STATUS
    if os.path.exists(STARTED) or os.path.exists(EXITED):
        return TWIN_STATUS
    with open(SPEC, "rb") as file:
        spec = _Spec(file.read())
    _reserve()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if spec.secrets_dir:
        spec.add_secrets(b"".join(iter(lambda: os.read(0, 1 << 16), b"")))
        try:
            _write_secrets(spec)
        except OSError as failure:
            raise SystemExit(f"its secrets cannot be written: {failure}") from None
    _Shim(spec).run()
    return 0


def _write_secrets(spec: _Spec) -> None:
    """Write the secrets that are files, readable only by the job's user."""
    if not spec.secret_files:
        return
    above, name = os.path.split(spec.secrets_dir)
    parent = open_own_folder(above)
    remove_secrets(spec.secrets_dir)  # of a shim that was killed before it started anything
    os.mkdir(name, 0o700, dir_fd=parent)
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    owner = spec.user[:2] if spec.user and spec.user[0] != os.geteuid() else [-1, -1]
    for name, content in spec.secret_files:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400, dir_fd=folder)
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchown(descriptor, *owner)
    os.fchown(folder, *owner)
    os.close(folder)
    os.close(parent)


def open_own_folder(folder: bytes | str) -> int:
    """Return a descriptor of a folder that nobody else can change, which is made if it is missing.

    In memory, where everybody may make folders, somebody else may have made it since the last check.

    Raises:
        PermissionError: It belongs to another user, or others may write there.
        OSError: It cannot be made, or is not a folder.
    """
    try:
        os.mkdir(folder, 0o711)  # it holds the folders of all ranks
    except FileExistsError:
        pass
    descriptor = os.open(folder, _FOLDER_FLAGS)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "others can change this folder", os.fsdecode(folder))
    return descriptor


def remove_secrets(folder: bytes | str) -> None:
    """Remove a folder of secret files, if there is one. A job may have put anything there, so no link is followed."""
    try:
        descriptor = os.open(folder, _FOLDER_FLAGS)
    except OSError:
        return
    try:
        for name in os.listdir(descriptor):
            try:
                os.unlink(name, dir_fd=descriptor)
            except OSError:
                pass
        os.rmdir(folder)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _reserve() -> None:
    """Reserve disk blocks for the exit code, so that it is not lost if the disk fills up."""
    descriptor = os.open(EXITED + ".tmp", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, _RESERVED_BYTES)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
