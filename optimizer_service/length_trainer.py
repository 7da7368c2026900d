"""Have the job length model trained: every hour in which enough jobs have ended.

A loop in the service and not Celery beat, for the same reasons as the sweeper; its state is in the database. Any number
of services may run it: the same history gives one training, and only one is pending at a time.
"""

from optimizer_service.repository.lengths import TrainingRepository
from optimizer_service.settings import OptimizerSettings
from services.contracts.background import Draft, TooManyPendingError, WorkProblem
from services.kit.background.queue import TaskQueue
from services.kit.background.work_queue import sha256
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import repeat

log = Log(__name__)

OWNER = "installation"


class LengthTrainer:
    """Checks whether a training is due."""

    def __init__(self, store: TrainingRepository, queue: TaskQueue, settings: OptimizerSettings) -> None:
        self._store = store
        self._queue = queue
        self._settings = settings

    async def run(self) -> None:
        """Check until cancelled; a check that fails because the database does not answer is left to the next one."""
        await repeat(self.look, self._settings.train_look_s, failed="lengths.not_looked")

    async def look(self) -> str | None:
        """Submit a training if one is due; return its id."""
        new = await self._store.new_jobs(self._settings.train_interval_s)
        if new.through is None or new.jobs < self._settings.train_min_jobs:
            return None
        document = {"through": new.through.isoformat()}
        digest = sha256("lengths", document)
        draft = Draft(new_id("length"), OWNER, OWNER, WorkProblem(document, digest), None, digest)
        try:
            submitted = await self._store.submit(draft, max_pending=1)
        except TooManyPendingError:
            return None
        if submitted.is_new:
            log.info("lengths.training", id=submitted.id, new_jobs=new.jobs)
            if await self._queue.send(submitted.id):
                await self._store.mark_enqueued(submitted.id)
        return submitted.id
