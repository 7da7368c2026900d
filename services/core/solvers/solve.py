"""Hand a model to a solver backend."""

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, Report, SolveStatus, unreported
from services.core.solvers import cbc, gurobi, highs
from services.core.solvers.model import AwayError, Limits, LinearModel, Patience, Solution, solution_of


def solve(
    model: LinearModel,
    backend: Backend | str = Backend.HIGHS,
    *,
    time_limit_s: float | None = None,
    relative_gap: float = 1e-6,
    start: Floats | None = None,
    patience: Patience | None = None,
    cutoff: float | None = None,
    report: Report = unreported,
) -> Solution:
    """Solve ``model`` on one thread, reproducibly unless a time limit stops it.

    Args:
        backend: The solver to use. CBC and Gurobi are replaced by HiGHS if they are missing or if Gurobi's licence is
            too small; ``Solution.solver`` and ``Solution.note`` then say so.
        time_limit_s: Seconds the solver may take, > 0, by the solver's own clock; None for no limit.
        relative_gap: A solution this close to the bound, relative to itself, counts as optimal; >= 0.
        start: (n,) a solution to begin from, if one is known.
        patience: When to accept a solution further from the bound than ``relative_gap``.
        cutoff: Stop once no solution can be below this objective; CBC, which does not report its bound, ignores it.
        report: Called with the progress, as a share of the time limit (0 without one); only by HiGHS.

    Raises:
        DomainError: an unknown backend, or a limit out of range.
    """
    if backend not in set(Backend):
        raise DomainError(f"there is no solver called {backend!r}")
    if not (time_limit_s is None or time_limit_s > 0) or not 0 <= relative_gap < np.inf:
        raise DomainError("a solve needs a time limit above 0 and a finite gap that is not negative")
    if start is not None and (start.shape != model.costs.shape or not np.isfinite(start).all()):
        raise DomainError("a solution to begin from has one finite value for each variable")
    backend = Backend(backend)
    if _is_plainly_infeasible(model):
        return solution_of(model, SolveStatus.INFEASIBLE, backend)
    if not model.variables:
        return solution_of(model, SolveStatus.OPTIMAL, backend, values=[], bound=model.offset)
    limits = Limits(time_limit_s, relative_gap, start, patience, cutoff)
    if backend is Backend.HIGHS:
        return highs.solve(model, limits, report=report)
    try:
        return cbc.solve(model, limits) if backend is Backend.CBC else gurobi.solve(model, limits)
    except AwayError as away:
        return highs.solve(model, limits, str(away))


def _is_plainly_infeasible(model: LinearModel) -> bool:
    """Return whether bounds cross or an empty row requires a value other than 0; backends differ on these."""
    crossed = np.any(model.lower > model.upper) or np.any(model.row_lower > model.row_upper)
    empty = np.diff(model.starts) == 0
    return bool(crossed or np.any(empty & ((model.row_lower > 0) | (model.row_upper < 0))))
