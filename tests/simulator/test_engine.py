"""What the engine makes of small stories whose figures can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import DomainError
from services.core.domain.gpus import gpu_model
from services.core.parallel.graph import data_parallel
from services.core.policies.registry import POLICIES, build_policy
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.events import FAIL
from services.simulator.engine.grid import Grid
from services.simulator.engine.simulation import Simulation
from services.simulator.workload import Behaviour, ClusterSpec, ForecastKind, NodeGroup
from tests.support.workloads import START_S, a_profile, a_trace, a_wave, a_workload, a_year

ONE = ClusterSpec.parse("1x1:RTX3090")


def test_one_job_takes_its_start_and_its_work_and_spends_its_power() -> None:
    profile = a_profile(gpu_w=200.0, host_power_w=50.0, restart_s=60.0)
    trace = a_trace([100.0, 300.0, 100.0])

    result = simulate("fifo", a_workload([(0.0, 7_140.0, 1)], [profile]), ONE, trace)

    assert result.avg_jct_s == pytest.approx(7_200.0)
    assert result.energy_kwh == pytest.approx(0.5)
    assert result.carbon_kg == pytest.approx(0.25 * 0.1 + 0.25 * 0.3)
    assert result.idle_energy_kwh == 0
    assert result.peak_power_w == 250.0


def test_idle_devices_draw_power_while_the_cluster_waits() -> None:
    result = simulate("fifo", a_workload([(0.0, 3_600.0, 1), (7_200.0, 3_600.0, 1)]), ONE, a_trace())

    assert result.idle_energy_kwh == pytest.approx(0.06)  # 30 W of the board, 30 W of its host
    assert result.energy_kwh == pytest.approx(2 * 0.25 + 0.06)


def test_nodes_that_are_switched_off_draw_nothing_and_boot_first() -> None:
    options = EngineOptions(power_down_after_s=600.0, boot_s=100.0, host_idle_w=0.0)
    jobs = a_workload([(0.0, 3_600.0, 1), (7_200.0, 3_600.0, 1)])

    result = simulate("fifo", jobs, ONE, a_trace(), options=options)

    assert result.columns.jct_s.tolist() == [3_600.0, 3_700.0]
    assert result.idle_energy_kwh == pytest.approx(30.0 * 600 / 3.6e6)

    wider = simulate("fifo", jobs, ClusterSpec.parse("2x1:RTX3090"), a_trace(), options=options)

    assert wider.idle_energy_kwh == pytest.approx(2 * 30.0 * 600 / 3.6e6), "one that was never used too"


def test_a_preempted_job_pays_for_its_checkpoint_and_its_restart() -> None:
    """The long job passes LAS's threshold; the short one takes its GPU at the next active round."""
    profile = a_profile(restart_s=60.0, checkpoint_s=20.0)
    jobs = a_workload([(0.0, 7_200.0, 1), (3_500.0, 600.0, 1)], [profile])

    result = simulate("las", jobs, ONE, a_trace())

    short_start = 3_600.0 + 20.0
    assert result.preemptions == 1
    assert result.columns.ended_s[1] - START_S == pytest.approx(short_start + 660.0)
    assert result.columns.ended_s[0] - result.columns.ended_s[1] == pytest.approx(60.0 + 7_200.0 - 3_540.0)


def test_a_job_longer_to_checkpoint_than_its_grace_falls_back() -> None:
    profile = a_profile(restart_s=0.0, checkpoint_s=300.0)
    jobs = a_workload([(0.0, 7_200.0, 1), (3_500.0, 600.0, 1)], [profile])
    options = EngineOptions(grace_s=120.0, checkpoint_every_s=2_000.0)

    run = Simulation(build_policy("las", {}), jobs, ONE, a_trace(), options)
    result = run.run({})

    assert result.columns.gpu_s[0] == pytest.approx(7_200.0 + 1_600.0 + 120.0)
    assert (run.gangs.stopped_gpus, run.gangs.lost_gpu_s) == (1, pytest.approx(1_600.0))


