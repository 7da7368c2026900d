"""Put right what a crash left behind, and forget what is old.

A loop in the service and not Celery beat: it must work while the broker has lost everything, it needs no schedule file
and no process of its own, and any number of services may run it, because each step is one guarded statement.
"""

from __future__ import annotations

import asyncio
import random

from optimizer_service.queue import SolveQueue
from optimizer_service.repository import SolveRepository
from optimizer_service.settings import OptimizerSettings
from services.contracts.optimize import SolveState
from services.kit.logging import Log

log = Log(__name__)


class Sweeper:
    """Looks for solves that nobody works on."""

    def __init__(self, repository: SolveRepository, queue: SolveQueue, settings: OptimizerSettings) -> None:
        self._repository = repository
        self._queue = queue
        self._settings = settings

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that fails (the database or the broker is away) is left to the next."""
        while True:
            try:
                await self.sweep()
            except Exception as error:
                log.warning("sweep.failed", error=str(error) or type(error).__name__)
            await asyncio.sleep(self._settings.sweep_s * random.uniform(0.8, 1.2))

    async def sweep(self) -> None:
        """Queue abandoned solves again, send lost messages again, delete old solves."""
        for row in await self._repository.release_abandoned(self._settings.max_attempts):
            event = "solve.requeued" if row.state == SolveState.QUEUED else "solve.given_up"
            log.warning(event, solve=row.id, attempts=row.attempts)
        await self._send_lost()
        if forgotten := await self._repository.forget_ended(self._settings.keep_days):
            log.info("solves.forgotten", count=forgotten)

    async def _send_lost(self) -> None:
        """Send messages for as many queued solves as there are fewer messages than those.

        Which ones were lost the broker cannot tell, but messages are taken in order, so it is those that have waited
        longest. Sending all of them each time would fill the queue while the workers are busy.
        """
        queued = await self._repository.queued(self._settings.resend_s)
        if not queued:
            return
        missing = len(queued) - await self._queue.waiting()
        for solve_id in queued[: max(missing, 0)]:
            if not await self._queue.send(solve_id):
                return
            await self._repository.mark_enqueued(solve_id)
            log.info("solve.sent_again", solve=solve_id)
