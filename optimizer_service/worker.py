"""The worker of solves: how it solves a claimed row."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service.kinds import KINDS
from optimizer_service.repository.lengths import solve_repository
from services.contracts.background import WorkRecord
from services.contracts.solver import SolveProgress
from services.core.domain.errors import DomainError
from services.core.domain.solving import Progress
from services.db.engine import is_connection_error
from services.kit.background.worker import Worker
from services.kit.celery import leave_process


def solve_worker(engine: AsyncEngine, lease_s: float, *, on_lost_claim: Callable[[], None] = leave_process) -> Worker:
    return Worker(
        "solve",
        solve_repository(engine),
        _answer,
        lease_s=lease_s,
        took="solve_s",
        is_away=is_connection_error,
        on_lost_claim=on_lost_claim,
    )


def _answer(work: WorkRecord, worker: Worker) -> Any:
    name = work.columns["kind"]
    kind = KINDS.get(name)
    if kind is None:
        raise DomainError(f"This worker knows no kind of solve called {name}.")

    def report(progress: Progress) -> None:
        told = worker.progress["progress"]["share"]  # solvers and searches may count anew; what is shown does not fall
        worker.progress = _columns(replace(progress, share=max(told, progress.share)))

    worker.progress = _columns(Progress(0.0, "reading the problem"))
    result = kind.solve(kind.problem.as_stored(work.problem), report)
    worker.progress = _columns(Progress(1.0, "done", result.objective))
    return result.model_dump(mode="json")


def _columns(progress: Progress) -> dict[str, Any]:
    shown = SolveProgress(share=progress.share, doing=progress.doing, best=progress.best)
    return {"progress": shown.model_dump(mode="json")}
