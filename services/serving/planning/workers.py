"""The processes that make plans: started when plans wait, and ended some seconds after the last one.

Planning reads two weeks of traffic and fits forecasts, which takes seconds of CPU time: too long for the event loop.
A worker claims plans by itself (``services.serving.worker``), so killing one only delays a plan. Its standard input is
a pipe from this process, and it ends when that closes.
"""

import asyncio
import contextlib
import sys
from asyncio.subprocess import PIPE, Process

from services.kit.background.store import WorkStore
from services.kit.logging import Log
from services.kit.repeating import When, repeat

log = Log(__name__)

COMMAND = (sys.executable, *(("-P",) if sys.flags.safe_path else ()), "-m", "services.serving.worker")


class PlanWorkers:
    """Keeps as many workers as are allowed while plans wait for one."""

    def __init__(self, store: WorkStore, *, at_once: int, look_s: float, when: When | None = None) -> None:
        self._store = store
        self._at_once = at_once
        self._look_s = look_s
        self._when = when
        self._processes: list[Process] = []

    async def run(self) -> None:
        """Check until cancelled, and then end the workers."""
        try:
            await repeat(self.look, self._look_s, failed="plan_workers.not_looked", when=self._when)
        finally:
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()

    async def look(self) -> None:
        """Start a worker for each waiting plan, up to the allowed number."""
        for process in self._processes:
            if process.returncode:
                log.warning("plan_worker.ended", pid=process.pid, code=process.returncode)
        self._processes = [process for process in self._processes if process.returncode is None]
        waiting = len(await self._store.queued(0))
        for _ in range(min(waiting, self._at_once) - len(self._processes)):
            process = await asyncio.create_subprocess_exec(*COMMAND, stdin=PIPE)
            log.info("plan_worker.started", pid=process.pid)
            self._processes.append(process)
