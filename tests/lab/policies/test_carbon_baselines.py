"""GAIA's Carbon-Time, EcoVisor's threshold and Wait Awhile, on examples worked by hand from their papers' rules."""

from __future__ import annotations

import numpy as np

from lab.policies.carbon.carbon_scaler import steps_now
from lab.policies.carbon.ecovisor import Ecovisor, EcovisorConfig, percentile
from lab.policies.carbon.gaia import Gaia, GaiaConfig, GaiaMemory, best_start_s
from services.core.cycle.run_cycle import run_cycle
from services.core.policies.greener_hours import hour_has_come
from services.core.policies.registry import build_policy
from services.simulator.engine import simulate
from services.simulator.workload import ClusterSpec
from tests.support.builders import NOON_S, a_job, a_node, a_snapshot, hourly_curve, story
from tests.support.workloads import START_S, a_trace, a_workload

HOUR_S = 3600.0


def test_carbon_time_takes_the_start_of_the_highest_saving_per_completion_time() -> None:
    """An hour's job: hour 1 saves 180 in 2 h (90 per h), hour 2 saves 200 in 3 h (67 per h); the lowest hour loses."""
    curve = hourly_curve([300, 120, 100, 300, 300], start_s=NOON_S)
    steep = hourly_curve([300, 200, 100, 300, 300], start_s=NOON_S)

    assert best_start_s(curve, NOON_S, HOUR_S, 12 * HOUR_S) == NOON_S + HOUR_S
    assert best_start_s(steep, NOON_S, HOUR_S, 12 * HOUR_S) == NOON_S + 2 * HOUR_S
    assert best_start_s(steep, NOON_S, HOUR_S, 1.5 * HOUR_S) == NOON_S + HOUR_S


def test_carbon_time_starts_at_once_where_waiting_saves_nothing() -> None:
    rising = hourly_curve([100, 200, 300], start_s=NOON_S)

    assert best_start_s(rising, NOON_S + 600, HOUR_S, 12 * HOUR_S) == NOON_S + 600


def test_gaia_plans_on_arrival_and_starts_when_the_time_has_come() -> None:
    policy, curve = Gaia(GaiaConfig(mean_length_s=HOUR_S)), hourly_curve([300, 120, 300, 300], start_s=NOON_S)
    job = a_job("a", submitted_s=NOON_S, waiting_since_s=NOON_S)

    first = run_cycle(policy, a_snapshot([job], curve=curve), GaiaMemory())
    later = run_cycle(policy, a_snapshot([job], curve=curve, now_s=NOON_S + HOUR_S), first.memory)

    assert story(first.plan) == {"a": "hold greener_hours"}
    assert story(later.plan) == {"a": "start n0:0"}


def test_ecovisor_starts_jobs_in_order_below_the_tenth_percentile_and_stops_none() -> None:
    hours = [float(100 + 10 * hour) for hour in range(24)]
    green, dirty = hourly_curve(hours, start_s=NOON_S), hourly_curve(hours[::-1], start_s=NOON_S)
    jobs = [a_job("run", gpus=1), a_job("b", submitted_s=NOON_S - 5), a_job("a", submitted_s=NOON_S - 9)]
    old = a_job("old", submitted_s=NOON_S - 43_200.0)
    policy = Ecovisor(EcovisorConfig())

    begins = run_cycle(policy, a_snapshot(jobs, [a_node(gpus=2)], curve=green), policy.initial()).plan
    waits = run_cycle(policy, a_snapshot([*jobs, old], [a_node(gpus=4)], curve=dirty), policy.initial()).plan

    assert story(begins) == {"a": "start n0:1", "b": "hold not_enough_free_gpus"}
    assert story(waits) == {"old": "start n0:1", "a": "hold greener_hours", "b": "hold greener_hours"}


