"""Commands run to their end; CPU time of processes including their descendants, and a mark that those inherit.

Linux only.
"""

import asyncio
import functools
import os
import signal
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_KILL_ROUNDS = 50
_KILL_S = 5.0
"""How long a killed command is waited for: what waits for a sick device, or for a file server, cannot be killed."""
_LAST_BYTES = 16_384


async def run(words: Sequence[str], given: bytes = b"", **options: Any) -> tuple[int, str]:
    """Run a command in a session of its own; return its exit status, and the last lines that it printed.

    If the caller is cancelled, or its time is up, the command is killed with all that it has started.

    Args:
        given: Its standard input.
        options: As for ``asyncio.create_subprocess_exec``.

    Raises:
        OSError: It cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, start_new_session=True, **options
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(OSError):
            process.stdin.write(given)
            process.stdin.close()
        printed = await last_bytes(process.stdout, _LAST_BYTES)
        if len(printed) == _LAST_BYTES:  # part of a line could be part of a secret, which nobody would recognise
            printed = printed.partition(b"\n")[2]
        return await process.wait(), printed.decode(errors="replace")
    except BaseException:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(_KILL_S):
                await process.wait()
        raise


async def last_bytes(stream: asyncio.StreamReader, count: int) -> bytes:
    last = b""
    while data := await stream.read(count):
        last = (last + data)[-count:]
    return last


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
        if fields := _stat(pid)[1:]:
            parents[pid] = int(fields[1])
            ticks[pid] = sum(map(int, fields[11:15]))  # user and system, its own and of children it has waited for
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
        self._stat = functools.cache(_stat)

    def name_of(self, pid: int) -> str | None:
        """Return the name of a process; None if there is none with that id here."""
        return next(iter(self._stat(pid)), None)

    def descends(self, pid: int, roots: Collection[int]) -> bool:
        """Return whether a process is one of these, or descends from one."""
        while pid > 1 and pid not in roots:
            pid = int(self._stat(pid)[2]) if self._stat(pid) else 0
        return pid in roots


def _stat(pid: int) -> list[str]:
    """Return the name of a process, its state, its parent and what else is known of it; empty if there is none."""
    try:
        start, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return []
    return [start.partition("(")[2], *rest.split()]


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
