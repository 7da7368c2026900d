"""Training of the job length model: read the history, fit, and put the model in force if it is better.

Source: A-SRPT section IV-C, 3.
"""

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service.repository import lengths
from services.contracts.background import WorkRecord
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import GROUP_VERSION
from services.db.engine import is_connection_error
from services.kit.background.worker import Worker
from services.kit.celery import leave_process
from services.kit.logging import Log

log = Log(__name__)


def training_worker(
    engine: AsyncEngine,
    database_url: str,
    lease_s: float,
    *,
    max_jobs: int,
    models_kept: int,
    on_lost_claim: Callable[[], None] = leave_process,
) -> Worker:
    """Return a worker that trains on at most ``max_jobs`` of the newest jobs and keeps a limited number of models."""

    def answer(work: WorkRecord, worker: Worker) -> Any:
        if result := worker.ask(lambda: lengths.read_made(database_url, work.id)):
            return result  # by a worker that died before it could say so
        through = datetime.fromisoformat(work.problem["through"])
        history, ended_s = worker.ask(lambda: lengths.read_history(database_url, through, max_jobs))
        if not len(history):
            raise DomainError("No job has succeeded.")
        from services.learning.training import learn  # scikit-learn: a tenth of a second, for this task alone

        last, last_through_s = worker.ask(lambda: lengths.read_in_force(database_url))
        learned = learn(history, ended_s, last, last_through_s)
        evaluation = {
            "new": asdict(learned.new),
            "last": None if learned.last is None else asdict(learned.last),
            "user_median": asdict(learned.user_median),
        }
        made = lengths.TrainedModel(
            id=work.id,
            through=through,
            group_version=GROUP_VERSION,
            jobs=len(history),
            groups=len(learned.table.groups),
            evaluation=evaluation,
            content=learned.table.to_bytes(),
            is_better=learned.is_better,
        )
        stored = worker.ask(lambda: lengths.store_model(database_url, made, work.claim, models_kept))
        log.info("lengths.trained", id=work.id, jobs=len(history), active=learned.is_better, stored=stored)
        return {"jobs": len(history), "active": learned.is_better, "evaluation": evaluation}

    return Worker(
        "training",
        lengths.training_repository(engine),
        answer,
        lease_s=lease_s,
        took="train_s",
        is_away=is_connection_error,
        on_lost_claim=on_lost_claim,
    )