def test_a_percentile_is_by_time_and_a_mean_by_integral() -> None:
    curve = hourly_curve([100, 200, 300, 400], start_s=NOON_S)

    assert percentile(curve, NOON_S, NOON_S + 4 * HOUR_S, 25.0) == 100.0
    assert percentile(curve, NOON_S + HOUR_S / 2, NOON_S + 4 * HOUR_S, 50.0) == 300.0
    assert curve.means(np.array([NOON_S, NOON_S + HOUR_S / 2]), HOUR_S).tolist() == [100.0, 150.0]


def test_an_interruptible_job_runs_in_the_greenest_hours_of_its_window() -> None:
    """Two hours of work within [5, 1, 4, 2, 3]: hours 1 and 3, as sorting the slots gives."""
    hours = [500.0, 100.0, 400.0, 200.0, 300.0]
    curve, left_h, ran = hourly_curve(hours, start_s=NOON_S), 2.0, []
    for hour in range(5):
        now_s = NOON_S + hour * HOUR_S
        if left_h and hour_has_come(curve, now_s, np.array([left_h * HOUR_S]), np.array([NOON_S + 5 * HOUR_S]))[0]:
            ran.append(hour)
            left_h -= 1

    assert ran == [1, 3]


def test_hours_as_green_as_now_are_not_worth_waiting_for() -> None:
    """Now 200, then 300, 200 and 100: one hour is greener than now. Work of an hour waits for it, longer work does not;
    the other hour at 200 does not count."""
    curve, due_s = hourly_curve([200.0, 300.0, 200.0, 100.0], start_s=NOON_S), np.full(3, NOON_S + 4 * HOUR_S)
    left_s = np.array([0.9, 1.0, 1.1]) * HOUR_S

    assert hour_has_come(curve, NOON_S, left_s, due_s).tolist() == [False, False, True]
    assert hour_has_come(curve, NOON_S + 2 * HOUR_S, left_s, due_s).tolist() == [False, False, True]


def test_on_a_flat_grid_every_job_runs_at_once() -> None:
    curve = hourly_curve([200.0] * 6, start_s=NOON_S)

    assert hour_has_come(curve, NOON_S, np.array([1.0, HOUR_S]), np.full(2, NOON_S + 6 * HOUR_S)).tolist() == [True] * 2


def test_pausing_saves_at_least_what_moving_a_whole_job_does() -> None:
    """The small result of Wiesner et al.: interruptible beats shifting, and both beat running at once."""
    hours = [300.0, 100.0, 350.0, 120.0, 400.0, 380.0] * 12
    jobs, one = a_workload([(0.0, 2 * HOUR_S, 1)]), ClusterSpec.parse("1x1:RTX3090")
    carbon = {
        name: float(simulate(name, jobs, one, a_trace(hours), parameters=parameters).columns.carbon_gco2[0])
        for name, parameters in [
            ("fifo", {}),
            ("gaia", {"mean_length_s": 2 * HOUR_S}),
            ("wait-awhile", {"window_s": 4 * HOUR_S}),
        ]
    }

    assert carbon["wait-awhile"] < carbon["gaia"] <= carbon["fifo"]


def test_shortest_jobs_first_is_the_least_mean_completion_time() -> None:
    """The textbook case: 6, 8, 7 and 3 hours on one machine end after 3, 9, 16 and 24 hours: 13 h on average."""
    jobs = a_workload([(0.0, hours * HOUR_S, 1) for hours in (6, 8, 7, 3)])
    result = simulate("sjf", jobs, ClusterSpec.parse("1x1:RTX3090"), a_trace())

    assert ((result.columns.ended_s - START_S) / HOUR_S).tolist() == [9, 24, 16, 3]
    assert result.avg_jct_s == 13 * HOUR_S


