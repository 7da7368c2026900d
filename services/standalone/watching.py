"""When a process that does not answer is given up.

A process may be busy: a scheduler that decides on a hundred thousand jobs answers nobody for seconds, and on an
overloaded machine everybody is late. Only silence without work counts as hanging.

| the process | is replaced after |
|---|---|
| is stopped (SIGSTOP) | `STOPPED_MISSES` probes without an answer, about 8 s |
| uses no processor time, waits for no disk | `IDLE_S` |
| works, but does not answer | `BUSY_S` |
| has not answered since it was started | `START_S`, in which it did nothing |
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

EVERY_S = 5.0  #: Between two probes of a process that answers

AGAIN_S = 0.5  #: Between two probes of one that does not

THOROUGHLY_EVERY = 4  #: One in this many probes also asks what the process lacks

STOPPED_MISSES = 2
IDLE_MISSES = 4
IDLE_S = 15.0
BUSY_S = 120.0
START_S = 120.0
LONGEST_STEP_S = 15.0
"""What counts at most between two probes: if more has passed, this machine or the supervisor itself stood still."""

_IDLE_SHARE = 0.005  #: Of a processor: a process that uses less does nothing

_BUSY_SHARE = 0.1
"""Of a processor: one that answers, is not ready and uses less waits for others. A database that recovers does not."""


@dataclass(frozen=True)
class Activity:
    """What a process is doing: processor time used since its start, in seconds, and its state as `psutil` calls it."""

    cpu_s: float
    state: str

    @property
    def is_stopped(self) -> bool:
        return self.state == psutil.STATUS_STOPPED

    @property
    def is_at_work(self) -> bool:
        return self.state in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_TRACING_STOP)


def activity(pid: int) -> Activity | None:
    """Return what a process is doing; None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            return Activity(times.user + times.system, process.status())
    except psutil.Error:
        return None


class Patience:
    """Decides from consecutive probes when a process hangs."""

    def __init__(self, *, has_answered: bool = False) -> None:
        self.misses = 0
        self.has_answered = has_answered
        self._silent_s = self._idle_s = 0.0
        self._first: Activity | None = None
        self._last: Activity | None = None
        self._worked = False

    def timeout_s(self) -> float:
        """Return how long the next probe may take: longer once the process is known to be slow."""
        return 2.0 if self.misses < STOPPED_MISSES else 10.0

    def answered(self) -> None:
        self.__init__(has_answered=True)

    def missed(self, after_s: float, found: Activity) -> str:
        """Record a probe without an answer; return why the process has to be replaced, empty if it does not.

        Args:
            after_s: Time since the last answer, or the last call.
            found: What the process is doing now.
        """
        self.misses += 1
        step_s = min(after_s, LONGEST_STEP_S)
        self._silent_s += step_s
        self._first = self._first or found
        if not found.is_at_work and found.cpu_s - (self._last or found).cpu_s <= _IDLE_SHARE * step_s:
            self._idle_s += step_s
        self._last = found
        self._worked |= found.is_at_work
        if found.is_stopped:
            return "it was stopped" if self.misses >= STOPPED_MISSES else ""
        if not self.has_answered:
            return f"it did nothing for {START_S:.0f} s and gave no answer" if self._idle_s >= START_S else ""
        used_s = found.cpu_s - self._first.cpu_s
        if self._worked or used_s > _IDLE_SHARE * self._silent_s:
            return f"it worked, but gave no answer for {BUSY_S:.0f} s" if self._silent_s >= BUSY_S else ""
        if self.misses >= IDLE_MISSES and self._silent_s >= IDLE_S:
            return f"it did nothing and gave no answer for {self._silent_s:.0f} s"
        return ""


class Effort:
    """Tells at each look whether a starting process, or anything that it has started, has worked since the last one."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def is_made(self, after_s: float, cpu_s: Mapping[int, float], *, answers: bool) -> bool:
        """Return whether enough processor time was used.

        Args:
            after_s: Time since the last look.
            cpu_s: What each of the processes has used since its start, by its id.
            answers: Whether it has answered already, and only has to become ready.
        """
        used_s = sum(max(0.0, now_s - self._before.get(pid, 0.0)) for pid, now_s in cpu_s.items())
        self._before = dict(cpu_s)
        return used_s > (_BUSY_SHARE if answers else _IDLE_SHARE) * after_s


def cpu_of(pid: int) -> dict[int, float]:
    """Return the processor time, in seconds, of a process and of each process that it has started, by id."""
    found: dict[int, float] = {}
    for each in (pid, *(child.pid for child in children_of(pid))):
        if (seen := activity(each)) is not None:
            found[each] = seen.cpu_s
    return found


def children_of(pid: int) -> list[psutil.Process]:
    """Return the processes that `pid` has started, and all their descendants."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def kill_stopped_children(pid: int) -> list[int]:
    """Kill the stopped processes among those that `pid` started; return their ids."""
    killed: list[int] = []
    for child in children_of(pid):
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.status() == psutil.STATUS_STOPPED:
                child.kill()
                killed.append(child.pid)
    return killed
