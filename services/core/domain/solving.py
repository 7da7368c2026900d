"""Names shared by optimisation problems and their solutions."""

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
