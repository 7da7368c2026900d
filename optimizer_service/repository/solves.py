"""Queries on solves: the same as on any work that workers claim."""

from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.serving import PLANNER
from services.db.background import WorkRepository
from services.db.tables import solve_submissions, solves

OUTCOME_FIELDS = ("status", "solver", "objective", "bound", "gap", "note")

_SUMMARY = (
    solves.c.kind,
    solves.c.progress,
    solves.c.solve_s,
    *(solves.c.result[name].label(name) for name in OUTCOME_FIELDS),
)


def solve_repository(engine: AsyncEngine, *, of_plans: bool | None = None) -> WorkRepository:
    """Return the queries on solves; sweeping covers those that plans of pools await, all others, or all."""
    is_of_plan = solves.c.key_id == PLANNER.key_id
    swept = None if of_plans is None else is_of_plan if of_plans else ~is_of_plan
    return WorkRepository(engine, solves, solve_submissions, "solve", _SUMMARY, swept=swept)
