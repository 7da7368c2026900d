"""The least carbon any schedule could have reached with the same work and the same capacity.

A linear programme over the steps ``t`` of an intensity curve and the classes ``k`` of work:

    minimise    PUE * sum_t c[t] / 1000 * ( sum_k P[k] g[k,t]  +  P_idle * (G[t] h[t] - sum_k g[k,t]) )   gCO2
    subject to  sum_t g[k,t] = W[k]                     all work is done
                sum_k g[k,t] <= G[t] h[t]               no more GPUs than there are
                0 <= g[k,t] <= min(G[t], M[k]) h[k,t]   within the class's window and width

======== ============================================== =========
symbol   here                                           unit
======== ============================================== =========
g[k,t]   GPU-hours of class k in step t (the variables) GPU-hours
c[t]     ``curve.intensity_gco2_per_kwh``               gCO2/kWh
P[k]     ``Work.power_w``, one busy GPU and its share   W
         of the host
P_idle   ``idle_power_w``, one unused GPU               W
G[t]     ``capacity_gpus``                              GPUs
h[t]     length of step t                               h
h[k,t]   the part of step t inside class k's window     h
W[k]     ``Work.gpu_hours``                             GPU-hours
M[k]     ``Work.max_gpus``                              GPUs
======== ============================================== =========

Work flows freely: it may be split, stopped and resumed at no cost, and take any width up to ``M``; the intensity is
known in advance. What a real schedule gives up against this bound is the price of gangs, queues, restarts and not
knowing. Where windows begin and end inside a step, classes could use the same part of it twice, so the value is then
a bound that may not be reached; cut the curve at the windows to make it exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import DomainError
from services.core.domain.solving import Backend, Report, SolveStatus, part_of, unreported
from services.core.domain.units import S_PER_HOUR
from services.core.solvers.model import LinearModel, ModelBuilder, Solution
from services.core.solvers.solve import solve

W_PER_KW = 1_000.0


@dataclass(frozen=True)
class Work:
    """Work of one kind: jobs that draw the same power and may run in the same window.

    Attributes:
        gpu_hours: How much; > 0.
        power_w: Of one GPU at work, with whatever of the host goes with it; >= 0.
        release_s: Not before this moment, UTC seconds; none for the beginning of the curve.
        deadline_s: Done by this moment, UTC seconds; none for the end of the curve.
        max_gpus: At most so many at once; none for no limit but the capacity.
    """

    gpu_hours: float
    power_w: float
    release_s: float | None = None
    deadline_s: float | None = None
    max_gpus: float | None = None

    def __post_init__(self) -> None:
        if not (0 < self.gpu_hours < np.inf and 0 <= self.power_w < np.inf):
            raise DomainError("work needs GPU-hours above 0 and a power that is not negative")
        if self.max_gpus is not None and not 0 < self.max_gpus < np.inf:
            raise DomainError("work that may use no GPU cannot be done")


@dataclass(frozen=True)
class CarbonBoundProblem:
    """What there was to do, and to do it with.

    Attributes:
        curve: The steps and their intensities; the end of the curve is the end of the horizon.
        capacity_gpus: (steps,) or one number; >= 0.
        work: At least one class.
        idle_power_w: Of an unused GPU; >= 0, and 0 where idle nodes are powered down.
        pue: Power usage effectiveness of the site; >= 1.
    """

    curve: CarbonCurve
    capacity_gpus: Floats
    work: Sequence[Work]
    idle_power_w: float = 0.0
    pue: float = 1.0

    def __post_init__(self) -> None:
        capacity = self.capacity_gpus
        if capacity.shape not in ((), self.curve.times_s.shape):
            raise DomainError("capacity is one number or one for each step of the curve")
        if not (np.isfinite(capacity).all() and (capacity >= 0).all()):
            raise DomainError("capacity is finite and not negative")
        if not self.work or not (0 <= self.idle_power_w < np.inf and 1 <= self.pue < np.inf):
            raise DomainError("a bound needs work, an idle power that is not negative and a PUE of at least 1")

    @property
    def step_hours(self) -> Floats:
        """(steps,) lengths in hours."""
        return self.curve.lengths_s / S_PER_HOUR

    @property
    def capacity_gpu_hours(self) -> Floats:
        """(steps,) what the cluster can do in each step."""
        return self.capacity_gpus * self.step_hours

    @property
    def cells(self) -> int:
        """How many pairs of a class and a step of its window there are: the variables of the programme."""
        first, last = _windows(self)
        return int(np.maximum(last - first, 0).sum())


@dataclass(frozen=True)
class CarbonBound:
    """The bound, and the schedule that reaches it.

    The schedule is three arrays of one length: class ``work_index[i]`` does ``gpu_hours[i]`` > 0 in step
    ``step_index[i]``. Where the work does not fit (status ``infeasible``), it is one of those that do as much of it as
    can be done, and there is no carbon.

    Attributes:
        status: ``optimal``; ``infeasible`` with the least shortfall; ``time_limit`` with nothing.
        carbon_gco2: The bound, of busy and idle GPUs, PUE included.
        busy_energy_kwh, idle_energy_kwh: Behind it, PUE included.
        shortfall_gpu_hours: (classes,) what cannot be done by any schedule.
        solver, note: Who solved it, and what a reader should know.
    """

    status: SolveStatus
    solver: Backend
    carbon_gco2: float | None
    busy_energy_kwh: float | None
    idle_energy_kwh: float | None
    work_index: Ints
    step_index: Ints
    gpu_hours: Floats
    shortfall_gpu_hours: Floats
    note: str = ""


def carbon_bound(
    problem: CarbonBoundProblem,
    backend: Backend = Backend.HIGHS,
    *,
    time_limit_s: float | None = None,
    report: Report = unreported,
) -> CarbonBound:
    """Return the least carbon any schedule of the work within the capacity could have reached.

    Args:
        problem: The work, the capacity and the grid.
        backend: Who solves the linear programme.
        time_limit_s: For each of the at most two solves; a bound that is not proven is not returned.
        report: Told how far it is.
    """
    work_of, step_of, upper = _columns(problem)
    solution = solve(
        _model(problem, work_of, step_of, upper), backend, time_limit_s=time_limit_s, report=part_of(report, 0.0, 0.5)
    )
    short = np.zeros(len(problem.work))
    if solution.status is SolveStatus.INFEASIBLE:
        most_work = _most_work(problem, work_of, step_of, upper)
        most = solve(most_work, backend, time_limit_s=time_limit_s, report=part_of(report, 0.5, 1.0))
        if most.status is SolveStatus.OPTIMAL and most.values is not None:
            done = np.bincount(work_of, most.values, minlength=short.size)
            wanted = np.array([item.gpu_hours for item in problem.work])
            short = np.where(wanted - done > 1e-7 * wanted, wanted - done, 0.0)
            return _bound(problem, most, work_of, step_of, short)
        return _bound(problem, most, work_of, step_of, short, status=SolveStatus.INFEASIBLE)
    return _bound(problem, solution, work_of, step_of, short)


def _windows(problem: CarbonBoundProblem) -> tuple[Ints, Ints]:
    """Return the first step of each class's window and the step after its last, (classes,) both."""
    starts, ends = problem.curve.times_s, problem.curve.edges_s[1:]
    first = np.searchsorted(ends, _releases_s(problem), side="right")
    last = np.searchsorted(starts, _deadlines_s(problem), side="left")
    return first.astype(np.int64), last.astype(np.int64)