def test_a_gang_is_stopped_in_the_round_after_its_guaranteed_run() -> None:
    jobs = a_workload([(0.0, 7_200.0, 1), (3_500.0, 600.0, 1)], [a_profile(checkpoint_s=20.0)])

    result = simulate("las", jobs, ONE, a_trace(), options=EngineOptions(min_run_s=5_000.0))

    assert result.preemptions == 1
    assert result.columns.started_s[1] - START_S == pytest.approx(5_400.0 + 20.0)


@pytest.mark.parametrize(
    ("wait_s", "lost_s", "waits_s"), [(0.0, 1_600.0, 0.0), (None, 0.0, 400.0), (300.0, 1_600.0, 0.0)]
)
def test_a_job_that_saves_at_intervals_alone_is_stopped_then(
    wait_s: float | None, lost_s: float, waits_s: float
) -> None:
    jobs = a_workload([(0.0, 7_200.0, 1), (3_500.0, 600.0, 1)], [a_profile(restart_s=0.0)])
    options = EngineOptions(checkpoint_every_s=2_000.0, interval_jobs=1.0, save_wait_s=wait_s)

    run = Simulation(build_policy("las", {}), jobs, ONE, a_trace(), options)
    result = run.run({})

    assert (result.preemptions, run.gangs.lost_gpu_s) == (1, pytest.approx(lost_s))
    assert result.columns.started_s[1] - START_S == pytest.approx(3_600.0 + waits_s)
    assert result.columns.gpu_s[0] == pytest.approx(7_200.0 + lost_s)


def test_a_job_that_ends_while_it_is_waited_for_has_ended() -> None:
    jobs = a_workload([(0.0, 3_700.0, 1), (3_500.0, 600.0, 1)], [a_profile(restart_s=0.0)])
    options = EngineOptions(checkpoint_every_s=2_000.0, interval_jobs=1.0)

    result = simulate("las", jobs, ONE, a_trace(), options=options)

    assert (result.preemptions, result.completed) == (0, 2)
    assert result.columns.jct_s.tolist() == pytest.approx([3_700.0, 800.0])


