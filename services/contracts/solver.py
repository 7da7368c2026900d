"""What every solve is told, and what every solve reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.contracts.schema import Message, Real
from services.core.solvers.model import Backend, SolveStatus

MAX_SOLVER_TIME_S = 600.0

Solver = Literal[Backend.HIGHS, Backend.CBC, Backend.GUROBI]


class SolveOptions(Message):
    """Who solves, and for how long."""

    solver: Solver = Field(default=Backend.HIGHS, description="HiGHS stands in where another is missing or too small.")
    time_limit_s: Real = Field(default=60, gt=0, le=MAX_SOLVER_TIME_S, description="For the solver alone.")


class SolveOutcome(Message):
    """What every kind of solve reports."""

    status: SolveStatus
    solver: Backend = Field(description="Who solved it in the end.")
    objective: float | None = None
    bound: float | None = Field(default=None, description="No solution is better, as far as is proven.")
    gap: float | None = Field(default=None, description="(objective - bound) / |objective|.")
    note: str = Field(default="", description="What a reader should know, such as that another solver stepped in.")
