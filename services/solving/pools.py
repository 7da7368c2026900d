"""Pools of LLM instances and their plans, converted between messages and the core."""

from collections.abc import Sequence

import numpy as np

from services.contracts import pools
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.solving import Report, SolveStatus, unreported
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.pool_planning import plan_pools
from services.core.policies.freesh.pools import (
    NodeKind,
    Partition,
    PoolPlan,
    PoolProblem,
    Shortfall,
    drawn_w,
    energy_j,
    switches,
    switching_j,
)


def pool_problem(request: pools.PoolsRequest) -> PoolProblem:
    """Return the problem for the core; ``DomainError`` if what may not be stopped needs more GPUs than there are."""
    types = sorted({name for each in (*request.locations, *request.modes) for name in each.gpus})
    running, locked = _running(request)
    return PoolProblem(
        step_s=request.step_s,
        rates=_rates(request),
        gpus=_counts([each.gpus for each in request.locations], types),
        mode_gpus=_counts([each.gpus for each in request.modes], types),
        partitions=tuple(_partition(request, part) for part in request.chosen),
        head_room=request.head_room,
        running=running,
        locked=locked,
        idle_w=np.array([_idle_w(request, mode) for mode in request.modes]),
        start_j=np.array([3_600 * mode.start_wh for mode in request.modes]),
        stop_j=np.array([3_600 * mode.stop_wh for mode in request.modes]),
        negative_rates=request.negative_rates,
        region_shares=_region_shares(request),
        follows_load=np.array([mode.idle_w is not None for mode in request.modes]),
        node_kinds=tuple(
            NodeKind(at, types.index(kind.gpu_type), kind.nodes, kind.gpus)
            for at, location in enumerate(request.locations)
            for kind in location.nodes
            if kind.gpu_type in types
        ),
    )


def incumbent_plan(request: pools.PoolsRequest) -> PoolPlan | None:
    """Return the incumbent for the core; None if there is none or it does not fit the problem."""
    plan = request.incumbent
    part = next((each for each in request.chosen if plan is not None and each.name == plan.partition), None)
    if plan is None or part is None:
        return None
    locations, modes, classes = map(_places, (request.locations, request.modes, part.classes))
    instances = np.zeros((len(locations), len(classes), len(modes)), np.int64)
    kept = np.zeros((len(locations), len(modes)), np.int64)
    for each in plan.instances:
        if each.location not in locations or each.mode not in modes:
            return None
        place, mode = locations[each.location], modes[each.mode]
        if each.request_class is None:
            kept[place, mode] += each.count
        elif each.request_class in classes:
            instances[place, classes[each.request_class], mode] += each.count
        else:
            return None
    return PoolPlan(SolveStatus.FEASIBLE, request.solver, request.chosen.index(part), instances, kept)


def solve_pools(request: pools.PoolsRequest, report: Report = unreported) -> pools.PoolsResult:
    """Return the plan that answers a request; ``DomainError`` as of ``pool_problem``."""
    problem = pool_problem(request)
    plan = plan_pools(
        problem,
        request.solver,
        time_limit_s=request.time_limit_s,
        relative_gap=request.gap,
        incumbent=incumbent_plan(request),
        report=report,
    )
    return pools_result(request, problem, plan)


def pools_result(request: pools.PoolsRequest, problem: PoolProblem, plan: PoolPlan) -> pools.PoolsResult:
    """Return a plan with the names used in the request."""
    if plan.partition is None:
        return pools.PoolsResult.of(plan, instances=[], shortfall=[])
    part = request.chosen[plan.partition]
    starts, stops = switches(problem, plan)
    prices = [location.price_per_kwh for location in request.locations]
    return pools.PoolsResult.of(
        plan,
        partition=part.name,
        instances=_instances(request, part, problem, plan),
        emissions_kg=_weighed(problem, plan, _intensities(request)) / 1_000,
        energy_kwh=_weighed(problem, plan, np.ones_like(problem.rates)),
        cost=None if None in prices else _weighed(problem, plan, np.array(prices, dtype=np.float64)),
        starts=_changes(request, starts),
        stops=_changes(request, stops),
        shortfall=[] if plan.shortfall is None else _unserved(part, problem, plan, plan.shortfall),
        full=[] if plan.shortfall is None else _full(request, plan.shortfall),
    )


def _weighed(problem: PoolProblem, plan: PoolPlan, rates: Floats) -> float:
    """Return the plan's energy in kWh, each location and step weighted by its rate (n_locations, n_steps)."""
    drawn, switched = energy_j(problem, plan), switching_j(problem, plan)
    return float(drawn @ rates.sum(axis=1) + switched @ rates.mean(axis=1)) / J_PER_KWH


def _instances(
    request: pools.PoolsRequest, part: pools.RequestPartition, problem: PoolProblem, plan: PoolPlan
) -> list[pools.PlannedInstances]:
    power_w = drawn_w(problem, plan)

    def planned(location: int, mode: int, name: str | None, count: float, each_w: float) -> pools.PlannedInstances:
        place, of = request.locations[location].name, request.modes[mode].name
        return pools.PlannedInstances(location=place, request_class=name, mode=of, count=int(count), power_w=each_w)

    return [
        planned(at, mode, part.classes[pool].name, plan.instances[at, pool, mode], float(power_w[at, pool, mode]))
        for at, pool, mode in np.argwhere(plan.instances).tolist()
    ] + [
        planned(at, mode, None, plan.kept[at, mode], float(problem.idle_w[mode]))
        for at, mode in np.argwhere(plan.kept).tolist()
    ]


