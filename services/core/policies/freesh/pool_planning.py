"""The pools of least carbon, energy or cost: equation 1 solved, with the bound next to the plan.

A partition's linear relaxation bounds how good its plans can be. Partitions are then tried from the most promising on,
and one whose relaxation is no better than a plan already found is left out. If a model is large, integers are first
sought near the relaxation: among the few variables that it uses or nearly uses, down to an instance or two below its
value for each. That comes within a fraction of a per cent of the bound in a small part of the time; the whole model
follows where it is not enough.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.serving import NegativeRates
from services.core.domain.solving import Backend, Progress, Report, SolveStatus, unreported
from services.core.policies.freesh.pool_model import PoolModel, pool_model, switch_price
from services.core.policies.freesh.pools import PoolPlan, PoolProblem, Shortfall, coverages, energy_j, switching_j
from services.core.solvers.model import LinearModel, Patience, Solution
from services.core.solvers.solve import solve

EXACT_GAP = 1e-6
GOOD_GAP = 0.01
PATIENCE_CHECKS = 2_000
"""Without a requested gap: how long HiGHS looks for the optimum before a plan within ``GOOD_GAP`` is accepted, counted
by its own checks of whether to stop, so that a plan is the same on a busy machine."""
EXACT_COLUMNS = 150
"""Beyond this many variables the optimum takes too long, and a plan within ``GOOD_GAP`` is accepted at once."""
LARGE_COLUMNS = 400  #: From this many variables on, a plan is first sought near the relaxation
NEAR = ((0.01, 1), (0.05, 2))  #: How near, one after the other: ``share`` and ``below`` of ``_near``
SLIGHT = 1e-7
EPSILON_QPS = 1e-9


@dataclass
class _Budget:
    """The solver's remaining seconds and checks, and the requested gap: None for the optimum within patience.

    Reports go to the caller, with the share of the time limit used and the least objective so far.
    """

    left_s: float
    gap: float | None
    report: Report = unreported
    doing: str = ""
    least: float | None = None
    checks: int = field(default_factory=lambda: PATIENCE_CHECKS)

    def __post_init__(self) -> None:
        self._limit_s = self.left_s

    def solve(self, model: LinearModel, backend: Backend, gap: float, start: Floats | None, **more: Any) -> Solution:
        """Solve a model within the seconds left; ``more`` as for ``solvers.solve``."""
        report = unreported if self.report is unreported else self._tell
        limit_s = max(self.left_s, 0.001)
        found = solve(model, backend, time_limit_s=limit_s, relative_gap=gap, start=start, report=report, **more)
        self.left_s -= found.solver_s
        self.checks = max(0, self.checks - found.checks)
        return found

    def found(self, objective: float) -> None:
        self.least = objective if self.least is None else min(self.least, objective)

    def _tell(self, progress: Progress) -> None:
        gone_s = self._limit_s - self.left_s + progress.share * max(self.left_s, 0.0)
        self.report(Progress(min(1.0, gone_s / self._limit_s), f"{self.doing}: {progress.doing}", self.least))

    def solve_whole(self, model: LinearModel, backend: Backend, start: Floats | None, cutoff: float | None) -> Solution:
        """Solve a model to the requested gap, in one call, or until it can yield nothing below ``cutoff``."""
        if self.gap is not None:
            return self.solve(model, backend, self.gap, start, cutoff=cutoff)
        if model.variables > EXACT_COLUMNS:
            self.checks = 0
            return self.solve(model, backend, GOOD_GAP, start, cutoff=cutoff)
        patience = Patience(self.checks, GOOD_GAP)
        return self.solve(model, backend, EXACT_GAP, start, patience=patience, cutoff=cutoff)

    def is_enough(self, gap: float) -> bool:
        """Return whether this gap is small enough to stop looking."""
        if self.left_s <= 0:
            return True
        return gap <= (self.gap if self.gap is not None else GOOD_GAP if not self.checks else EXACT_GAP)


@dataclass
class _Candidate:
    """A partition under consideration: its model, the best solution so far, and a bound that no solution beats."""

    partition: int
    model: PoolModel
    relaxation: Solution
    bound: float
    values: Floats | None = None
    objective: float = np.inf
    solver: Backend | None = None
    note: str = ""

    @property
    def gap(self) -> float:
        return _gap(self.objective, self.bound)

    def take(self, found: Solution) -> None:
        if found.values is not None and found.objective is not None and found.objective < self.objective:
            self.values, self.objective, self.solver = found.values, found.objective, found.solver
        self.note = self.note or found.note


def plan_pools(
    problem: PoolProblem,
    backend: Backend | str = Backend.HIGHS,
    *,
    time_limit_s: float = 60.0,
    relative_gap: float | None = None,
    incumbent: PoolPlan | None = None,
    report: Report = unreported,
) -> PoolPlan:
    """Return the plan with the least objective; if the demand cannot be served, the one with the least shortfall.

    Args:
        backend: The solver to use; relaxations are always solved by HiGHS.
        time_limit_s: Limit for all solving together, by the solvers' own clocks; > 0.
        relative_gap: Stop at a plan proven to be this close to the bound. None: the optimum if
            ``PATIENCE_CHECKS`` suffice for it, else a plan within ``GOOD_GAP``.
        incumbent: A plan to begin from, such as the one in force.
        report: Called with the progress, as a share of the time limit, if HiGHS is the solver.

    Raises:
        DomainError: as for ``solve``.
    """
    backend, budget = Backend(backend), _Budget(time_limit_s, relative_gap, report)
    wanted = {index: problem.wanted_qps(index) for index in range(len(problem.partitions))}
    plan = _best(problem, wanted, backend, budget, incumbent)
    if plan.status is not SolveStatus.INFEASIBLE:
        return plan
    return _least_shortfall(problem, wanted, backend, budget)


def objective_of(problem: PoolProblem, plan: PoolPlan) -> float:
    """Return a plan's objective: rate x power x step over steps and instances, plus its starts and stops."""
    drawn_j = energy_j(problem, plan)
    return float(problem.rate_sums @ drawn_j + switch_price(problem) @ switching_j(problem, plan))