def _releases_s(problem: CarbonBoundProblem) -> Floats:
    begin_s = problem.curve.start_s
    return np.array([begin_s if item.release_s is None else item.release_s for item in problem.work])


def _deadlines_s(problem: CarbonBoundProblem) -> Floats:
    end_s = problem.curve.end_s
    return np.array([end_s if item.deadline_s is None else item.deadline_s for item in problem.work])


def _columns(problem: CarbonBoundProblem) -> tuple[Ints, Ints, Floats]:
    """Return class, step and upper bound of each variable: one wherever a class's window meets a step with GPUs."""
    starts, ends = problem.curve.times_s, problem.curve.edges_s[1:]
    release, deadline = _releases_s(problem), _deadlines_s(problem)
    widest = np.array([np.inf if item.max_gpus is None else item.max_gpus for item in problem.work])
    first, last = _windows(problem)
    counts = np.maximum(last - first, 0)
    work_of = np.repeat(np.arange(counts.size, dtype=np.int64), counts)
    within = np.arange(work_of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    step_of = (first[work_of] + within).astype(np.int64)
    overlap_s = np.minimum(ends[step_of], deadline[work_of]) - np.maximum(starts[step_of], release[work_of])
    gpus = np.minimum(np.broadcast_to(problem.capacity_gpus, starts.shape)[step_of], widest[work_of])
    upper = gpus * np.maximum(overlap_s, 0.0) / S_PER_HOUR
    kept = upper > 0
    return work_of[kept], step_of[kept], upper[kept]


def _gco2_per_gpu_hour(problem: CarbonBoundProblem, work_of: Ints, step_of: Ints) -> Floats:
    """Return what a GPU-hour adds over the idling it replaces; gCO2, (variables,)."""
    power_w = np.array([item.power_w for item in problem.work])[work_of] - problem.idle_power_w
    return problem.pue * problem.curve.intensity_gco2_per_kwh[step_of] * power_w / W_PER_KW


def _model(problem: CarbonBoundProblem, work_of: Ints, step_of: Ints, upper: Floats) -> LinearModel:
    idle_kwh = problem.pue * problem.idle_power_w / W_PER_KW * problem.capacity_gpu_hours
    builder = ModelBuilder()
    columns = builder.add_variables(work_of.size, upper=upper, cost=_gco2_per_gpu_hour(problem, work_of, step_of))
    wanted = np.array([item.gpu_hours for item in problem.work])
    builder.add_rows(wanted.size, (work_of, columns, 1.0), lower=wanted, upper=wanted)
    _add_capacity(builder, problem, step_of, columns)
    return builder.build(offset=float(idle_kwh @ problem.curve.intensity_gco2_per_kwh))


def _most_work(problem: CarbonBoundProblem, work_of: Ints, step_of: Ints, upper: Floats) -> LinearModel:
    builder = ModelBuilder()
    columns = builder.add_variables(work_of.size, upper=upper, cost=-1.0)
    wanted = np.array([item.gpu_hours for item in problem.work])
    builder.add_rows(wanted.size, (work_of, columns, 1.0), upper=wanted)
    _add_capacity(builder, problem, step_of, columns)
    return builder.build()


def _add_capacity(builder: ModelBuilder, problem: CarbonBoundProblem, step_of: Ints, columns: Ints) -> None:
    builder.add_rows(problem.curve.times_s.size, (step_of, columns, 1.0), upper=problem.capacity_gpu_hours)


def _bound(
    problem: CarbonBoundProblem,
    solution: Solution,
    work_of: Ints,
    step_of: Ints,
    short: NDArray[np.float64],
    status: SolveStatus | None = None,
) -> CarbonBound:
    status = status or (SolveStatus.INFEASIBLE if short.any() else solution.status)
    if status is SolveStatus.FEASIBLE:
        status = SolveStatus.TIME_LIMIT
    proven = solution.status is SolveStatus.OPTIMAL and solution.values is not None
    values = solution.values if proven and solution.values is not None else np.zeros(work_of.size)
    busy = idle = carbon = None
    if status is SolveStatus.OPTIMAL:
        power_w = np.array([item.power_w for item in problem.work])[work_of]
        busy = float(problem.pue / W_PER_KW * (power_w @ values))
        unused = float(problem.capacity_gpu_hours.sum() - values.sum())
        idle = problem.pue / W_PER_KW * problem.idle_power_w * max(unused, 0.0)
        carbon = solution.objective
    used = values > 0
    return CarbonBound(
        status, solution.solver, carbon, busy, idle, work_of[used], step_of[used], values[used], short, solution.note
    )
