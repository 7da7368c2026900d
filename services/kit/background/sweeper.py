"""Repair what a crash left behind, and delete what is old.

This is a loop in the service, not Celery beat: it must work when the broker has lost all messages, it needs no schedule
file and no process of its own, and any number of services can run it, because each step is one guarded statement.
"""

from services.contracts.background import WorkState
from services.kit.background.queue import TaskQueue
from services.kit.background.settings import WorkSettings
from services.kit.background.store import WorkStore
from services.kit.logging import Log
from services.kit.repeating import repeat

log = Log(__name__)


class Sweeper:
    """Finds work that no worker is doing."""

    def __init__(self, what: str, store: WorkStore, queue: TaskQueue | None, settings: WorkSettings) -> None:
        """Create a sweeper for a kind of work, its table, and its queue if workers get messages."""
        self._what, self._store, self._queue, self._settings = what, store, queue, settings

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that fails (the database or the broker is unreachable) is left to the next."""
        await repeat(self.sweep, self._settings.sweep_s, failed="sweep.failed")

    async def sweep(self) -> None:
        """Requeue abandoned work, resend lost messages, delete old work."""
        for row in await self._store.release_abandoned(self._settings.max_attempts, self._settings.lease_s):
            event = "requeued" if row.state == WorkState.QUEUED else "given_up"
            log.warning(f"{self._what}.{event}", id=row.id, attempts=row.attempts)
        if self._queue is not None:
            await self._send_lost(self._queue)
        if forgotten := await self._store.forget_ended(self._settings.keep_days):
            log.info(f"{self._what}.forgotten", count=forgotten)

    async def _send_lost(self, queue: TaskQueue) -> None:
        """Send as many messages as the queue has fewer than there is queued work.

        The broker cannot tell which ones were lost, but messages are taken in order, so it is those that have waited
        longest. Sending all of them each time would fill the queue while the workers are busy.
        """
        queued = await self._store.queued(self._settings.resend_s)
        if not queued:
            return
        missing = len(queued) - await queue.waiting()
        for work_id in queued[: max(missing, 0)]:
            if not await queue.send(work_id):
                return
            await self._store.mark_enqueued(work_id)
            log.info(f"{self._what}.sent_again", id=work_id)
