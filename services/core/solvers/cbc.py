# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingTypeStubs=false
"""CBC, as bundled with PuLP, which runs it as a separate program."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.solving import Backend, SolveStatus
from services.core.solvers import highs
from services.core.solvers.model import AwayError, Limits, LinearModel, Solution, solution_of

NOT_INSTALLED = "PuLP, which brings CBC, is not installed (the extra `solvers`), so HiGHS solved it"
MISSING = "CBC is not there for this platform, so HiGHS solved it"
ACCEPTED_VIOLATION = 1e-5


def solve(model: LinearModel, limits: Limits) -> Solution:
    """Return CBC's answer, which knows no ``cutoff``; ``AwayError`` if it is not there.

    A search that ran out of patience is followed by one with its wider gap, from the best solution found: CBC is a
    separate program, and cannot be asked for its progress on the way.

    PuLP says "Optimal" even if the time limit stopped CBC; only ``sol_status`` tells the two apart, and fractional
    values are left in the variables if no solution was found. PuLP does not pass on CBC's own bound: a proven optimum
    is within ``relative_gap`` of its bound, and a solve that was stopped reports the bound of the linear relaxation
    (solved by HiGHS, under the same time limit again).
    """
    try:
        import pulp  # a fifth of a second that only its users pay
    except ImportError as error:
        raise AwayError(NOT_INSTALLED) from error
    if not _program(pulp, None, 0.0).available():
        raise AwayError(MISSING)
    patience = limits.patience
    if patience is None or not model.integer.any():
        return _run(pulp, model, limits)
    found = _run(pulp, model, limits, max(patience.checks, 1))
    if found.status not in (SolveStatus.FEASIBLE, SolveStatus.TIME_LIMIT):
        return found
    left_s = None if limits.time_limit_s is None else limits.time_limit_s - found.solver_s
    if left_s is not None and left_s <= 0:
        return found
    start = limits.start if found.values is None else found.values
    wider = _run(pulp, model, Limits(left_s, patience.relative_gap, start))
    solver_s = found.solver_s + wider.solver_s
    if wider.status is SolveStatus.OPTIMAL:  # within the wider gap, that is
        return replace(wider, status=SolveStatus.FEASIBLE, solver_s=solver_s, checks=patience.checks)
    best = min(found, wider, key=lambda each: np.inf if each.objective is None else each.objective)
    return replace(best, solver_s=solver_s, checks=patience.checks)


def _program(pulp: Any, time_limit_s: float | None, relative_gap: float, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces PuLP 4
        return pulp.PULP_CBC_CMD(
            msg=False, threads=1, timeLimit=time_limit_s, gapRel=relative_gap, options=["randomCbcSeed 1"], **options
        )


def _run(pulp: Any, model: LinearModel, limits: Limits, nodes: int | None = None) -> Solution:
    time_limit_s, relative_gap, start = limits.time_limit_s, limits.relative_gap, limits.start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 announces PuLP 4
        program = _program(pulp, time_limit_s, relative_gap, warmStart=start is not None, maxNodes=nodes)
        problem, columns = _problem(pulp, model)
        for column, value in zip(columns, [] if start is None else start.tolist(), strict=False):
            column.setInitialValue(value, check=False)
        try:
            problem.solve(program)
        except pulp.PulpSolverError as error:
            return solution_of(model, SolveStatus.FAILED, Backend.CBC, note=f"CBC broke off: {error}")
    is_limited = time_limit_s is not None or nodes is not None
    found = _answer(pulp, model, problem, columns, limits, is_limited=is_limited)
    return replace(found, solver_s=problem.solutionTime)


def _answer(
    pulp: Any, model: LinearModel, problem: Any, columns: list[Any], limits: Limits, *, is_limited: bool
) -> Solution:
    match problem.sol_status:
        case pulp.LpSolutionOptimal:
            values = _values(model, columns)
            objective = model.objective(values)
            bound = objective - limits.relative_gap * abs(objective) if model.integer.any() else objective
            return solution_of(model, SolveStatus.OPTIMAL, Backend.CBC, values=values, bound=bound)
        case pulp.LpSolutionUnbounded:
            return solution_of(model, SolveStatus.UNBOUNDED, Backend.CBC)
        case _ if problem.status == pulp.LpStatusInfeasible:  # sol_status knows that of linear problems only
            return solution_of(model, SolveStatus.INFEASIBLE, Backend.CBC)
        case pulp.LpSolutionIntegerFeasible | pulp.LpSolutionNoSolutionFound if is_limited:
            bound = highs.relaxation_bound(model, limits.time_limit_s)
        case _:
            note = f"CBC ended with: {pulp.LpStatus[problem.status]}"
            return solution_of(model, SolveStatus.FAILED, Backend.CBC, note=note)
    values = _values(model, columns)
    if problem.sol_status == pulp.LpSolutionIntegerFeasible and model.violation(values) <= ACCEPTED_VIOLATION:
        return solution_of(model, SolveStatus.FEASIBLE, Backend.CBC, values=values, bound=bound)
    return solution_of(model, SolveStatus.TIME_LIMIT, Backend.CBC, bound=bound)


def _problem(pulp: Any, model: LinearModel) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("model", pulp.LpMinimize)
    columns = [
        pulp.LpVariable(f"x{index}", _finite(lower), _finite(upper), "Integer" if whole else "Continuous")
        for index, (lower, upper, whole) in enumerate(
            zip(model.lower.tolist(), model.upper.tolist(), model.integer.tolist(), strict=True)
        )
    ]
    problem.setObjective(pulp.LpAffineExpression(list(zip(columns, model.costs.tolist(), strict=True))))
    starts, names, coefficients = model.starts.tolist(), model.columns.tolist(), model.coefficients.tolist()
    lowers, uppers = model.row_lower.tolist(), model.row_upper.tolist()
    for row, (lower, upper) in enumerate(zip(lowers, uppers, strict=True)):
        entries = range(starts[row], starts[row + 1])
        if not entries:
            continue
        sides = [(pulp.LpConstraintGE, lower), (pulp.LpConstraintLE, upper)]
        if lower == upper:
            sides = [(pulp.LpConstraintEQ, lower)]
        for sense, side in sides:
            if _finite(side) is not None:
                terms = pulp.LpAffineExpression([(columns[names[entry]], coefficients[entry]) for entry in entries])
                problem.addConstraint(pulp.LpConstraint(terms, sense, rhs=side))
    return problem, columns


def _values(model: LinearModel, columns: list[Any]) -> Floats:
    """Return the variables' values; one that PuLP left out of the problem takes the value nearest 0."""
    nearest = np.clip(np.zeros(model.variables), model.lower, model.upper)
    found = [column.varValue for column in columns]
    return np.array([near if value is None else value for value, near in zip(found, nearest, strict=True)])


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
