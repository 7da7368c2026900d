"""Run workers while messages wait for them, and end them when there has been nothing to do for a while.

Idle workers would take a third of an installation's memory. One that is needed is ready in two seconds: it is forked.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.kit.queue_keys import UNSETTLED, queue_key
from services.kit.tasks import end_tasks
from services.standalone.probes import valkey_lines
from services.standalone.supervisor import Supervisor

LOOK_EVERY_S = 1.0
QUIET_S = 60.0
WITHIN_S = 5.0


@dataclass
class Dozing:
    """Wakes workers, and puts them to sleep."""

    queues: Mapping[str, Sequence[str]]
    counts: Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[int]]]
    processes: Supervisor
    _busy_at_s: dict[str, float] = field(default_factory=dict[str, float])
    _ending: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])

    async def follow(self) -> None:
        """Look until cancelled. If Valkey does not answer, nothing changes."""
        try:
            while True:
                with contextlib.suppress(OSError, TimeoutError, ValueError):
                    async with asyncio.timeout(WITHIN_S):
                        found = await self._busy()
                    await self._act(found, time.monotonic())
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await end_tasks(list(self._ending.values()))

    async def _busy(self) -> set[str]:
        """Return the workers with waiting messages; while any message is unsettled, also those awake, or else all."""
        asked = [(worker, queue) for worker, queues in self.queues.items() for queue in queues]
        commands = [*(("LLEN", queue_key(queue)) for _, queue in asked), ("HLEN", UNSETTLED)]
        *waiting, unsettled = await self.counts(commands)
        awake = set(self._busy_at_s) if unsettled else set[str]()
        if unsettled and not awake:
            return set(self.queues)
        return awake | {worker for (worker, _), count in zip(asked, waiting, strict=True) if count}

    async def _act(self, busy: set[str], now_s: float) -> None:
        self._ending = {name: task for name, task in self._ending.items() if not task.done()}
        for name in busy - self._ending.keys():
            if name not in self._busy_at_s:
                await self.processes.set_running(name, True)
            self._busy_at_s[name] = now_s
        for name in [name for name, at_s in self._busy_at_s.items() if now_s - at_s >= QUIET_S]:
            del self._busy_at_s[name]
            self._ending[name] = asyncio.create_task(self.processes.put_to_sleep(name), name=f"doze {name}")


async def counts(address: Path, password: str, commands: Sequence[tuple[str, str]]) -> list[int]:
    """Return the lengths of Valkey's keys; ``OSError`` without an answer, ``ValueError`` if it has no numbers."""
    _, *found = await valkey_lines(address, password, list(map(" ".join, commands)))
    return [int(line.removeprefix(":")) for line in found]
