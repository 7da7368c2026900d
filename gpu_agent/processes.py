"""CPU time of processes including their descendants, and a mark that descendants inherit. Linux only."""

import os
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

_KILL_ROUNDS = 50


def kill_marked(mark: str) -> int:
    """Kill every process that was started with ``mark`` (``NAME=value``) in its environment; return their number.

    Everything that a rank started inherits the mark, whatever session or group it is in.
    """
    killed = 0
    for _ in range(_KILL_ROUNDS):
        found = [pid for pid in _pids() if _has_mark(pid, mark.encode())]
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed += len(found)
        time.sleep(0.02)
    return killed


def cpu_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the CPU time that each root process and all its descendants have used, including ended ones.

    Args:
        roots: Process ids by name; the answer has the same names, without those whose process is gone.
    """
    if not roots:
        return {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for pid in _pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))  # user and system, its own and that of children it has waited for
    families = {pid: name for name, pid in roots.items()}
    totals = dict.fromkeys((name for name, pid in roots.items() if pid in ticks), 0)
    for pid, used in ticks.items():
        ancestor = pid
        while ancestor not in families and ancestor in parents:
            ancestor = parents[ancestor]
        if ancestor in families:
            totals[families[ancestor]] += used
    return {name: total / ticks_per_s for name, total in totals.items()}


class ProcessTable:
    """Names and parents of processes, each read once, on demand."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, int] | None] = {}

    def name_of(self, pid: int) -> str | None:
        """Return the name of a process; None if there is none with that id here."""
        found = self._read(pid)
        return found[0] if found else None

    def descends(self, pid: int, roots: Collection[int]) -> bool:
        """Return whether a process is one of these, or descends from one."""
        while pid > 1:
            if pid in roots:
                return True
            found = self._read(pid)
            if found is None:
                return False
            pid = found[1]
        return False

    def _read(self, pid: int) -> tuple[str, int] | None:
        if pid not in self._known:
            try:
                start, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
                self._known[pid] = (start.partition("(")[2], int(rest.split()[1]))
            except OSError:
                self._known[pid] = None
        return self._known[pid]


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    except OSError:
        return []


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty for a process that has ended
    except OSError:
        return False
