# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""HiGHS, the default: open source, available as a wheel for every platform, and takes arrays as they are."""

from dataclasses import replace
from typing import Any

import highspy
import numpy as np

from services.core.domain.solving import Backend, Progress, Report, SolveStatus, unreported
from services.core.solvers.model import Limits, LinearModel, Solution, solution_of

_FEASIBLE_POINT = 2  # HighsInfo.primal_solution_status
_STATUS = highspy.HighsModelStatus
_STOPPED = frozenset({_STATUS.kTimeLimit, _STATUS.kIterationLimit, _STATUS.kSolutionLimit, _STATUS.kInterrupt})

CHECKS_PER_REPORT = 64
"""Of a model without whole numbers: the simplex method checks whether to stop at every iteration."""

_BY_PRESOLVE = frozenset({_STATUS.kUnboundedOrInfeasible, _STATUS.kInfeasible, _STATUS.kSolveError})
"""What is asked again without presolve: it may see one of two things, and HiGHS 1.15's ends some models that have a
solution as infeasible or with an error."""


def solve(model: LinearModel, limits: Limits, note: str = "", report: Report = unreported) -> Solution:
    """Return HiGHS's answer; ``note`` says why another solver did not give it, ``report`` receives progress."""
    solver = _prepared(model, limits.time_limit_s, limits.relative_gap)
    patience, cutoff = limits.patience, limits.cutoff
    checks, whole = 0, bool(model.integer.any())

    def check(_: Any, __: str, found: Any, answer: Any, ___: Any) -> None:
        nonlocal checks
        checks += 1
        if report is not unreported and (whole or checks % CHECKS_PER_REPORT == 1):
            report(_progress(solver, found, limits.time_limit_s, whole=whole))
        is_patient = patience is None or checks < patience.checks or found.mip_gap > patience.relative_gap
        answer.user_interrupt = not is_patient or (whole and cutoff is not None and found.mip_dual_bound >= cutoff)

    solver.setCallback(check, None)
    solver.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
    if report is not unreported and not whole:
        solver.startCallback(highspy.cb.HighsCallbackType.kCallbackSimplexInterrupt)
    if limits.start is not None:
        known = highspy.HighsSolution()
        known.col_value = limits.start.tolist()
        solver.setSolution(known)
    solver.run()
    return replace(_answer(solver, model, note), solver_s=solver.getRunTime(), checks=checks)


def _progress(solver: highspy.Highs, found: Any, time_limit_s: float | None, *, whole: bool) -> Progress:
    share = 0.0 if time_limit_s is None else min(1.0, solver.getRunTime() / time_limit_s)
    if not whole:
        return Progress(share, f"{found.simplex_iteration_count} iterations")
    if not abs(found.mip_primal_bound) < highspy.kHighsInf:
        return Progress(share, f"{found.mip_node_count} nodes, no solution yet")
    return Progress(share, f"{found.mip_node_count} nodes, gap {100 * found.mip_gap:.2g} %", found.mip_primal_bound)


def _answer(solver: highspy.Highs, model: LinearModel, note: str) -> Solution:
    status = solver.getModelStatus()
    if status in _BY_PRESOLVE:
        solver.setOptionValue("presolve", "off")
        solver.run()
        status = solver.getModelStatus()
    info = solver.getInfo()
    whole = bool(model.integer.any())
    has_point = status == _STATUS.kOptimal or info.primal_solution_status == _FEASIBLE_POINT
    values = np.array(solver.getSolution().col_value) if has_point else None
    bound, costs = info.mip_dual_bound if whole else None, None
    if status == _STATUS.kOptimal:
        ended = SolveStatus.OPTIMAL
        if not whole:
            bound, costs = info.objective_function_value, np.array(solver.getSolution().col_dual)
    elif status in (_STATUS.kInfeasible, _STATUS.kUnbounded):
        values = bound = None
        ended = SolveStatus.INFEASIBLE if status == _STATUS.kInfeasible else SolveStatus.UNBOUNDED
    elif status in _STOPPED:
        ended = SolveStatus.TIME_LIMIT if values is None else SolveStatus.FEASIBLE
    else:
        reason = f"HiGHS ended with: {solver.modelStatusToString(status)}"
        ended, values, bound, note = SolveStatus.FAILED, None, None, f"{note}; {reason}" if note else reason
    found = solution_of(model, ended, Backend.HIGHS, values=values, bound=bound, note=note)
    return replace(found, reduced_costs=costs)


def relaxation_bound(model: LinearModel, time_limit_s: float | None) -> float | None:
    """Return the optimum of ``model`` without its integrality, a lower bound for all solutions of ``model``."""
    solver = _prepared(model, time_limit_s, 0.0, relax=True)
    solver.run()
    optimal = solver.getModelStatus() == _STATUS.kOptimal
    return float(solver.getInfo().objective_function_value) if optimal else None


def _prepared(
    model: LinearModel, time_limit_s: float | None, relative_gap: float, *, relax: bool = False
) -> highspy.Highs:
    problem = highspy.HighsLp()
    problem.num_col_, problem.num_row_ = model.variables, model.rows
    problem.offset_ = model.offset
    problem.col_cost_, problem.col_lower_, problem.col_upper_ = model.costs, model.lower, model.upper
    problem.row_lower_, problem.row_upper_ = model.row_lower, model.row_upper
    problem.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    problem.a_matrix_.num_col_, problem.a_matrix_.num_row_ = model.variables, model.rows
    problem.a_matrix_.start_ = model.starts
    problem.a_matrix_.index_ = model.columns
    problem.a_matrix_.value_ = model.coefficients
    if model.integer.any() and not relax:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        problem.integrality_ = [kinds[whole] for whole in model.integer.astype(int).tolist()]
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("mip_rel_gap", relative_gap)
    if time_limit_s is not None:
        solver.setOptionValue("time_limit", time_limit_s)
    solver.passModel(problem)
    return solver
