"""Options and results shared by all kinds of solve."""

from typing import Literal

from services.contracts.schema import LEAST, Message, Real, maybe, said
from services.core.domain.solving import Backend, SolveStatus

MAX_SOLVER_TIME_S = 600.0

Solver = Literal[Backend.HIGHS, Backend.CBC, Backend.GUROBI]


class SolveOptions(Message):
    """Which solver to use, and for how long."""

    solver: Solver = said(
        "Solver to use. HiGHS replaces one that is not installed or whose licence is too small.", default=Backend.HIGHS
    )
    time_limit_s: Real = said("Maximum time for the solver itself.", default=60, ge=LEAST, le=MAX_SOLVER_TIME_S)


class SolveProgress(Message):
    """How far a solve is."""

    share: float = said(
        "Of the most that it may take: evaluations, steps, or the solver's time limit. It never falls, may "
        "be far from 1 when a solve ends, and is 1 once it has.",
        ge=0,
        le=1,
    )
    doing: str = said("What it does now.")
    best: float | None = maybe("Objective of the best solution so far, if there is one.")


class SolveOutcome(Message):
    """The outcome of any kind of solve."""

    status: SolveStatus
    solver: Backend | Literal["greedy"] = said(
        "Solver that was used in the end; `greedy` where a greedy algorithm answers."
    )
    objective: float | None = None
    bound: float | None = maybe("Proven bound: no solution is better.")
    gap: float | None = maybe("Relative gap: (objective - bound) / |objective|.")
    note: str = said("Remarks, for example that another solver was used.", default="")
