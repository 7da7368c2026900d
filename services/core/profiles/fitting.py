# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# (SciPy has no types; nothing else here imports it.)
"""Bounded least squares on relative errors, with a pull towards the prior."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Bools, Floats

Predict = Callable[[Floats], Floats]  #: (k, n_parameters) candidate parameters to (k, n_points) predictions, all > 0

ROBUST_AT = 0.15  #: Relative errors beyond this count ever less: a step that was disturbed must not bend the curve
STEP = 1e-7
MAX_STEPS = 200


@dataclass(frozen=True)
class Problem:
    """What is to be fitted. Arrays over parameters are (p,), over points (n,)."""

    predict: Predict  #: The model
    observed: Floats  #: What was measured, > 0
    weight: Floats  #: Weight of each point, > 0
    lower: Floats  #: Bounds of the parameters
    upper: Floats
    unit: Floats  #: A natural size of each parameter, > 0, in which the search runs
    centre: Floats  #: The prior value of each parameter
    pull: Floats
    """How strongly a parameter one unit away from its centre is drawn back, relative to one point that is wrong by a
    factor of e; small, only so that parameters that the points do not determine stay where they were."""
    free: Bools  #: Which parameters are fitted; the others stay at their starting values


@dataclass(frozen=True)
class Solution:
    """A fit."""

    parameters: Floats  #: (p,)
    cost: float  #: What was minimised; comparable between solutions of one problem
    covariance: Floats
    """(p, p) covariance of the parameters, from noise and curvature there; 0 for those that were not fitted."""


def solve(problem: Problem, starts: Floats) -> Solution:
    """Return the best solution over the starts, (s, p); ties go to the first, so that equal input gives equal fits."""
    found = [_solve_from(problem, start) for start in starts]
    return min(found, key=lambda each: each.cost)


def _solve_from(problem: Problem, start: Floats) -> Solution:
    free, unit = problem.free, problem.unit
    parameters = np.clip(start, problem.lower, problem.upper)
    if not free.any():
        return Solution(parameters, float("inf"), np.zeros((len(parameters),) * 2))
    unit_free = unit[free]
    root, target = np.sqrt(problem.weight), np.log(problem.observed)
    believed, pull = problem.centre[free] / unit_free, problem.pull[free]

    def residuals_of(scaled: Floats) -> Floats:
        """Return the residuals of scaled candidates: (k, n_free) to (k, n_points + n_free)."""
        full = np.repeat(parameters[None], len(scaled), axis=0)
        full[:, free] = scaled * unit_free
        error = root * (np.log(np.maximum(problem.predict(full), 1e-300)) - target)
        return np.concatenate([error, pull * (scaled - believed)], axis=1)

    def jacobian(scaled: Floats) -> Floats:
        step = STEP * np.maximum(1.0, np.abs(scaled))
        moved = residuals_of(np.concatenate([scaled[None], scaled + np.diag(step)]))
        return ((moved[1:] - moved[0]) / step[:, None]).T

    from scipy.optimize import least_squares  # here: half a second that most processes never need

    low, high = problem.lower[free] / unit_free, problem.upper[free] / unit_free
    result = least_squares(
        lambda scaled: residuals_of(scaled[None])[0],
        np.clip(parameters[free] / unit_free, low, high),
        jac=jacobian,  # pyright: ignore[reportArgumentType]
        bounds=(low, high),
        loss="soft_l1",
        f_scale=ROBUST_AT,
        max_nfev=MAX_STEPS,
        ftol=1e-10,
        xtol=1e-10,
        gtol=1e-12,
    )
    parameters = parameters.copy()
    parameters[free] = result.x * unit_free
    slope = jacobian(result.x)[: len(target)]
    noise = noise_of((residuals_of(result.x[None])[0][: len(target)]) / root, int(free.sum()))
    # curvature over the noise found, and a belief one unit wide where no point tells
    spread = np.linalg.inv(slope.T @ slope / noise**2 + np.eye(len(unit_free)))
    covariance = np.zeros((len(free),) * 2)
    covariance[np.ix_(free, free)] = spread * np.outer(unit_free, unit_free)
    return Solution(parameters, float(result.cost), covariance)


def non_negative(basis: Floats, observed: Floats) -> Floats:
    """Return weights (p,) >= 0 for the columns of (n, p) with the least relative error."""
    from scipy.optimize import nnls

    weights, _ = nnls(basis / observed[:, None], np.ones(len(observed)), maxiter=50 * basis.shape[1])
    return weights


def noise_of(error: Floats, n_free: int) -> float:
    """Return the spread of relative errors, (n,), about a fit of ``n_free`` parameters; outliers hardly count."""
    spare = max(len(error) - n_free, 1)
    typical = float(np.median(np.abs(error))) * 1.4826
    return max(typical * np.sqrt(max(len(error) / spare, 1.0)), 1e-6)