def test_what_is_waited_for_is_lost_with_its_node() -> None:
    jobs = a_workload([(0.0, 7_200.0, 1), (3_500.0, 600.0, 1)], [a_profile(restart_s=0.0)])
    options = EngineOptions(checkpoint_every_s=2_000.0, interval_jobs=1.0, until_s=START_S + 3_800.0)
    run = Simulation(build_policy("las", {}), jobs, ONE, a_trace(), options)
    run._events.push(START_S + 3_700.0, FAIL, 0)
    run.run({})

    assert (run.gangs.leaving, run.gangs.lost_gpu_s) == ({}, pytest.approx(1_700.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policys_stops_lose_work_of_jobs_that_tell_when_they_save(policy: str) -> None:
    lost_s = list[float]()
    for wait_s in (0.0, None):
        options = EngineOptions(interval_jobs=1.0, save_wait_s=wait_s)
        run = Simulation(
            build_policy(policy, {}),
            a_year(80, days=0.4, gpus=8, load=1.6),
            ClusterSpec.parse("4x2:RTX3090"),
            a_trace(),
            options,
        )
        assert run.run({}).completed == 80
        lost_s.append(run.gangs.lost_gpu_s)
    assert lost_s[1] == pytest.approx(0.0, abs=1e-3)
    assert lost_s[0] > 3_600.0 or policy not in ("las", "green", "joint")


def test_a_lost_node_costs_the_work_since_the_last_checkpoint_and_the_job_still_ends() -> None:
    options = EngineOptions(seed=3, node_mtbf_s=20_000.0, node_repair_s=1_000.0, checkpoint_every_s=600.0)
    jobs = a_workload([(60.0 * at, 9_000.0, 2) for at in range(12)])

    result = simulate("fifo", jobs, ClusterSpec.parse("3x2:RTX3090"), a_trace(), options=options)
    again = simulate("fifo", jobs, ClusterSpec.parse("3x2:RTX3090"), a_trace(), options=options)

    assert result.failures > 0
    assert result.completed == 12
    assert result.columns.gpu_s.sum() > 12 * 9_000.0
    assert result.summary() | {"wall_s": None} == again.summary() | {"wall_s": None}


@pytest.mark.parametrize("policy", POLICIES)
def test_jobs_and_idle_devices_add_up_to_the_cluster(policy: str) -> None:
    jobs = a_year(300, days=0.5, gpus=8, load=1.1)

    result = simulate(policy, jobs, ClusterSpec.parse("2x2:RTX3090,1x4:A100"), a_wave(3))

    columns = result.columns
    assert result.completed == 300
    assert columns.energy_j.sum() / 3.6e6 + result.idle_energy_kwh == pytest.approx(result.energy_kwh)
    assert columns.carbon_gco2.sum() / 1e3 + result.idle_carbon_kg == pytest.approx(result.carbon_kg)
    assert result.series.carbon_gco2[-1] <= result.carbon_kg * 1e3
    assert result.peak_power_w >= result.series.power_w.max() - 1e-6


def test_a_run_outlasting_its_trace_repeats_the_last_day() -> None:
    day = [100.0] * 12 + [300.0] * 12

    result = simulate("fifo", a_workload([(0.0, 4 * 86_400.0, 1)]), ONE, a_trace([999.0] * 24 + day))

    assert result.carbon_kg == pytest.approx(0.25 * 24 * (0.999 + 3 * 0.2))
    assert result.beyond_trace_s == pytest.approx(2 * 86_400.0)


def test_a_trace_of_steps_longer_than_a_day_is_repeated_by_its_last_step() -> None:
    month_s = 30 * 86_400.0
    months = CarbonCurve(START_S + month_s * np.arange(2), np.array([100.0, 300.0]), START_S + 2 * month_s)

    result = simulate("fifo", a_workload([(59 * 86_400.0, 2 * 86_400.0, 1)]), ONE, replace(a_trace(), curve=months))

    assert result.carbon_kg == pytest.approx(0.25 * 48 * 0.3)
    assert result.beyond_trace_s == pytest.approx(86_400.0)


def test_persistence_tells_policies_yesterday() -> None:
    days = [100.0] * 24 + [200.0] * 24 + [400.0] * 72
    trace = a_trace(days, forecast=ForecastKind.PERSISTENCE)
    now_s = START_S + 36 * 3_600.0

    told = Grid(trace, 86_400.0, 86_400.0).outlooks(now_s)[0].curve

    assert told.at(now_s) == 200.0
    assert told.at(now_s + 6 * 3_600.0) == 100.0
    assert told.at(now_s + 13 * 3_600.0) == 200.0
    assert np.diff(told.times_s).min() > 0


def test_a_job_that_fits_nowhere_is_counted_and_the_rest_runs() -> None:
    result = simulate("fifo", a_workload([(0.0, 100.0, 4), (0.0, 100.0, 1)]), ONE, a_trace())

    assert (result.unrunnable, result.completed) == (1, 1)


@pytest.mark.parametrize(("placement", "starts_h"), [("consolidated", 1), ("buddy", 2)])
def test_a_gang_placed_by_buddies_waits_for_a_block(placement: str, starts_h: int) -> None:
    """After an hour the first and the third device of four are free: two devices, but no block of two."""
    profile = a_profile(restart_s=0.0)
    jobs = a_workload([*((0.0, 3_600.0 * hours, 1) for hours in (1, 2, 1, 2)), (60.0, 600.0, 2)], [profile])

    result = simulate(
        "fifo", jobs, ClusterSpec.parse("1x4:V100"), a_trace(), options=EngineOptions(placement=placement, rigid=True)
    )

    assert result.columns.started_s[-1] - START_S == pytest.approx(3_600.0 * starts_h)


@pytest.mark.parametrize("held_back_by", ["drained nodes", "a quota"])
def test_what_can_never_start_does_not_keep_the_cluster_on(held_back_by: str) -> None:
    """It would be waited for until the run counts as stalled, two months of idle energy later."""
    jobs = a_workload([(0.0, 3_600.0, 1), (0.0, 3_600.0, 4)])
    drained = held_back_by == "drained nodes"
    cluster = ClusterSpec(tuple(NodeGroup(1, gpus, gpu_model("RTX3090"), not drained or gpus < 4) for gpus in (2, 4)))
    options = EngineOptions(tenant_gpu_quota={} if drained else {"t": 3})

    result = simulate("las", jobs, cluster, a_trace(), options=options)

    assert (result.completed, result.unrunnable) == (1, 1)
    assert result.idle_energy_kwh == pytest.approx(5 * 0.06)


def test_an_unknown_placement_is_refused() -> None:
    with pytest.raises(DomainError, match="unknown placement"):
        EngineOptions(placement="anywhere")


@pytest.mark.parametrize(
    ("placement", "slower"),
    [
        ("consolidated", (0.3 + 1e9 * 2 * 5 / 6 * 4 / 2 / 1.25e9) / (0.3 + 1e9 * 2 * 5 / 6 / 300e9)),  # 4 and 2
        ("refined", (0.3 + 1e9 * 2 * 5 / 6 * 4 / 3 / 1.25e9) / (0.3 + 1e9 * 2 * 5 / 6 / 300e9)),  # 3 and 3
    ],
)
def test_a_job_with_a_graph_runs_at_the_pace_of_its_slowest_share(placement: str, slower: float) -> None:
    profile = replace(a_profile(restart_s=0.0), graph=data_parallel(6, 1e9, 0.3))
    options = EngineOptions(placement=placement, until_s=START_S + 86_400.0)

    result = simulate(
        "fifo", a_workload([(0.0, 600.0, 6)], [profile]), ClusterSpec.parse("2x4:RTX3090"), a_trace(), options=options
    )

    assert result.columns.jct_s[0] == pytest.approx(600.0 / 6 * slower)


def two_stages(_: str) -> tuple[Behaviour, Behaviour]:
    """Return a job that with its batch tuned works twice as fast in its first half, and four times in its second."""
    sizes = np.array([1])
    return (Behaviour(sizes, np.array([2.0]), np.array([200.0])), Behaviour(sizes, np.array([4.0]), np.array([300.0])))


@pytest.mark.usefixtures("the_lab")
def test_a_job_that_tunes_its_batch_runs_at_the_speed_and_power_of_each_stage() -> None:
    profile = replace(a_profile(gpu_w=100.0, restart_s=0.0), adaptive=two_stages)
    jobs = a_workload([(0.0, 7_200.0, 1)], [profile])

    tuned, fixed = (simulate(policy, jobs, ONE, a_trace()) for policy in ("pollux", "las"))

    assert tuned.columns.jct_s == pytest.approx([1_800.0 + 900.0])
    assert tuned.energy_kwh == pytest.approx((1_800.0 * 200.0 + 900.0 * 300.0) / 3.6e6)
    assert fixed.columns.jct_s == pytest.approx([7_200.0])


@pytest.mark.usefixtures("the_lab")
def test_a_job_that_is_stopped_between_stages_goes_on_where_it_was() -> None:
    """It shares the GPU by turns once another of higher priority comes; its work adds up to the same."""
    profile = replace(a_profile(gpu_w=100.0, restart_s=0.0, checkpoint_s=0.0), adaptive=two_stages)
    jobs = replace(a_workload([(0.0, 14_400.0, 1), (2_000.0, 720.0, 1)], [profile]), priority=np.array([0, 1]))

    result = simulate("pollux", jobs, ONE, a_trace())

    assert result.preemptions == 1
    assert result.columns.gpu_s == pytest.approx([3_600.0 + 1_800.0, 180.0 + 90.0])
