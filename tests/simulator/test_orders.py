"""Orders of the grid in the simulator, met by the live layer: a busy cluster of 1,024 GPUs, for ten hours."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.core.domain.errors import DomainError
from services.simulator.engine import EngineOptions, SimulationResult, simulate
from services.simulator.engine.orders import SimulatedOrder
from services.simulator.workload import ClusterSpec, Workload
from tests.support.workloads import START_S, a_profile, a_trace, a_workload

HOUR_S = 3_600.0
N_JOBS = 256
CLUSTER = ClusterSpec.parse("128x8:A100")


def busy() -> Workload:
    """Jobs of four GPUs that keep all of them busy for a day: three in ten of class 0, the others of 25 and 50 %."""
    kinds = [a_profile(f"k{at}", gpu_w=300.0 + 30.0 * at, restart_s=30.0, checkpoint_s=10.0) for at in range(3)]
    jobs = [(float(at), 4 * 24 * HOUR_S, 4) for at in range(N_JOBS)]
    made = a_workload(jobs, kinds, profile=[at % 3 for at in range(N_JOBS)])
    flex = np.array([(0.0, 0.25, 0.5, 0.5, 0.25, 0.5, 0.5, 0.0, 0.5, 0.0)[at % 10] for at in range(N_JOBS)])
    return replace(made, flex=flex)


def run(policy: str, *orders: SimulatedOrder) -> SimulationResult:
    options = EngineOptions(orders=orders, settings_known=False)
    return simulate(policy, busy(), CLUSTER, a_trace((300.0,) * 240), options=options)


@pytest.mark.parametrize("policy", ["fifo", "las", "joint"])
def test_an_order_of_ten_hours_is_reached_at_once_and_kept(policy: str) -> None:
    order = SimulatedOrder(START_S + 4 * HOUR_S, 10 * HOUR_S, cut=0.35)

    free, ordered = run(policy), run(policy, order)

    (kept,) = ordered.orders
    assert kept["limit_w"] == pytest.approx(0.65 * kept["baseline_w"])
    assert kept["reached_s"] <= 10
    assert kept["above_most"] <= 0.02
    assert kept["rebound"] <= 0.05
    assert kept["mean_w"] >= 0.98 * kept["limit_w"], "no more is taken than ordered"
    assert ordered.completed == N_JOBS
    slower = ordered.columns.jct_s / free.columns.jct_s - 1
    spared = busy().flex == 0
    assert slower[spared].max() <= 0.01
    assert slower[~spared].max() > 0.01


def test_orders_that_overlap_are_measured_by_what_was_drawn_before_the_first() -> None:
    first = SimulatedOrder(START_S + 4 * HOUR_S, 3 * HOUR_S, cut=0.25)
    starts_s = (5.0, 7.5, 8.75, 12.0)  # in force, in the time after it, in that of the one before, and by itself
    others = [SimulatedOrder(START_S + at * HOUR_S, HOUR_S, cut=0.1) for at in starts_s]

    few = a_workload([(0.0, 4 * 24 * HOUR_S, 4)] * 8, [a_profile("k", gpu_w=300.0)])
    options = EngineOptions(orders=(first, *others), settings_known=False)
    ran = simulate("las", few, ClusterSpec.parse("4x8:A100"), a_trace((300.0,) * 240), options=options)
    kept = {each["start_s"] - START_S: each for each in ran.orders}

    baseline_w = kept[4 * HOUR_S]["baseline_w"]
    assert [kept[at * HOUR_S]["baseline_w"] == baseline_w for at in starts_s] == [True, True, True, False]


def test_jobs_that_an_order_holds_keep_their_places_in_a_queue_of_the_policys_own() -> None:
    """They would go through the virtual machine again and again, with a round at every end there."""
    jobs = a_workload([(10.0 * at, 600.0, 1) for at in range(6)], [a_profile(gpu_w=300.0)])
    options = EngineOptions(orders=(SimulatedOrder(START_S, math.inf, to_w=0.0),), until_s=START_S + 2 * HOUR_S)

    result = simulate("a-srpt", jobs, ClusterSpec.parse("1x2:A100"), a_trace(), options=options)

    assert np.isnan(result.columns.started_s).all()
    assert result.rounds < 30


def test_an_order_to_a_cluster_that_sleeps_is_kept_without_shares() -> None:
    jobs = a_workload([(0.0, HOUR_S, 1), (6 * HOUR_S, HOUR_S, 1)], [a_profile(gpu_w=300.0)])
    options = EngineOptions(orders=(SimulatedOrder(START_S + 4 * HOUR_S, HOUR_S, cut=0.5),), power_down_after_s=60.0)

    result = simulate("las", jobs, ClusterSpec.parse("1x1:A100"), a_trace(), options=options)

    (kept,) = result.orders
    assert (result.completed, kept["limit_w"], kept["mean_w"]) == (2, 0.0, 0.0)
    assert math.isnan(kept["above_most"])
    assert math.isnan(kept["below_most"])


@pytest.mark.parametrize(
    ("policy", "parameters"), [("joint", {}), ("las", {"gang": "max"}), ("powerflow", {}), ("fair+joint", {})]
)
def test_gangs_that_may_become_narrower_do_so_before_any_is_paused(policy: str, parameters: dict[str, object]) -> None:
    """The limit is below what power limits may do in a class of 10 %, and is met by three quarters of the GPUs."""
    n_jobs = 32
    kind = a_profile(gpu_w=300.0, scaling=0.9, restart_s=30.0, checkpoint_s=10.0)
    made = a_workload([(float(at), 96 * HOUR_S, 2) for at in range(n_jobs)], [kind], most=8)
    order = SimulatedOrder(START_S + 4 * HOUR_S, 6 * HOUR_S, cut=0.35)

    found = simulate(
        policy,
        replace(made, flex=np.full(n_jobs, 0.1)),
        ClusterSpec.parse("32x8:A100"),
        a_trace((300.0,) * 240),
        parameters=parameters,
        options=EngineOptions(orders=(order,)),
    )

    (kept,) = found.orders
    assert kept["reached_s"] <= 10
    assert kept["above_most"] <= 0.02
    assert kept["rebound"] <= 0.05
    series = found.series
    within = (series.times_s >= order.start_s + HOUR_S) & (series.times_s < order.start_s + order.lasts_s)
    assert (series.running_high + series.running_low)[within].min() == n_jobs, "a job is paused"
    stops = 2 + 2 * (policy == "powerflow")  # which also packs narrow gangs onto fewer nodes
    assert found.columns.preemptions.max() <= stops, "gangs are stopped again and again"
    assert (found.columns.last_gpus == 8).all(), "a gang stays narrow"


@pytest.mark.parametrize("policy", ["fifo", "joint"])
def test_of_jobs_that_save_at_intervals_less_work_is_lost_with_notice(policy: str) -> None:
    """A fifth of it here; on none of these clusters more, the order is kept, and class 0 does as without it."""
    lost_h = np.zeros((2, 3))
    for seed in range(3):
        dice = np.random.default_rng(seed)
        kinds = [a_profile(f"k{at}", gpu_w=300.0 + 30.0 * at, restart_s=30.0, checkpoint_s=10.0) for at in range(3)]
        sizes: list[int] = dice.choice([1, 2, 4], 24).tolist()
        times = np.sort(dice.uniform(0, 2 * HOUR_S, 24)).tolist()
        jobs = [(at_s, gpus * dice.uniform(4, 10) * HOUR_S, gpus) for at_s, gpus in zip(times, sizes, strict=True)]
        made = a_workload(jobs, kinds, profile=[at % 3 for at in range(24)])
        made = replace(made, flex=dice.choice([0.0, 0.1, 0.25, 0.5], 24))
        order = SimulatedOrder(START_S + dice.uniform(3, 5) * HOUR_S, 2 * HOUR_S, to_w=dice.uniform(0.4, 0.7) * 11e3)

        def found(*orders: SimulatedOrder, made: Workload = made) -> SimulationResult:
            options = EngineOptions(orders=orders, interval_jobs=1.0)
            return simulate(policy, made, ClusterSpec.parse("4x8:A100"), a_trace((300.0,) * 240), options=options)

        for at, each in enumerate((order, replace(order, notice_s=HOUR_S))):
            result = found(each)
            lost_h[at, seed] = result.lost_gpu_hours
            assert result.orders[0]["above_most"] <= 0.02
            assert result.orders[0]["reached_s"] <= 10
            assert result.completed == 24
    assert (lost_h[1] <= lost_h[0]).all()
    assert lost_h[1].sum() <= lost_h[0].sum() / 3
    assert lost_h[0].sum() > 1, "nothing was to be lost"


def test_an_order_to_an_idle_cluster_changes_nothing() -> None:
    order = SimulatedOrder(START_S + 200 * HOUR_S, HOUR_S, to_w=1.0)
    assert run("fifo", order).orders == ()


@pytest.mark.parametrize("policy", ["joint", "las"])
def test_a_limit_of_the_cluster_is_kept_from_its_first_job_to_its_last(policy: str) -> None:
    kinds = [a_profile(f"k{at}", gpu_w=300.0 + 30.0 * at, restart_s=30.0, checkpoint_s=10.0) for at in range(3)]
    jobs = [(600.0 * at, 32 * HOUR_S, 4) for at in range(48)]
    made = a_workload(jobs, kinds, profile=[at % 3 for at in range(48)])
    limit_w = 0.7 * 128 * 400.0

    def found(*orders: SimulatedOrder) -> SimulationResult:
        options = EngineOptions(orders=orders, metered=True, settings_known=False)
        return simulate(policy, made, ClusterSpec.parse("16x8:A100"), a_trace((300.0,) * 240), options=options)

    free, limited = found(), found(SimulatedOrder(0.0, math.inf, to_w=limit_w))

    assert free.peak_power_w > 1.1 * limit_w
    assert limited.peak_power_w <= 1.01 * limit_w
    assert limited.completed == len(jobs)
    assert limited.avg_jct_s <= 1.25 * free.avg_jct_s


def test_an_order_says_how_much() -> None:
    with pytest.raises(DomainError, match="either a cut or watts"):
        SimulatedOrder(0.0, 1.0)
    with pytest.raises(DomainError, match="without an end"):
        SimulatedOrder(0.0, math.inf, cut=0.35)
