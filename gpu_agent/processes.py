"""CPU time of processes with their descendants, and a mark that descendants inherit. Linux only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_KILL_ROUNDS = 50


def kill_marked(mark: str) -> int:
    """Kill every process that was started with ``mark`` (``NAME=value``) in its environment; return their number.

    Everything that a rank started inherits the mark, whichever session or group it is in.
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
    """Return the CPU time that each root process and all its descendants have used, those that have ended included.

    Args:
        roots: Process ids by name; the answer has the same names, less those whose process is gone.
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
