"""Pools against the authors' published solutions, against every plan there is, and against what cannot be served."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.pools import PoolsRequest
from services.core.domain.errors import DomainError
from services.core.domain.serving import NegativeRates
from services.core.domain.solving import Backend, Progress, SolveStatus
from services.core.policies.freesh import pool_planning
from services.core.policies.freesh.pool_planning import objective_of, plan_pools, without_needless
from services.core.policies.freesh.pools import NodeKind, Partition, PoolPlan, PoolProblem, drawn_w, switches
from services.core.solvers.model import LinearModel, ModelBuilder, Solution
from services.core.solvers.solve import solve
from services.solving.pools import pool_problem, pools_result
from tests.benchmarks.bench_pools import a_site

EXAMPLE = json.loads((Path(__file__).parents[3] / "examples" / "pools" / "freesh-first.json").read_text())
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


def published(index: int, **changes: Any) -> PoolsRequest:
    """One of the authors' first twelve half hours, on their terms unless changed."""
    terms, document = PUBLISHED[index], json.loads(json.dumps(EXAMPLE))
    for location, intensity in zip(document["locations"], terms["intensity"], strict=True):
        location["intensity"] = intensity
    for part in document["partitions"]:
        for each, demand in zip(part["classes"], terms["demand_qps"][part["name"]], strict=True):
            each["demand_qps"] = demand
    return PoolsRequest.model_validate(document | changes)


def planned(request: PoolsRequest, solver: str = "highs") -> PoolPlan:
    return plan_pools(pool_problem(request), solver)


def test_the_example_is_the_first_published_problem() -> None:
    assert PoolsRequest.model_validate(EXAMPLE) == published(0)


@pytest.mark.parametrize("solver", ["highs", "cbc", "gurobi"])
@pytest.mark.parametrize("index", range(12))
def test_the_published_objectives_are_reproduced_by_every_solver(index: int, solver: str) -> None:
    plan = planned(published(index), solver)
    assert plan.status is SolveStatus.OPTIMAL
    assert plan.solver == solver
    assert plan.objective == pytest.approx(PUBLISHED[index]["objective"], rel=1e-6)


@pytest.mark.parametrize("index", range(12))
def test_a_choice_of_partitions_is_never_worse_and_frugality_never_better(index: int) -> None:
    literal = planned(published(index, partition=None))
    frugal = planned(published(index, partition=None, negative_rates="frugal"))
    assert literal.objective is not None
    assert frugal.objective is not None
    assert literal.objective <= PUBLISHED[index]["objective"] * (1 + 1e-9)
    assert literal.objective <= frugal.objective + 1e-6 * abs(frugal.objective)


def test_an_instance_nobody_needs_is_started_for_a_negative_rate_only_literally() -> None:
    rates = np.array([[-1.0], [2.0]])
    plans = {reading: plan_pools(a_problem(rates=rates, negative_rates=reading)) for reading in NegativeRates}
    assert plans[NegativeRates.PAPER].instances.sum() == 2  # all four GPUs of the place with the negative rate
    assert plans[NegativeRates.FRUGAL].instances.sum() == 1
    assert plans[NegativeRates.FRUGAL].objective == pytest.approx(-300 * 100)


def a_problem(demand_qps: float = 0.9, **changes: Any) -> PoolProblem:
    """Two places of four GPUs, one mode of two GPUs: 1 request a second at 100 W."""
    part = Partition(np.array([[demand_qps]]), np.ones((1, 1)), np.full((1, 1), 100.0), np.ones((1, 1), np.bool_))
    none = np.zeros((2, 1), np.int64)
    problem = PoolProblem(
        step_s=300.0,
        rates=np.array([[1.0], [2.0]]),
        gpus=np.array([[4], [4]]),
        mode_gpus=np.array([[2]]),
        partitions=(part,),
        head_room=1.0,
        running=none,
        locked=none,
        idle_w=np.array([40.0]),
        start_j=np.zeros(1),
        stop_j=np.zeros(1),
    )
    return replace(problem, **changes)


def test_starts_and_stops_are_counted_and_priced() -> None:
    running = np.array([[0], [1]])
    free = plan_pools(a_problem(running=running))
    assert [each.tolist() for each in switches(a_problem(running=running), free)] == [[[1], [0]], [[0], [1]]]
    dear = a_problem(running=running, start_j=np.array([1e6]))
    stays = plan_pools(dear)
    assert stays.instances[:, 0, 0].tolist() == [0, 1]
    assert stays.objective == pytest.approx(300 * 100 * 2)