def _best(
    problem: PoolProblem, wanted: Mapping[int, Floats], backend: Backend, budget: _Budget, incumbent: PoolPlan | None
) -> PoolPlan:
    candidates: list[_Candidate] = []
    for index, wanted_qps in wanted.items():
        model = pool_model(problem, index, wanted_qps)
        budget.doing = f"bound of partition {index + 1} of {len(problem.partitions)}"
        relaxation = budget.solve(model.model.relaxed(), Backend.HIGHS, EXACT_GAP, None)
        if relaxation.status is not SolveStatus.INFEASIBLE:
            bound = -np.inf if relaxation.bound is None else relaxation.bound
            candidates.append(_Candidate(index, model, relaxation, bound))
    if not candidates:
        return PoolPlan(SolveStatus.INFEASIBLE, backend)
    candidates.sort(key=lambda each: (each.bound, each.partition))
    for candidate in candidates:
        objective = min(each.objective for each in candidates)
        proven = _gap(objective, min(each.bound for each in candidates))
        if candidate.bound < objective and not budget.is_enough(proven):
            budget.doing = f"partition {candidate.partition + 1} of {len(problem.partitions)}"
            start = incumbent if incumbent and incumbent.partition == candidate.partition else None
            _improve(candidate, backend, budget, start, objective)
            if candidate.values is not None:
                budget.found(candidate.objective)
    return _plan_of(problem, wanted, candidates, backend, budget)


def _improve(
    candidate: _Candidate, backend: Backend, budget: _Budget, incumbent: PoolPlan | None, cutoff: float
) -> None:
    """Find an integer solution for a partition, and raise its bound, as far as time allows.

    It stops once the bound is no lower than ``cutoff``, the objective of another partition's plan.
    """
    model = candidate.model.model
    start = candidate.model.start(incumbent.instances, incumbent.kept) if incumbent else None
    wanted = GOOD_GAP if budget.gap is None else budget.gap
    if model.variables > LARGE_COLUMNS:
        for share, below in NEAR:
            near = _near(candidate.model, candidate.relaxation, share, below)
            candidate.take(budget.solve(near, backend, wanted / 2, start))
            if candidate.gap <= wanted:
                return
    if budget.left_s <= 0:
        return
    found = budget.solve_whole(model, backend, start if candidate.values is None else candidate.values, cutoff)
    candidate.take(found)
    if found.status is SolveStatus.INFEASIBLE:
        candidate.bound = np.inf
    elif found.bound is not None:
        candidate.bound = max(candidate.bound, found.bound)


def _near(model: PoolModel, relaxation: Solution, share: float, below: int) -> LinearModel:
    """Return the model restricted to the instances that its relaxation uses or nearly uses.

    Args:
        share: A variable whose use would lose no more than this share of an instance's mean cost counts as nearly used.
        below: How many instances fewer than in the relaxation are allowed.
    """
    whole, (values, losses) = model.model, (relaxation.values, relaxation.reduced_costs)
    if values is None or losses is None:
        return whole
    of_instances = np.arange(whole.variables) < model.location.size
    cost = float(np.abs(whole.costs[of_instances]).mean()) if model.location.size else 0.0
    unused = of_instances & (values <= SLIGHT) & (losses > share * cost)
    least = np.where(of_instances, np.floor(values + SLIGHT) - below, whole.lower)
    return replace(whole, lower=np.maximum(whole.lower, least), upper=np.where(unused, whole.lower, whole.upper))


