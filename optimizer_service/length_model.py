"""Training of the job length model: begun when it is due, and put in force if the new model is better.

Source: A-SRPT section IV-C, 3.
"""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service.repository import lengths
from optimizer_service.repository.lengths import TrainingRepository
from optimizer_service.settings import OptimizerSettings
from services.contracts.background import Draft, TooManyPendingError, WorkProblem, WorkRecord
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import GROUP_VERSION
from services.db.engine import is_connection_error
from services.kit.background.queue import TaskQueue
from services.kit.background.work_queue import sha256
from services.kit.background.worker import Worker
from services.kit.celery import leave_process
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.learning.length_table import learn

log = Log(__name__)


def training_worker(engine: AsyncEngine, settings: OptimizerSettings) -> Worker:
    """Return a worker that trains on the newest jobs and keeps a limited number of models."""
    database_url = settings.database_url

    def answer(work: WorkRecord, worker: Worker) -> Any:
        if result := worker.ask(lambda: lengths.read_made(database_url, work.id)):
            return result  # by a worker that died before it could say so
        through = datetime.fromisoformat(work.problem["through"])
        history, ended_s = worker.ask(lambda: lengths.read_history(database_url, through, settings.train_max_jobs))
        if not len(history):
            raise DomainError("No job has succeeded.")
        last, last_through_s = worker.ask(lambda: lengths.read_in_force(database_url))
        learned = learn(history, ended_s, last, last_through_s)
        evaluation = {
            "new": asdict(learned.new),
            "last": None if learned.last is None else asdict(learned.last),
            "user_median": asdict(learned.user_median),
        }
        jobs, table, is_better = len(history), learned.table, learned.is_better
        made = (through, GROUP_VERSION, jobs, len(table.groups), evaluation, table.to_bytes())
        kept = settings.models_kept
        stored = worker.ask(
            lambda: lengths.store_model(database_url, work.id, made, work.claim, kept, is_better=is_better)
        )
        log.info("lengths.trained", id=work.id, jobs=jobs, active=is_better, stored=stored)
        return {"jobs": jobs, "active": is_better, "evaluation": evaluation}

    return Worker(
        "training",
        lengths.training_repository(engine),
        answer,
        lease_s=settings.lease_s,
        took="train_s",
        is_away=is_connection_error,
        on_lost_claim=leave_process,
    )


OWNER = "installation"


class LengthTrainer:
    """Has the model trained every hour in which enough jobs have ended.

    Any number of services may run it: the same history gives one training, and only one is pending at a time.
    """

    def __init__(self, store: TrainingRepository, queue: TaskQueue, settings: OptimizerSettings) -> None:
        self._store, self._queue, self._settings = store, queue, settings

    async def run(self) -> None:
        """Check until cancelled; a check that fails because the database does not answer is left to the next one."""
        await repeat(self.look, self._settings.train_look_s, failed="lengths.not_looked")

    async def look(self) -> str | None:
        """Submit a training if one is due; return its id."""
        through, jobs = await self._store.new_jobs(self._settings.train_interval_s)
        if through is None or jobs < self._settings.train_min_jobs:
            return None
        document = {"through": through.isoformat()}
        digest = sha256("lengths", document)
        draft = Draft(new_id("length"), OWNER, OWNER, WorkProblem(document, digest), None, digest)
        try:
            submitted = await self._store.submit(draft, max_pending=1)
        except TooManyPendingError:
            return None
        if submitted.is_new:
            log.info("lengths.training", id=submitted.id, new_jobs=jobs)
            if await self._queue.send(submitted.id):
                await self._store.mark_enqueued(submitted.id)
        return submitted.id
