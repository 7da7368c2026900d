# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Gurobi, where its licence suffices; the one in its wheel allows 2,000 variables and 2,000 constraints."""

from dataclasses import replace
from typing import Any

import numpy as np

from services.core.domain.solving import Backend, SolveStatus
from services.core.solvers.model import CHECKS_A_WORK_UNIT, AwayError, Limits, LinearModel, Solution, solution_of

NOT_INSTALLED = "Gurobi is not installed (the extra `solvers`), so HiGHS solved it"
_NO_LICENSE, _SIZE_LIMIT = 10009, 10010  # GRB.Error.NO_LICENSE, .SIZE_LIMIT_EXCEEDED


def solve(model: LinearModel, limits: Limits) -> Solution:
    """Return Gurobi's answer; ``AwayError`` if Gurobi is missing, unlicensed or refuses the size."""
    try:
        import gurobipy
    except ImportError as error:
        raise AwayError(NOT_INSTALLED) from error
    try:
        with gurobipy.Env(empty=True) as environment:
            environment.setParam("OutputFlag", 0)  # before the start, which prints a banner otherwise
            environment.start()
            with gurobipy.Model(env=environment) as problem:
                spent = _optimised(gurobipy, problem, model, limits)
                found = _answer(gurobipy, problem, model)
                patience_ended = problem.Params.MIPGap > limits.relative_gap
                if found.status is SolveStatus.OPTIMAL and patience_ended:
                    found = replace(found, status=SolveStatus.FEASIBLE)
                return replace(found, solver_s=spent[0], checks=round(CHECKS_A_WORK_UNIT * spent[1]))
    except gurobipy.GurobiError as error:
        if error.errno == _SIZE_LIMIT:
            size = f"{model.variables} variables and {model.rows} rows"
            raise AwayError(f"{size} are beyond Gurobi's licence, so HiGHS solved it") from error
        if error.errno == _NO_LICENSE:
            raise AwayError("Gurobi has no valid licence, so HiGHS solved it") from error
        return solution_of(model, SolveStatus.FAILED, Backend.GUROBI, note=f"Gurobi broke off: {error}")


def _optimised(gurobipy: Any, problem: Any, model: LinearModel, limits: Limits) -> tuple[float, float]:
    """Solve the problem, and return the seconds and work units used."""
    codes, start, patience = gurobipy.GRB, limits.start, limits.patience
    named = {"MIPGap": limits.relative_gap, "TimeLimit": limits.time_limit_s, "BestBdStop": limits.cutoff}
    for name, value in {"Threads": 1, "Seed": 0, **named}.items():
        if value is not None:
            problem.setParam(name, value)
    _fill(gurobipy, problem, model)
    if start is not None:
        problem.update()
        whole = [
            variable for variable, is_whole in zip(problem.getVars(), model.integer.tolist(), strict=True) if is_whole
        ]
        problem.setAttr("Start", whole, start[model.integer].tolist())  # what follows from these it finds by itself
    if patience is not None:
        problem.setParam("WorkLimit", patience.checks / CHECKS_A_WORK_UNIT)
    problem.optimize()
    spent_s, spent_work = problem.Runtime, problem.Work
    if problem.Status == codes.WORK_LIMIT and patience is not None:
        problem.setParam("WorkLimit", codes.INFINITY)
        problem.setParam("MIPGap", patience.relative_gap)
    elif problem.Status == codes.INF_OR_UNBD:  # one of the two; without dual reductions the answer is definite
        problem.setParam("DualReductions", 0)
    else:
        return spent_s, spent_work
    problem.optimize()  # after a limit it goes on from there
    return spent_s + problem.Runtime, spent_work + problem.Work


def _answer(gurobipy: Any, problem: Any, model: LinearModel) -> Solution:
    codes = gurobipy.GRB
    values = np.array(problem.getAttr("X", problem.getVars())) if problem.SolCount else None
    whole = bool(model.integer.any())
    status, note, bound = SolveStatus.FAILED, "", problem.ObjBound if whole else None
    match problem.Status:
        case codes.OPTIMAL:
            status, bound = SolveStatus.OPTIMAL, problem.ObjBound if whole else problem.ObjVal
        case codes.INFEASIBLE | codes.UNBOUNDED:
            values = bound = None
            status = SolveStatus.INFEASIBLE if problem.Status == codes.INFEASIBLE else SolveStatus.UNBOUNDED
        case codes.TIME_LIMIT | codes.SUBOPTIMAL | codes.INTERRUPTED | codes.USER_OBJ_LIMIT:
            status = SolveStatus.TIME_LIMIT if values is None else SolveStatus.FEASIBLE
        case ended:
            values, bound, note = None, None, f"Gurobi ended with status {ended}"
    return solution_of(model, status, Backend.GUROBI, values=values, bound=bound, note=note)


def _fill(gurobipy: Any, problem: Any, model: LinearModel) -> None:
    codes = gurobipy.GRB
    kinds = np.where(model.integer, codes.INTEGER, codes.CONTINUOUS)
    columns = problem.addMVar(model.variables, lb=model.lower, ub=model.upper, obj=model.costs, vtype=kinds).tolist()
    problem.ObjCon = model.offset
    starts, names, coefficients = model.starts.tolist(), model.columns.tolist(), model.coefficients.tolist()
    lowers, uppers = model.row_lower.tolist(), model.row_upper.tolist()
    for row, (lower, upper) in enumerate(zip(lowers, uppers, strict=True)):
        span = slice(starts[row], starts[row + 1])
        terms = gurobipy.LinExpr(coefficients[span], [columns[name] for name in names[span]])
        if lower == upper:
            problem.addLConstr(terms, codes.EQUAL, lower)
            continue
        if np.isfinite(lower):
            problem.addLConstr(terms, codes.GREATER_EQUAL, lower)
        if np.isfinite(upper):
            problem.addLConstr(terms, codes.LESS_EQUAL, upper)