def test_who_is_too_young_to_stop_is_kept_and_counted() -> None:
    young = np.array([[0], [2]])
    plan = plan_pools(a_problem(running=young, locked=young))
    assert plan.instances[:, 0, 0].tolist() == [1, 0]
    assert plan.kept[:, 0].tolist() == [0, 2]
    assert plan.objective == pytest.approx(300 * (100 * 1 + 2 * 2 * 40))


def test_more_locked_instances_than_gpus_are_refused() -> None:
    many = np.array([[0], [3]])
    with pytest.raises(DomainError, match="more GPUs than there are"):
        a_problem(running=many, locked=many)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tbt_ms": 1}, "no_mode"),
        ({"demand_qps": [500.0] * 6}, "gpus"),
        ({"demand_qps": [34.0] * 6}, "gpus_shared"),
    ],
)
def test_what_cannot_be_served_is_named_and_the_rest_is_planned(changes: dict[str, Any], reason: str) -> None:
    document = published(1).model_dump(mode="json")
    document["partitions"][0]["classes"][2] |= changes  # long inputs with short outputs
    request = PoolsRequest.model_validate(document)
    problem = pool_problem(request)
    result = pools_result(request, problem, plan_pools(problem))
    assert result.status is SolveStatus.INFEASIBLE
    assert [(each.request_class, each.reason) for each in result.shortfall] == [("LS", reason)]
    served = {each.request_class for each in result.instances}
    assert {"SS", "SL", "LL"} <= served
    if reason != "no_mode":
        assert result.full
        limit = 1.1 * changes["demand_qps"][0]
        profiles = {each.mode: each.max_qps for each in request.partitions[0].classes[2].profiles}
        qps = sum(each.count * profiles[each.mode] for each in result.instances if each.request_class == "LS")
        assert qps >= limit - result.shortfall[0].qps - 1e-6


@st.composite
def small_problems(draw: st.DrawFn) -> PoolProblem:
    """Two places, one or two partitions of two classes, two modes: few enough to look at every plan."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    parts = tuple(
        Partition(
            demand_qps=np.round(rng.uniform(0, 1.8, (2, 2)), 2) * rng.integers(0, 2, (2, 1)),
            max_qps=np.round(rng.uniform(0.4, 2.5, (2, 2)), 2),
            power_w=np.round(rng.uniform(50, 400, (2, 2))),
            eligible=rng.random((2, 2)) < 0.9,
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    parts = tuple(replace(part, mean_qps=part.demand_qps * rng.uniform(0, 1, (2, 1))) for part in parts)
    follows = rng.random(2) < draw(st.sampled_from([0.0, 0.7]))
    gpus, sizes = rng.integers(0, 4, (2, 2)), np.array([[1, 0], [draw(st.integers(0, 1)), 2]])
    rates = rng.normal(1, 1.5, (2, 2))
    none = np.zeros((2, 2), np.int64)
    problem = PoolProblem(
        step_s=300.0,
        rates=rates,
        gpus=gpus,
        mode_gpus=sizes,
        partitions=parts,
        head_room=1.1,
        running=none,
        locked=none,
        idle_w=np.array([30.0, 60.0]),
        start_j=np.zeros(2),
        stop_j=np.zeros(2),
        negative_rates=draw(st.sampled_from(NegativeRates)),
        follows_load=follows,
    )
    running = np.minimum(rng.integers(0, 2, (2, 2)), problem.most)
    running[:, 1] *= running[:, 0] == 0
    locked = running * rng.integers(0, 2, (2, 2)) * draw(st.integers(0, 1))
    prices = rng.uniform(0, 3e4, (2, 2)) * draw(st.integers(0, 1))
    return replace(problem, running=running, locked=locked, start_j=prices[0], stop_j=prices[1])


def best_of_all(problem: PoolProblem) -> float | None:
    """Look at every plan; frugal ones by what the word says."""
    best: float | None = None
    frugal = problem.negative_rates is NegativeRates.FRUGAL
    for index, part in enumerate(problem.partitions):
        usable = np.broadcast_to(part.usable, (2, 2, 2)) & (problem.wanted_qps(index) > 0)[None, :, None]
        if not frugal:
            usable = np.broadcast_to(part.usable, (2, 2, 2))
        most = np.where(usable, problem.most[:, None, :], 0)
        for counts in itertools.product(*(range(each + 1) for each in most.ravel().tolist())):
            instances = np.array(counts).reshape(2, 2, 2)
            served = np.einsum("nrm,rm->r", instances, part.max_qps)
            wanted = problem.wanted_qps(index)
            if (served < wanted - 1e-9).any() or not _reaches(problem, index, instances, wanted):
                continue
            gains = np.broadcast_to((problem.rate_sums < 0)[:, None, None], (2, 2, 2))
            needless = (instances > 0) & (part.max_qps <= (served - wanted)[:, None])[None]
            if frugal and (needless & gains).any():
                continue
            for kept in _kept(problem, frugal=frugal):
                plan = PoolPlan(SolveStatus.OPTIMAL, Backend.HIGHS, index, instances, kept)
                if (plan.totals() @ problem.mode_gpus > problem.gpus).any() or (plan.totals() < problem.locked).any():
                    continue
                found = objective_of(problem, plan)
                best = found if best is None else min(best, found)
    return best


def _reaches(problem: PoolProblem, index: int, instances: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether the demand of each region can be divided among the instances that it reaches."""
    part = problem.partitions[index]
    if part.reach is None:
        return True
    builder = ModelBuilder()
    for request_class, qps in enumerate(wanted.tolist()):
        capacity = instances[:, request_class, :] * part.max_qps[request_class]
        flows = [
            builder.add_variables(4, upper=np.where(reach[:, request_class, :], capacity, 0.0).ravel())
            for reach in part.reach
        ]
        for flow, share in zip(flows, problem.region_shares.tolist(), strict=True):
            builder.add_rows(1, (0, flow, 1.0), lower=share * qps - 1e-9)
        builder.add_rows(4, (np.tile(range(4), len(flows)), np.concatenate(flows), 1.0), upper=capacity.ravel())
    return solve(builder.build()).status is SolveStatus.OPTIMAL


