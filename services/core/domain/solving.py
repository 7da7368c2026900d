"""Names shared by optimisation problems and their solutions, and how far long-running work has got."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Backend(StrEnum):
    """The available solvers."""

    HIGHS = "highs"
    CBC = "cbc"
    GUROBI = "gurobi"


class SolveStatus(StrEnum):
    """The outcome of a solve. None of these is an error."""

    OPTIMAL = "optimal"  # proven, within the relative gap asked for
    FEASIBLE = "feasible"  # stopped by its limit with a solution; the gap says how good it is at least
    TIME_LIMIT = "time_limit"  # stopped by its limit without a solution; that says nothing about whether there is one
    INFEASIBLE = "infeasible"  # proven to have no solution
    UNBOUNDED = "unbounded"  # better solutions without end
    FAILED = "failed"  # the solver gave up, numerically or otherwise; the note says how


class Method(StrEnum):
    """How a placement is found."""

    HEAVY_EDGE = "heavy-edge"  #: The paper's greedy cut
    REFINED = "refined"  #: The greedy cut, then exchanges while they shorten the iteration; never longer than it


class Wait(StrEnum):
    """Why a job gets no GPUs."""

    GPUS = "gpus"  #: There are too few for it and the jobs that come before it
    POWER_LIMIT = "power_limit"  #: The power limit leaves too little for it
    TENSOR_GROUPS = "tensor_groups"  #: Its tensor groups find no nodes with enough free GPUs


MAX_LEADING = 10  #: Configurations of an application that a partition may name beside the chosen one


@dataclass(frozen=True)
class Progress:
    """How far a piece of work has got."""

    share: float
    """Share, 0 to 1, of the most that it may take: evaluations, steps, or a solver's time limit. It never falls, and
    work may end long before it reaches 1."""
    doing: str  #: What it is doing now, for people to read
    best: float | None = None  #: Objective of the best solution so far, None before there is one


Report = Callable[[Progress], None]  #: Called with the progress of work, often: it has to be quick


def unreported(progress: Progress) -> None:
    """Ignore a progress report."""


def part_of(report: Report, first: float, last: float) -> Report:
    """Return a report function for a part of the work, mapping shares 0 to 1 to ``first`` to ``last`` of the whole."""

    def of_part(progress: Progress) -> None:
        report(Progress(first + (last - first) * progress.share, progress.doing, progress.best))

    return of_part
