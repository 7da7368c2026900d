"""The worker of solves: how it solves a row that it has claimed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from optimizer_service.kinds import KINDS
from optimizer_service.repository.solves import solve_repository
from services.contracts.background import WorkRecord
from services.core.domain.errors import DomainError
from services.db.engine import is_connection_error
from services.kit.background.worker import Worker
from services.kit.celery import leave_process


def solve_worker(engine: AsyncEngine, lease_s: float, *, on_lost_claim: Callable[[], None] = leave_process) -> Worker:
    """Return a worker that solves."""
    return Worker(
        "solve",
        solve_repository(engine),
        _answer,
        lease_s=lease_s,
        took="solve_s",
        is_away=is_connection_error,
        on_lost_claim=on_lost_claim,
    )


def _answer(work: WorkRecord, _: Worker) -> Any:
    name = work.columns["kind"]
    kind = KINDS.get(name)
    if kind is None:
        raise DomainError(f"This worker knows no kind of solve called {name}.")
    return kind.solve(kind.problem.model_validate(work.problem)).model_dump(mode="json")