def _changes(request: pools.PoolsRequest, counts: Ints) -> list[pools.InstanceChange]:
    places, modes = [each.name for each in request.locations], [each.name for each in request.modes]
    return [
        pools.InstanceChange(location=places[at], mode=modes[mode], count=int(counts[at, mode]))
        for at, mode in np.argwhere(counts).tolist()
    ]


def _unserved(
    part: pools.RequestPartition, problem: PoolProblem, plan: PoolPlan, found: Shortfall
) -> list[pools.UnservedDemand]:
    assert plan.partition is not None
    reach = problem.reach_of(plan.partition) & problem.partitions[plan.partition].usable
    servable: Bools = np.all(reach.any(axis=(1, 3)), axis=0)
    return [
        pools.UnservedDemand(
            request_class=part.classes[index].name,
            qps=float(found.qps[index]),
            reason="no_mode" if not servable[index] else "gpus" if found.unserved_alone[index] else "gpus_shared",
        )
        for index in np.flatnonzero(found.qps).tolist()
    ]


def _full(request: pools.PoolsRequest, found: Shortfall) -> list[pools.FullGpus]:
    types = sorted({name for each in (*request.locations, *request.modes) for name in each.gpus})
    return [
        pools.FullGpus(location=request.locations[location].name, gpu_type=types[gpu_type])
        for location, gpu_type in np.argwhere(found.full).tolist()
    ]


def _places(named: Sequence[pools.PoolLocation | pools.PoolMode | pools.RequestClass]) -> dict[str, int]:
    return {each.name: index for index, each in enumerate(named)}


def _counts(gpus: list[dict[str, int]], types: list[str]) -> Ints:
    return np.array([[each.get(name, 0) for name in types] for each in gpus], dtype=np.int64)


def _intensities(request: pools.PoolsRequest) -> Floats:
    """Return the intensities in gCO2/kWh: (n_locations, n_steps)."""
    scale = pools.GCO2_PER_KWH_OF_LB_PER_MWH if request.intensity_unit == "lb_per_mwh" else 1.0
    return scale * np.array([location.intensity for location in request.locations])


def _rates(request: pools.PoolsRequest) -> Floats:
    if request.objective == "cost":
        return np.array([location.price_per_kwh for location in request.locations], dtype=np.float64)
    intensity = np.array([location.intensity for location in request.locations])
    if request.objective == "carbon":
        return intensity
    # A mode draws the same power everywhere, so that many plans have the least energy.
    return 1 + pools.TIE_SHARE * intensity / max(float(np.abs(intensity).max()), 1e-9)


def _running(request: pools.PoolsRequest) -> tuple[Ints, Ints]:
    shape = (len(request.locations), len(request.modes))
    running, locked = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    at_location, at_mode = _places(request.locations), _places(request.modes)
    for each in request.running:
        place = at_location[each.location], at_mode[each.mode]
        running[place] += each.instances
        if each.up_s is not None and each.up_s < request.min_up_s:
            locked[place] += each.instances
    return running, locked


def _region_shares(request: pools.PoolsRequest) -> Floats:
    shares = np.array([region.share for region in request.regions] or [1.0])
    return shares / shares.sum()


def _partition(request: pools.PoolsRequest, part: pools.RequestPartition) -> Partition:
    at_mode = _places(request.modes)
    shape = (len(part.classes), len(request.modes))
    max_qps, power_w, eligible = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_)
    network_ms = np.array(
        [[region.network_ms.get(place.name, 0.0) for place in request.locations] for region in request.regions]
    )
    reach = np.ones((*network_ms.shape, *shape), np.bool_) if request.regions else None
    accurate = np.array([[_is_accurate(mode, region) for mode in request.modes] for region in request.regions])
    for index, each in enumerate(part.classes):
        for profile in each.profiles:
            place = index, at_mode[profile.mode]
            max_qps[place], power_w[place], eligible[place] = profile.max_qps, profile.power_w, each.admits(profile)
            if reach is not None:
                within = [[each.admits(profile, far_ms) for far_ms in row] for row in network_ms.tolist()]
                reach[:, :, *place] = np.array(within) & accurate[:, place[1], None]
    means = [each.mean_qps or each.demand_qps for each in part.classes]
    demand = np.array([each.demand_qps for each in part.classes])
    return Partition(demand, max_qps, power_w, eligible, reach, np.array(means))


def _is_accurate(mode: pools.PoolMode, region: pools.ClientRegion) -> bool:
    """Whether a mode meets the accuracy that a region's requests ask for."""
    return mode.accuracy_pct is None or mode.accuracy_pct >= (region.least_accuracy_pct or 0.0)


def _idle_w(request: pools.PoolsRequest, mode: pools.PoolMode) -> float:
    if mode.idle_w is not None:
        return mode.idle_w
    classes = (each for part in request.partitions for each in part.classes)
    powers = [found.power_w for each in classes for found in each.profiles if found.mode == mode.name]
    return min(powers, default=0.0)