def _kept(problem: PoolProblem, *, frugal: bool) -> list[np.ndarray]:
    gains = (problem.rate_sums < 0)[:, None]
    most = np.where(frugal & gains, problem.locked, problem.running)
    return [np.array(each).reshape(2, 2) for each in itertools.product(*(range(n + 1) for n in most.ravel().tolist()))]


@settings(max_examples=60, deadline=None)
@given(problem=small_problems())
def test_no_plan_at_all_is_better(problem: PoolProblem) -> None:
    if problem.gpus.sum() > 9 or (problem.locked @ problem.mode_gpus > problem.gpus).any():
        return
    best, plan = best_of_all(problem), plan_pools(problem, relative_gap=0.0)
    if best is None:
        assert plan.status is SolveStatus.INFEASIBLE
        return
    assert plan.status is SolveStatus.OPTIMAL
    assert plan.objective == pytest.approx(best, rel=1e-6, abs=1e-3)
    assert plan.objective == pytest.approx(objective_of(problem, plan))


@settings(max_examples=20, deadline=None)
@given(problem=small_problems(), seed=st.integers(0, 2**32 - 1), negative=st.booleans())
def test_regions_are_served_from_where_they_are_in_time(problem: PoolProblem, seed: int, negative: bool) -> None:
    """With rates that are not negative no plan is better; with negative ones no instance is needless."""
    rng = np.random.default_rng(seed)
    if problem.gpus.sum() > 9 or (problem.locked @ problem.mode_gpus > problem.gpus).any():
        return
    shares = rng.dirichlet(np.ones(3))
    parts = tuple(replace(part, reach=rng.random((3, 2, 2, 2)) < 0.7) for part in problem.partitions)
    rates = problem.rates if negative else np.abs(problem.rates)
    problem = replace(problem, rates=rates, region_shares=shares, partitions=parts)
    best, plan = best_of_all(problem), plan_pools(problem, relative_gap=0.0)
    if best is None and not (rates < 0).any():
        assert plan.status is SolveStatus.INFEASIBLE
    if plan.status is SolveStatus.INFEASIBLE:
        return
    assert plan.partition is not None
    assert _reaches(problem, plan.partition, plan.instances, problem.wanted_qps(plan.partition))
    if not (rates < 0).any():
        assert plan.objective == pytest.approx(best, rel=1e-6, abs=1e-3)
    elif problem.negative_rates is NegativeRates.FRUGAL:
        again = without_needless(problem, plan, problem.wanted_qps(plan.partition))
        assert (again.instances == plan.instances).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_instances_of_any_sizes_fit_on_whole_nodes_and_no_such_plan_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 2, 3, 4, 5], 2, replace=False)
    nodes = rng.integers(2, 8, rng.integers(1, 4)).tolist()
    part = Partition(
        rng.uniform(0, 0.8 * sum(nodes), (1, 1)),
        (sizes * rng.uniform(0.8, 1.2, 2))[None],
        (sizes * rng.uniform(200, 400, 2))[None],
        np.ones((1, 2), np.bool_),
    )
    problem = a_problem(
        rates=np.ones((1, 1)),
        gpus=np.array([[sum(nodes)]]),
        mode_gpus=sizes[:, None],
        partitions=(part,),
        running=np.zeros((1, 2), np.int64),
        locked=np.zeros((1, 2), np.int64),
        idle_w=np.zeros(2),
        start_j=np.zeros(2),
        stop_j=np.zeros(2),
        node_kinds=tuple(NodeKind(0, 0, 1, gpus) for gpus in nodes),
    )
    best: float | None = None
    for counts in itertools.product(*(range(sum(nodes) // size + 1) for size in sizes.tolist())):
        plan = PoolPlan(SolveStatus.OPTIMAL, Backend.HIGHS, 0, np.array([[counts]]), np.zeros((1, 2), np.int64))
        if np.array(counts) @ part.max_qps[0] >= part.demand_qps[0, 0] and _fits(sizes.tolist(), counts, nodes):
            best = objective_of(problem, plan) if best is None else min(best, objective_of(problem, plan))
    plan = plan_pools(problem, relative_gap=0.0)
    if plan.status is not SolveStatus.INFEASIBLE:
        assert plan.objective == pytest.approx(best)
    else:
        assert best is None
    assert _fits(sizes.tolist(), plan.instances[0, 0].tolist(), nodes)


def _fits(sizes: list[int], counts: Sequence[int], nodes: list[int]) -> bool:
    """Try every way: each node in turn takes any number of each size."""
    if not nodes:
        return not any(counts)
    first, rest = nodes[0], nodes[1:]
    for taken in itertools.product(*(range(count + 1) for count in counts)):
        if sum(n * size for n, size in zip(taken, sizes, strict=True)) <= first:
            left = [count - n for count, n in zip(counts, taken, strict=True)]
            if _fits(sizes, left, rest):
                return True
    return False


def test_power_below_full_load_is_planned_with() -> None:
    """Two instances half loaded: one of little idle power in the dirtier place beats one of much in the cleaner."""
    part = Partition(
        np.array([[1.0]]),
        np.ones((1, 2)),
        np.array([[300.0, 310.0]]),
        np.ones((1, 2), np.bool_),
        mean_qps=np.array([[0.5]]),
    )
    none = np.zeros((1, 2), np.int64)
    problem = a_problem(
        rates=np.array([[1.0]]),
        gpus=np.array([[2]]),
        mode_gpus=np.array([[1], [1]]),
        partitions=(part,),
        running=none,
        locked=none,
        idle_w=np.array([250.0, 100.0]),
        start_j=np.zeros(2),
        stop_j=np.zeros(2),
    )
    assert plan_pools(problem).instances[0, 0].tolist() == [1, 0], "at full power the first mode draws less"
    follows = replace(problem, follows_load=np.ones(2, np.bool_))
    plan = plan_pools(follows)
    assert plan.instances[0, 0].tolist() == [0, 1]
    assert plan.objective == pytest.approx(300 * (100 + 0.5 * 210))
    assert drawn_w(follows, plan)[0, 0, 1] == pytest.approx(205)


def test_what_follows_the_load_gets_what_the_others_leave_where_it_costs_least() -> None:
    part = Partition(np.array([[3.0]]), np.ones((1, 2)), np.full((1, 2), 200.0), np.ones((1, 2), np.bool_))
    problem = a_problem(
        mode_gpus=np.array([[1], [1]]),
        partitions=(part,),
        running=np.zeros((2, 2), np.int64),
        locked=np.zeros((2, 2), np.int64),
        idle_w=np.array([50.0, 50.0]),
        start_j=np.zeros(2),
        stop_j=np.zeros(2),
        follows_load=np.array([True, False]),
    )
    plan = PoolPlan(SolveStatus.OPTIMAL, Backend.HIGHS, 0, np.array([[[1, 1]], [[2, 0]]]), np.zeros((2, 2), np.int64))
    # Three a second: one by the instance that draws 200 W anyway, one in the cleaner place, one by two in the other.
    assert drawn_w(problem, plan)[:, 0].tolist() == [[200.0, 200.0], [125.0, 200.0]]


@pytest.mark.parametrize("reading", NegativeRates)
def test_a_large_plan_keeps_all_its_promises_and_its_bound(reading: NegativeRates) -> None:
    rng = np.random.default_rng(5)
    n_locations, n_classes, n_modes = 30, 4, 6
    sizes = np.array([[2, 0], [4, 0], [8, 0], [0, 2], [0, 4], [0, 8]])
    speeds = rng.uniform(0.5, 1.5, (n_classes, n_modes)) * sizes.sum(axis=1)
    gpus, none = rng.integers(2, 40, (n_locations, 2)), np.zeros((n_locations, n_modes), np.int64)
    demand = 0.15 * gpus.sum() * rng.uniform(0.8, 1, (n_classes, 3))
    part = Partition(demand, speeds, 300.0 * sizes.sum(axis=1) * rng.uniform(0.9, 1.1, speeds.shape), speeds > 0)
    free = np.zeros(n_modes)
    rates = rng.normal(300, 250, (n_locations, 3))
    problem = PoolProblem(300.0, rates, gpus, sizes, (part,), 1.1, none, none, free, free, free, reading)
    plan = plan_pools(problem)
    assert plan.gap is not None
    assert plan.gap <= 0.01
    assert (plan.totals() @ sizes <= gpus).all()
    assert (np.einsum("nrm,rm->r", plan.instances, speeds) >= problem.wanted_qps(0) - 1e-6).all()
    again = plan_pools(problem, relative_gap=0.01, incumbent=plan)
    assert again.objective == pytest.approx(plan.objective, rel=0.01)


@pytest.mark.parametrize(("places", "columns"), [(3, 150), (10, 300)])
def test_each_partition_is_solved_once_and_the_plan_is_the_same_again(
    monkeypatch: pytest.MonkeyPatch, places: int, columns: int
) -> None:
    problem = a_site(places, 2, 4, 6, seed=0, reading=NegativeRates.FRUGAL)
    wholes: list[int] = []

    def counted(model: LinearModel, backend: Backend, **options: Any) -> Solution:
        if model.integer.any():
            wholes.append(model.variables)
        return solve(model, backend, **options)

    monkeypatch.setattr(pool_planning, "solve", counted)
    plans = [plan_pools(problem) for _ in range(2)]
    assert 1 <= len(wholes) <= 2 * 2
    assert max(wholes) <= columns
    assert plans[0].objective == plans[1].objective
    assert (plans[0].instances == plans[1].instances).all()


def test_patience_ends_the_search_for_the_optimum_with_a_good_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_site(3, 2, 4, 6, seed=2, reading=NegativeRates.FRUGAL)
    best = plan_pools(problem)
    monkeypatch.setattr(pool_planning, "PATIENCE_CHECKS", 1)
    good = plan_pools(problem)
    assert (best.status, good.status) == (SolveStatus.OPTIMAL, SolveStatus.FEASIBLE)
    assert good.gap is not None
    assert 0 < good.gap <= 0.01


def test_progress_of_a_plan_never_falls_and_names_the_partition() -> None:
    told: list[Progress] = []
    problem = a_site(3, 2, 4, 6, seed=2, reading=NegativeRates.FRUGAL)

    plan = plan_pools(problem, report=told.append)

    shares = [each.share for each in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    assert any(
        each.doing.startswith(f"partition {plan.partition + 1} of") for each in told if plan.partition is not None
    )
    assert plan.instances.tolist() == plan_pools(problem).instances.tolist(), "who is told changes nothing"


def test_of_plans_of_equal_energy_the_cleanest_is_made() -> None:
    places = [
        {"name": name, "gpus": {"G": 4}, "intensity": [intensity]}
        for name, intensity in (("dirty", 500.0), ("clean", 100.0), ("middling", 300.0))
    ]
    profile = {"mode": "one", "max_qps": 1, "power_w": 300}
    document = {
        "locations": places,
        "modes": [{"name": "one", "gpus": {"G": 1}}],
        "partitions": [{"name": "p", "classes": [{"name": "c", "demand_qps": [5], "profiles": [profile]}]}],
        "head_room": 1,
    }
    for order in itertools.permutations(places):
        request = PoolsRequest.model_validate(document | {"locations": order, "objective": "energy"})
        result = pools_result(request, pool_problem(request), planned(request))
        assert {each.location: each.count for each in result.instances} == {"clean": 4, "middling": 1}
        assert result.energy_kwh == pytest.approx(5 * 0.3 * 300 / 3_600)