def test_the_remaining_time_preempts_in_active_rounds_and_unknown_jobs_come_last() -> None:
    jobs = a_workload([(0.0, 10 * HOUR_S, 1), (600.0, HOUR_S, 1)])
    result = simulate("srtf", jobs, ClusterSpec.parse("1x1:RTX3090"), a_trace())
    policy = build_policy("sjf", {})
    unknown = a_snapshot([a_job("b", submitted_s=1.0), a_job("a", submitted_s=2.0)], [a_node(gpus=1)])

    assert ((result.columns.ended_s - START_S) / HOUR_S).tolist() == [11, 1.5]
    assert story(run_cycle(policy, unknown, policy.initial()).plan)["b"] == "start n0:0"


def steps_of(hours: list[float], left_h: float, due_h: float, speeds: list[float]) -> int:
    """Return how many of its steps (1, 2, 4 GPUs) a job takes at noon in CarbonScaler's plan."""
    curve, gpus = hourly_curve(hours, start_s=NOON_S), np.array([[1, 2, 4]])
    left_s, due_s = np.array([left_h * HOUR_S]), np.array([NOON_S + due_h * HOUR_S])
    return int(steps_now(curve, NOON_S, left_s, due_s, gpus, np.array([speeds]))[0])


def test_a_job_takes_the_steps_of_the_most_work_per_carbon() -> None:
    """Speeds 1, 1.8, 3: marginal work per GPU 1, 0.8, 0.6; carbon per hour of work, by slot and step:

    100 g: 100, 125, 167; 150 g: 150, 187.5, 250; 300 g: 300, 375, 500. In that order the first steps hold 1, 1.8, 2.8,
    4 (the last two GPUs of the greenest hour) and 4.8 hours of work.
    """
    speeds, later = [1.0, 1.8, 3.0], [300.0, 900.0, 900.0]
    assert [steps_of([100.0, 150.0, *later], left_h, 5, speeds) for left_h in (0.9, 1.7, 2.7, 3.5)] == [1, 2, 2, 3]
    assert [steps_of([150.0, 100.0, *later], left_h, 5, speeds) for left_h in (1.7, 2.7, 3.9, 4.7)] == [0, 1, 1, 2]

    assert steps_of([300.0, 100.0, 300.0], 2.0, 1, speeds) == 0  # late: it still has as long as it needs alone
    assert steps_of([300.0, 100.0, 300.0], 4.0, 4, speeds) == 0  # the hour that nobody knows counts as the mean, 233
    assert steps_of([220.0, 100.0, 400.0], 4.0, 4, speeds) == 1
    assert steps_of([100.0, 100.0], 1.0, 2, [1.0, 1.0, 1.0]) == 1


def test_a_step_that_adds_more_than_the_one_before_is_not_taken_without_it() -> None:
    """Speeds 1, 1.1, 4: the third step counts 0.1 per GPU, as the second; 100 g make 1,000 g per hour of work."""
    hours, speeds = [100.0, 900.0, 1100.0], [1.0, 1.1, 4.0]
    assert steps_of(hours, 1.9, 3, speeds) == 1
    assert steps_of(hours, 2.15, 3, speeds) == 3


def test_carbon_scaler_widens_gangs_as_far_as_all_have_room() -> None:
    """Both plan four GPUs for the greenest hour; on six the one with less slack gets four, the other two."""
    curve = hourly_curve([10.0, 900.0, 900.0, 900.0], start_s=NOON_S)
    late, early = (
        a_job(name, min_gpus=1, max_gpus=4, submitted_s=NOON_S - ago_s, remaining_s=4 * HOUR_S)
        for name, ago_s in (("late", 7200.0), ("early", 0.0))
    )
    policy = build_policy("carbon-scaler", {"window_s": 10_800.0})

    wide = run_cycle(policy, a_snapshot([early, late], [a_node(gpus=6)], curve=curve), None).plan
    narrow = run_cycle(policy, a_snapshot([early, late], [a_node(gpus=2)], curve=curve), None).plan

    assert sorted(len(each.split(",")) for each in story(wide).values()) == [2, 4]
    assert story(wide)["late"].count(",") == 3
    assert sorted(story(narrow).values()) == ["start n0:0", "start n0:1"]
