"""Try every combination: slow, but beyond doubt. The solvers are tested against it."""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, SolveStatus
from services.core.solvers.model import LinearModel, Solution, solution_of

MAX_POINTS = 5_000_000
CHUNK_POINTS = 50_000
TOLERANCE = 1e-9


def exhaustive(model: LinearModel) -> Solution:
    """Return the best solution, said to be of HiGHS; ties go to the first in lexicographic order.

    Raises:
        DomainError: a variable is not integer or not bounded, or there are more than ``MAX_POINTS`` combinations.
    """
    if (model.lower > model.upper).any():
        return solution_of(model, SolveStatus.INFEASIBLE, Backend.HIGHS)
    if not model.integer.all() or not np.isfinite(model.lower).all() or not np.isfinite(model.upper).all():
        raise DomainError("the exhaustive search takes whole, bounded variables only")
    counts = (model.upper - model.lower + 1).astype(np.int64)
    points = int(np.prod(counts.astype(np.float64))) if counts.size else 1
    if points > MAX_POINTS:
        raise DomainError(f"the exhaustive search takes at most {MAX_POINTS} combinations, not {points}")
    matrix = np.zeros((model.rows, model.variables))
    matrix[model.row_of_entry, model.columns] = model.coefficients
    slack = TOLERANCE * np.maximum(1.0, np.abs(matrix).sum(axis=1))
    best: Floats | None = None
    best_objective = np.inf
    for start in range(0, points, CHUNK_POINTS):
        numbers = np.arange(start, min(start + CHUNK_POINTS, points))
        candidates = _points(numbers, counts) + model.lower
        activity = candidates @ matrix.T
        fits = np.all((activity >= model.row_lower - slack) & (activity <= model.row_upper + slack), axis=1)
        if not fits.any():
            continue
        objectives = candidates[fits] @ model.costs
        first = int(np.argmin(objectives))
        if objectives[first] < best_objective:
            best, best_objective = candidates[fits][first], float(objectives[first])
    if best is None:
        return solution_of(model, SolveStatus.INFEASIBLE, Backend.HIGHS)
    bound = model.objective(best)
    return solution_of(model, SolveStatus.OPTIMAL, Backend.HIGHS, values=best, bound=bound)


def _points(numbers: Ints, counts: Ints) -> Floats:
    """Return the points (len(numbers), len(counts)) with these numbers in lexicographic order from the origin."""
    if not counts.size:
        return np.zeros((numbers.size, 0))
    return np.stack(np.unravel_index(numbers, tuple(counts.tolist())), axis=1).astype(np.float64)