def _plan_of(
    problem: PoolProblem, wanted: Mapping[int, Floats], candidates: list[_Candidate], backend: Backend, budget: _Budget
) -> PoolPlan:
    best = min(candidates, key=lambda each: (each.objective, each.partition))
    bound = min(each.bound for each in candidates)
    note = next((each.note for each in candidates if each.note), "")
    if best.values is None or best.solver is None:
        exhausted = budget.left_s <= 0
        status = SolveStatus.TIME_LIMIT if exhausted else SolveStatus.INFEASIBLE
        return PoolPlan(status, backend, bound=None if np.isinf(bound) else bound, note=note)
    n_locations, n_modes = problem.running.shape
    n_classes = wanted[best.partition].size
    plan = PoolPlan(
        status=SolveStatus.FEASIBLE,
        solver=best.solver,
        partition=best.partition,
        instances=best.model.instances(best.values, (n_locations, n_classes, n_modes)),
        kept=best.model.kept(best.values, (n_locations, n_modes)),
        note=note,
    )
    if problem.negative_rates is NegativeRates.FRUGAL:
        plan = without_needless(problem, plan, wanted[best.partition])
    objective = objective_of(problem, plan)
    bound = -np.inf if any(each.model.is_clipped for each in candidates) else min(bound, objective)
    proven = _gap(objective, bound) <= 1.001 * max(budget.gap or 0.0, EXACT_GAP)  # a solver's bound is rounded
    status = SolveStatus.OPTIMAL if proven else SolveStatus.FEASIBLE
    return replace(plan, status=status, objective=objective, bound=None if np.isinf(bound) else bound)


def without_needless(problem: PoolProblem, plan: PoolPlan, wanted_qps: Floats) -> PoolPlan:
    """Return the plan without instances whose requests the others of their class can serve, costliest first.

    Such instances are left only by the solver's tolerances, and by negative rates that were counted as 0. Where power
    follows the load and rates are not negative, one more instance may save energy, so none is dropped. One that may not
    be stopped is kept without requests.
    """
    assert plan.partition is not None
    part = problem.partitions[plan.partition]
    instances, kept = plan.instances.copy(), plan.kept.copy()
    needs = coverages(problem, plan.partition, wanted_qps)
    by_load_w, costs_power = problem.by_load_w(plan.partition), (problem.rate_sums >= 0)[:, None]
    for request_class in range(wanted_qps.size):
        own = [need for need in needs if need.request_class == request_class]
        while True:
            there = instances[:, request_class, :]
            needless = (there > 0) & ~(costs_power & bool(by_load_w[request_class].any()))
            for need in own:
                capacity = there * part.max_qps[request_class]
                spare_qps = float(capacity[need.reached].sum()) - need.needed_qps
                needless &= ~need.reached | (part.max_qps[request_class] <= spare_qps + EPSILON_QPS)[None, :]
            if not needless.any():
                break
            costs = np.outer(problem.rate_sums, part.power_w[request_class])
            location, mode = np.unravel_index(np.argmax(np.where(needless, costs, -np.inf)), costs.shape)
            instances[location, request_class, mode] -= 1
            if instances[location, :, mode].sum() + kept[location, mode] < problem.locked[location, mode]:
                kept[location, mode] += 1
    return replace(plan, instances=instances, kept=kept)


def _least_shortfall(problem: PoolProblem, wanted: Mapping[int, Floats], backend: Backend, budget: _Budget) -> PoolPlan:
    """Return the best plan that serves as much as possible, using the partition that serves most."""
    budget.doing = "least demand that stays unserved"
    lacking = {index: _lacking(problem, index, wanted_qps, budget) for index, wanted_qps in wanted.items()}
    partition = min(lacking, key=lambda index: (lacking[index].sum() / wanted[index].sum(), index))
    served = np.maximum(wanted[partition] - lacking[partition] - EPSILON_QPS, 0.0)
    without = replace(problem, unserved_qps=wanted[partition] - served)
    plan = _best(without, {partition: served}, backend, budget, None)
    if plan.partition is None:
        return plan
    left = problem.gpus - np.einsum("nm,mc->nc", plan.totals(), problem.mode_gpus)
    modes = problem.partitions[partition].usable[lacking[partition] > EPSILON_QPS].any(axis=0)
    missing: Ints = np.maximum(problem.mode_gpus[modes][None, :, :] - left[:, None, :], 0).sum(axis=2)
    needed: Ints = problem.mode_gpus[modes].sum(axis=0)
    crowded = missing.min(axis=1, initial=np.iinfo(np.int64).max) > 0
    alone = [
        _lacking(problem, partition, np.where(np.arange(served.size) == each, wanted[partition], 0.0), budget)[each]
        for each in range(served.size)
    ]
    shortfall = Shortfall(
        qps=np.where(lacking[partition] > EPSILON_QPS, lacking[partition], 0.0),
        unserved_alone=np.array(alone) > EPSILON_QPS,
        full=(needed > 0)[None, :] & crowded[:, None] & (problem.gpus > 0),
    )
    return replace(plan, status=SolveStatus.INFEASIBLE, shortfall=shortfall)


def _lacking(problem: PoolProblem, partition: int, wanted_qps: Floats, budget: _Budget) -> Floats:
    """Return the least demand that remains unserved: (n_classes,) requests per second."""
    model = pool_model(problem, partition, wanted_qps, shortfall=True)
    found = budget.solve(model.model, Backend.HIGHS, EXACT_GAP, None)
    return wanted_qps if found.values is None else found.values[model.lacking_qps]


def _gap(objective: float, bound: float) -> float:
    if not np.isfinite(objective) or not np.isfinite(bound):
        return np.inf
    return max(0.0, objective - bound) / max(abs(objective), 1e-9)
