"""``joint``: each of its decisions alone, then rounds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from services.core.cycle.plan import Hold, Plan, PowerNode, Preempt, SetControl, Start
from services.core.cycle.run_cycle import run_cycle
from services.core.cycle.snapshot import Snapshot, Trigger
from services.core.domain.carbon import CarbonCurve
from services.core.domain.control_curves import ControlCurve
from services.core.domain.controls import ControlKind
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.controls import least_cost_at, limit_at
from services.core.policies.joint.hours import HORIZON_S, column_now, starts_s, steps_ahead
from services.core.policies.joint.memory import JointMemory
from services.core.policies.joint.modes import hosts_w, lead_of, modes_of
from services.core.policies.joint.policy import Joint, _steps  # pyright: ignore[reportPrivateUsage]
from services.core.policies.joint.quantiles import left_of
from services.core.policies.joint.worth import Worth
from services.core.policies.registry import build_policy
from tests.support.builders import NOON_S, JobRow, a_job, a_node, a_snapshot, hourly_curve, started

HOUR_S = 3600.0
EARLY_S = NOON_S - 86_400.0


def the_round(snapshot: Snapshot, memory: JointMemory | None = None, **parameters: object) -> tuple[Plan, JointMemory]:
    policy = Joint(JointConfig(**parameters))  # pyright: ignore[reportArgumentType]
    result = run_cycle(policy, snapshot, memory or policy.initial())
    assert policy.load(json.loads(json.dumps(policy.dump(result.memory)))) == result.memory
    return result.plan, result.memory


def linear(snapshot: Snapshot, *speeds: float) -> Snapshot:
    """Return the snapshot with one predicted speed-up by size for all jobs."""
    curve = np.zeros(len(snapshot.jobs), dtype=np.int64)
    return replace(snapshot, jobs=replace(snapshot.jobs, speed_curve=curve), speed_curves=np.array([speeds]))


def test_width_is_worth_what_it_costs() -> None:
    """At 250 W and 60 W of host a second GPU that adds 80 % costs 9 % more energy and saves 44 % of the time."""
    snapshot = linear(a_snapshot([a_job("a", min_gpus=1, max_gpus=4, gpu_power_w=250.0)], [a_node()]), 1, 1.8, 2.4, 2.8)
    config = JointConfig(host_w=60.0)

    modes = modes_of(snapshot, np.array([0]), 0.0, config)
    assert modes.gpus[0].tolist() == [1, 2, 4]
    watts = [310.0, 2 * (250 * (0.9 + 0.1 * 0.3) + 60), 4 * (250 * (0.7 + 0.3 * 0.3) + 60)]
    assert modes.cost[0].tolist() == pytest.approx([watts[0], watts[1] / 1.8, watts[2] / 2.8])

    widths = [int(modes_of(snapshot, np.array([0]), worth, config).best[0]) for worth in (0.0, 20.0, 200.0, 2000.0)]
    assert widths == [0, 0, 1, 2]
    narrow = modes_of(snapshot, np.array([0]), 2000.0, JointConfig(widest_gpus=2))
    assert narrow.gpus[0].tolist() == [1, 2]


def scaling(snapshot: Snapshot, elasticity: float) -> Snapshot:
    """Return the snapshot with jobs as fast as ``gpus ** elasticity``."""
    sizes = np.arange(1, int(snapshot.jobs.max_gpus.max()) + 1)
    return linear(snapshot, *(sizes**elasticity).tolist())


@given(scale=st.sampled_from([1, 2, 4]), draw=st.floats(0.2, 5.0), elasticity=st.floats(0.3, 0.95))
def test_the_width_chosen_scales_with_what_was_asked_and_not_with_watts(
    scale: int, draw: float, elasticity: float
) -> None:
    """Other boards, and users who ask for so many times as much: the same choice, as many times as wide."""

    def best(times: int, watts: float) -> int:
        low, high, asked = times, 16 * times, 4 * times
        job = a_job("a", min_gpus=low, max_gpus=high, asked_gpus=asked, gpu_power_w=200.0 * watts)
        seen = scaling(a_snapshot([job], [a_node(gpus=64)]), elasticity)
        config = JointConfig(host_w=40.0 * watts)
        modes = modes_of(seen, np.array([0]), Worth(seen, config).hour_w(np.array([0])), config)
        return int(modes.gpus[0, modes.best[0]])

    assert best(scale, draw) == scale * best(1, 1.0)


@pytest.mark.parametrize("elasticity", [0.6, 0.8])
def test_no_gang_is_slower_than_the_one_asked_for(elasticity: float) -> None:
    """An absolute worth of an hour and an absolute width give a gang of two to who asked for 16."""

    def chosen(asked: int, **parameters: object) -> int:
        job = a_job("a", min_gpus=1, max_gpus=32, asked_gpus=asked, gpu_power_w=300.0)
        plan, _ = the_round(scaling(a_snapshot([job], [a_node(gpus=64)]), elasticity), **parameters)
        return started(plan)["a"]

    assert all(chosen(asked) >= asked for asked in (1, 4, 16))
    assert chosen(16, hour_wh=60.0, widest_gpus=2, host_w=60.0) <= 2
    assert chosen(16, hour_share=0.0) == 1, "carbon alone"


def test_how_far_a_gang_leads_the_one_asked_for_with_its_users_batch() -> None:
    job = a_job("a", min_gpus=1, max_gpus=4, asked_gpus=2)
    seen = a_snapshot([job], [a_node(gpus=2), a_node("n1", gpus=2)])
    assert lead_of(seen, 0, 4) == 2.0, "nothing is predicted"
    assert lead_of(linear(seen, 1, 1.6, 2.2, 2.4), 0, 4) == pytest.approx(2.4 / 1.6)
    on_one, over_several = [1.0, 1.8, 2.5, 3.1], [0.9, 1.5, 2.1, 2.7]
    tuned = replace(
        seen,
        jobs=replace(seen.jobs, goodput_curve=np.array([0])),
        goodput_curves=np.array([[on_one, over_several]]),
        goodput_gains=np.array([[[1.0, 1.2, 1.3, 1.4], [1.0, 1.5, 1.6, 1.7]]]),
    )
    assert lead_of(tuned, 0, 2) == pytest.approx(1.2), "faster by its batch alone"
    assert lead_of(tuned, 0, 4) == pytest.approx(2.7 / 1.8 * 1.2), "four are on two nodes"


def test_a_gang_faster_than_asked_for_may_have_a_lower_limit_than_one_that_is_not() -> None:
    curve = ControlCurve(np.array([150.0, 200.0, 250.0]), np.array([0.8, 0.95, 1.0]), np.array([130.0, 190.0, 235.0]))

    def limit(gpus: int, asked: int) -> float:
        job = a_job("a", gpus=gpus, min_gpus=1, max_gpus=8, asked_gpus=asked, gpu_power_w=235.0)
        seen = scaling(a_snapshot([job], [a_node(gpus=8)]), 0.9)
        curves = ({(0, ControlKind.POWER_LIMIT): curve},)
        jobs = replace(seen.jobs, control_curve=np.array([0]))
        seen = replace(seen, jobs=jobs, control_curves=curves, settable=(frozenset({ControlKind.POWER_LIMIT}),))
        worth = Worth(seen, JointConfig())
        return float(curve.values[limit_at(worth, 0, curve, gpus, 60.0)])

    assert limit(gpus=4, asked=2) < limit(gpus=4, asked=4)
    assert limit(gpus=2, asked=4) == limit(gpus=4, asked=4), "slower already: every hour more counts as much"


def test_hosts_draw_what_was_measured_and_else_what_goes_with_the_board() -> None:
    seen = a_snapshot([a_job()], [a_node("n0", model="A100"), a_node("n1", model="RTX3090")])
    models = list(seen.gpu_models)
    by_board = hosts_w(seen, JointConfig())
    assert by_board[models.index("A100")] > by_board[models.index("RTX3090")] > 0
    measured = replace(seen, host_w=np.where(np.array(models) == "A100", 90.0, 0.0))
    assert hosts_w(measured, JointConfig())[models.index("A100")] == 90.0
    assert hosts_w(measured, JointConfig())[models.index("RTX3090")] == by_board[models.index("RTX3090")]
    assert hosts_w(measured, JointConfig(host_w=60.0)).tolist() == [60.0, 60.0]


def test_waiting_for_greener_hours_costs_a_share_of_the_jobs_own_draw() -> None:
    seen = a_snapshot([a_job("a", gpu_power_w=250.0), a_job("b", gpu_power_w=500.0)], [a_node()])
    config = JointConfig(host_w=0.0)
    share, other = Worth(seen, config).hour_g(np.arange(2)).tolist()
    assert other == pytest.approx(2 * share)
    assert share == pytest.approx(config.hour_share * 0.25 * 300.0)
    assert Worth(seen, JointConfig(hour_wh=100.0)).hour_g(np.arange(2)).tolist() == pytest.approx([30.0, 30.0])


@given(
    intensities=st.lists(st.floats(1, 500), min_size=2, max_size=7),
    left_h=st.integers(1, 5),
    deadline_h=st.integers(1, 7),
    hour_g=st.floats(0, 200),
    watts=st.floats(50, 2000),
)
def test_the_hours_taken_are_those_of_least_cost(
    intensities: list[float], left_h: int, deadline_h: int, hour_g: float, watts: float
) -> None:
    """Against every choice of whole hours."""
    last = intensities[-1]
    curve = hourly_curve([*intensities, *[last] * (48 - len(intensities))], start_s=NOON_S)

    def cost(hours: tuple[int, ...]) -> float:
        carbon = sum(intensities[min(hour, len(intensities) - 1)] for hour in hours) * watts / 1000.0
        return carbon + hour_g * (hours[-1] + 1)

    choices = list(combinations(range(max(deadline_h, left_h)), left_h))
    with_now = min((cost(hours) for hours in choices if hours[0] == 0), default=np.inf)
    without = min((cost(hours) for hours in choices if hours[0] > 0), default=np.inf)
    deadline_s = NOON_S + HOUR_S * deadline_h
    alone = np.array([HOUR_S * left_h]), np.array([deadline_s]), np.array([watts]), hour_g
    runs = starts_s(curve, NOON_S, *alone) <= NOON_S
    if abs(with_now - without) > 1e-6 * with_now:
        assert bool(runs[0]) == (with_now < without)
        assert (now_as(curve, left_h, deadline_s, [1.0], [watts], hour_g) >= 0) == bool(runs[0])


@settings(max_examples=50)
@given(
    intensities=st.lists(st.integers(1, 40), min_size=4, max_size=8, unique=True),
    left_h=st.integers(1, 3),
    deadline_h=st.integers(2, 8),
    hour_g=st.floats(0, 20),
    speed=st.lists(st.floats(0.2, 2.0), max_size=2),
)
def test_a_job_starts_when_it_was_expected_to(
    intensities: list[int], left_h: int, deadline_h: int, hour_g: float, speed: list[float]
) -> None:
    """As long as the forecast holds, each later hour decides as was expected of it.

    A job with sizes may start earlier: the cost of ending within the first hour that all the others lead up to is
    counted to the second, and which hour that is changes with the first one.
    """
    curve = hourly_curve([*map(float, intensities), *[50.0] * (60 - len(intensities))], start_s=NOON_S)
    speeds, watts = np.array([[1.0, *(1.0 + more for more in speed)]]), 300.0 * np.arange(1.0, 2.0 + len(speed))
    job = np.array([HOUR_S * left_h]), np.array([NOON_S + HOUR_S * max(deadline_h, left_h)]), speeds, watts[None]
    none = np.zeros(1, dtype=np.int64)
    _, expected_s = column_now(curve, NOON_S, *job, hour_g, none)
    alone = *job[:2], watts[:1], hour_g
    by_itself_s = starts_s(curve, NOON_S, *alone)
    for now_s in np.arange(NOON_S, expected_s[0] + 1.0, HOUR_S).tolist():
        column, later_s = column_now(curve, now_s, *job, hour_g, none)
        assert now_s <= later_s[0] <= expected_s[0]
        assert (column[0] >= 0) == (now_s == later_s[0])
    for now_s in np.arange(NOON_S, by_itself_s[0] + 1.0, HOUR_S).tolist():
        assert starts_s(curve, now_s, *alone)[0] == by_itself_s[0]


def now_as(
    curve: CarbonCurve, left_h: float, deadline_s: float, speed: list[float], watts: list[float], hour_g: float = 0.0
) -> int:
    """Return the column of one job, without any if it waits."""
    job = np.array([HOUR_S * left_h]), np.array([deadline_s]), np.array([speed]), np.array([watts])
    return column_now(curve, NOON_S, *job, hour_g, np.zeros(1, dtype=np.int64))[0].item()


@pytest.mark.parametrize(
    ("intensities", "left_h", "column"),
    [
        ([100.0, 300.0, 200.0], 1.0, 0),  # narrow now: 1.0 of work at 30 g
        ([100.0, 300.0, 200.0], 2.0, 1),  # wide now adds 0.8 at 37.5 g each, the last hour 0.2 at 60 g
        ([120.0, 100.0, 300.0], 1.0, -1),  # narrow in the next hour
        ([120.0, 100.0, 300.0], 1.5, 0),  # narrow in both: 36 g now against 37.5 g for more of the next hour ...
        ([130.0, 100.0, 300.0], 1.5, -1),  # ... which is less than 39 g
        ([150.0, 100.0, 110.0], 2.6, -1),  # wide in the next hour, narrow in the one after
    ],
)
def test_a_job_is_wider_in_greener_hours(intensities: list[float], left_h: float, column: int) -> None:
    """1 GPU: 300 W; 2: 600 W and 1.8 times the speed, so that a wider gang's work costs a quarter more."""
    curve = hourly_curve([*intensities, *[500.0] * 45], start_s=NOON_S)
    assert now_as(curve, left_h, NOON_S + 3 * HOUR_S, [1.0, 1.8], [300.0, 600.0]) == column


def test_a_gang_above_the_hull_is_never_chosen() -> None:
    """Two GPUs at 1.1 times the speed are a bad bargain beside four at 3.6."""
    curve = hourly_curve([100.0, *[500.0] * 47], start_s=NOON_S)
    for left_h in (0.5, 1.05, 3.0, 3.5):
        assert now_as(curve, left_h, NOON_S + HOUR_S, [1.0, 1.1, 3.6], [300.0, 600.0, 1_200.0]) in (0, 2)


@given(
    intensities=st.lists(st.floats(1, 500), min_size=3, max_size=5),
    left_h=st.floats(0.2, 4.0),
    speed=st.floats(1.05, 2.0),
    watts=st.floats(310, 900),
)
def test_hours_and_sizes_taken_together_emit_least(
    intensities: list[float], left_h: float, speed: float, watts: float
) -> None:
    """Against the linear programme of all shares of all hours at both sizes."""
    n = len(intensities)
    curve = hourly_curve([*intensities, *[1_000.0] * (48 - n)], start_s=NOON_S)
    speeds, draws = np.array([1.0, speed]), np.array([300.0, watts])

    def least(now: int) -> float:
        """Return the least carbon where this hour has only the sizes up to ``now``."""
        most = [(0.0, float(hour > 0 or size <= now)) for hour in range(n) for size in range(2)]
        found = linprog(
            np.outer(intensities, draws).ravel(),
            A_ub=np.kron(np.eye(n), np.ones(2)),
            b_ub=np.ones(n),
            A_eq=[np.tile(speeds, n)],
            b_eq=[left_h],
            bounds=most,
        )
        return found.fun if found.status == 0 else np.inf

    if not np.isfinite(least(1)):
        return
    column = now_as(curve, left_h, NOON_S + n * HOUR_S, [1.0, speed], [300.0, watts])
    assert least(column) == pytest.approx(least(1), rel=1e-6)


def test_hours_beyond_the_forecast_repeat_its_last_day() -> None:
    curve = hourly_curve([*([200.0] * 24), *range(100, 124)], start_s=NOON_S - 24 * HOUR_S)
    begins, ends, intensity = steps_ahead(curve, NOON_S, HORIZON_S)
    assert intensity.tolist() == [*range(100, 124), *range(100, 124)]
    assert begins[0] == NOON_S
    assert ends[-1] == NOON_S + HORIZON_S
    assert np.array_equal(begins[1:], ends[:-1])


@pytest.mark.parametrize("ended_s", [-30 * HOUR_S, -4 * HOUR_S, 0.0, 1.0, 600.0])
def test_an_outlook_that_ended_stands_for_the_days_after_it(ended_s: float) -> None:
    curve = hourly_curve([float(hour) for hour in range(48)], start_s=NOON_S + ended_s - 48 * HOUR_S)
    begins, ends, intensity = steps_ahead(curve, NOON_S, HORIZON_S)
    assert begins.size <= 60
    assert (begins[0], ends[-1]) == (NOON_S, NOON_S + HORIZON_S)
    assert np.array_equal(begins[1:], ends[:-1])
    days = np.ceil((HOUR_S - ended_s) / (24 * HOUR_S))
    assert intensity[0] == curve.at(NOON_S - days * 24 * HOUR_S)


@pytest.mark.parametrize("replayed", [1.0, 60.0, 240.0, 3600.0])
def test_hours_are_chosen_in_a_replay_as_in_the_days_that_it_replays(replayed: float) -> None:
    """Of the forecast a day is left, which a replay goes through in seconds."""
    step_s = HOUR_S / replayed
    times_s = NOON_S - 2 * step_s + step_s * np.arange(26)
    soon_green = CarbonCurve(times_s, np.repeat([200.0, 40.0, 200.0], [4, 6, 16]), times_s[-1] + step_s)
    job = a_job("a", remaining_s=2 * step_s, submitted_s=NOON_S)
    seen = a_snapshot([job], [a_node()], curve=soon_green)
    plan, _ = the_round(seen, slack_s=20 * step_s, slack_share=100.0)
    assert [type(action) for action in plan.actions] == [Hold]
    begins, _, _ = steps_ahead(soon_green, NOON_S, HORIZON_S)
    assert begins.size <= 1_000


def test_a_step_longer_than_a_day_is_repeated() -> None:
    curve = CarbonCurve(np.array([NOON_S - HOUR_S]), np.array([300.0]), NOON_S + 30 * HOUR_S)
    begins, ends, intensity = steps_ahead(curve, NOON_S, HORIZON_S)
    assert begins.tolist() == [NOON_S, NOON_S + 30 * HOUR_S]
    assert ends.tolist() == [NOON_S + 30 * HOUR_S, NOON_S + HORIZON_S]
    assert intensity.tolist() == [300.0, 300.0]


def test_a_job_that_runs_stops_only_for_more_than_a_little() -> None:
    curve = hourly_curve([100.0, 98.0, 98.0], start_s=NOON_S)
    job = np.array([HOUR_S]), np.array([NOON_S + 3 * HOUR_S]), np.ones((1, 1)), np.full((1, 1), 300.0)
    first = np.zeros(1, dtype=np.int64)
    column, start_s = column_now(curve, NOON_S, *job, 0.0, first)
    assert (column.item(), start_s.item()) == (-1, NOON_S + HOUR_S)
    column, start_s = column_now(curve, NOON_S, *job, 0.0, first, 0, 0.03)
    assert (column.item(), start_s.item()) == (0, NOON_S)
    alone = *job[:2], np.array([300.0]), 0.0
    assert starts_s(curve, NOON_S, *alone)[0] == NOON_S + HOUR_S
    assert starts_s(curve, NOON_S, *alone, 0.03)[0] == NOON_S


def test_the_limit_of_least_cost_rises_with_the_worth_of_time() -> None:
    curve = ControlCurve(np.array([150.0, 200.0, 250.0]), np.array([0.8, 0.95, 1.0]), np.array([145.0, 190.0, 235.0]))
    chosen = [least_cost_at(curve, 1, 60.0, worth) for worth in (0.0, 300.0, 5_000.0)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, 2)
    with_more_host = least_cost_at(curve, 1, 500.0, 0.0)
    assert with_more_host > chosen[0]


def test_what_is_left_follows_progress_and_predictions() -> None:
    rows = [
        a_job("new"),
        a_job("half", gpus=2, progress=0.5, attained_gpu_s=7_200.0),
        a_job("told", gpus=1, progress=0.2, attained_gpu_s=100.0, remaining_s=800.0),
    ]
    jobs = a_snapshot(rows, [a_node()]).jobs
    left = left_of(jobs, np.array([1.0, 0.9, 1.0]))
    assert np.isnan(left.left_s[0])
    assert left.left_s[1:].tolist() == pytest.approx([6_480.0, 800.0])
    assert left.whole_s[1:].tolist() == pytest.approx([12_960.0, 1_000.0])


def test_late_then_unknown_then_shortest() -> None:
    rows = [
        a_job("long", remaining_s=9_000.0),
        a_job("short", remaining_s=900.0),
        a_job("new"),
        a_job("late", remaining_s=8_000.0, deadline_s=NOON_S + 600.0),
        a_job("wished", remaining_s=9_999.0, priority=1),
    ]
    _, memory = the_round(a_snapshot(rows, [a_node(gpus=2)]))
    assert list(memory.sizes) == ["wished", "late", "new", "short", "long"]


def test_least_work_first_counts_all_gpus_of_a_gang() -> None:
    rows = [a_job("wide", min_gpus=4, max_gpus=4, remaining_s=1_000.0), a_job("slim", remaining_s=3_000.0)]
    _, memory = the_round(a_snapshot(rows, [a_node(gpus=8)]))
    assert list(memory.sizes) == ["slim", "wide"]


def test_all_take_their_first_step_before_the_one_that_gains_most_takes_another() -> None:
    """The shortest scales badly: on 6 GPUs all three get two; of two more the one that scales best takes both."""
    rows = [a_job(name, min_gpus=1, max_gpus=4, remaining_s=at * HOUR_S) for at, name in enumerate("abc", start=1)]
    worth = {"hour_wh": 20_000.0, "widest_gpus": 4}

    def sizes(gpus: int) -> dict[str, int]:
        snapshot = a_snapshot(rows, [a_node(gpus=gpus)])
        jobs = replace(snapshot.jobs, speed_curve=np.array([0, 1, 0]))
        curves = np.array([[1, 1.6, 1.8, 2.0], [1, 1.9, 2.8, 3.7]])
        _, memory = the_round(replace(snapshot, jobs=jobs, speed_curves=curves), **worth)
        return {str(job): size for job, size in memory.sizes.items()}

    assert sizes(4) == {"a": 2, "b": 1, "c": 1}
    assert sizes(6) == {"a": 2, "b": 2, "c": 2}
    assert sizes(8) == {"a": 2, "b": 4, "c": 2}
    assert sizes(12) == {"a": 4, "b": 4, "c": 4}


def test_a_step_that_a_job_has_already_counts_twice() -> None:
    gain = np.array([[5.0, 1.0], [5.0, 1.5], [5.0, 2.5]])
    rows, columns = _steps(gain, np.array([2, 0, 0]), np.array([2, 2, 2]))
    steps = [step for step in zip(rows.tolist(), columns.tolist(), strict=True) if step[1] == 2]
    assert steps == [(2, 2), (0, 2), (1, 2)]


def test_new_jobs_are_widened_in_passive_rounds_as_far_as_there_is_room() -> None:
    rows = [a_job(name, min_gpus=1, max_gpus=2, gpu_power_w=200.0) for name in "abc"]
    snapshot = replace(linear(a_snapshot(rows, [a_node(gpus=5)]), 1, 1.9), trigger=Trigger.PASSIVE)
    assert sorted(started(the_round(snapshot)[0]).values()) == [1, 2, 2]


def test_gangs_are_wide_only_while_nobody_waits() -> None:
    def jobs(n: int) -> list[JobRow]:
        return [a_job(f"j{at}", min_gpus=1, max_gpus=4, gpu_power_w=200.0) for at in range(n)]

    for n, sizes in ((1, [2]), (2, [2, 2]), (3, [1, 1, 2]), (5, [1, 1, 1, 1])):
        plan, _ = the_round(linear(a_snapshot(jobs(n), [a_node(gpus=4)]), 1, 1.9, 2.5, 3.0))
        assert sorted(started(plan).values()) == sizes


def test_a_resize_has_to_pay_for_the_restart() -> None:
    def after(remaining_s: float) -> list[type]:
        row = a_job("a", gpus=1, min_gpus=1, max_gpus=4, gpu_power_w=200.0, progress=0.5, remaining_s=remaining_s)
        plan, _ = the_round(linear(a_snapshot([row], [a_node(gpus=4)]), 1, 1.9, 2.5, 3.0), hour_wh=200.0)
        return [type(action) for action in plan.actions]

    assert after(60.0) == after(1_400.0) == []
    assert after(1_600.0) == after(20_000.0) == [Preempt], "it saves what a restart costs, once"


CLEANER_SOON = [300.0] * 25 + [50.0] * 6 + [300.0] * 30
"""A day back, an hour from now on, then six clean hours."""


@pytest.mark.parametrize(
    ("parameters", "job", "waits"),
    [
        ({"slack_s": 43_200.0}, {}, True),
        ({}, {}, False),
        ({}, {"deadline_s": NOON_S + 6 * HOUR_S}, True),
        ({"slack_s": 43_200.0}, {"remaining_s": np.nan}, False),
        ({"slack_s": 43_200.0, "hour_wh": 1e6}, {}, False),
        ({"slack_s": 43_200.0, "slack_share": 0.1}, {}, False),
        ({"slack_s": 43_200.0, "oldest_s": HOUR_S}, {}, False),
        ({"slack_s": 43_200.0}, {"preemptible": False}, False),
    ],
)
@pytest.mark.parametrize("trigger", [Trigger.ACTIVE, Trigger.PASSIVE])
def test_who_waits_for_greener_hours(
    parameters: dict[str, float], job: dict[str, float], waits: bool, trigger: Trigger
) -> None:
    """From its arrival on, instead of running until the next active round stops it."""
    row = a_job("a", **{"remaining_s": 2 * HOUR_S, "submitted_s": NOON_S - 60.0, **job})  # pyright: ignore[reportArgumentType]
    curve = hourly_curve(CLEANER_SOON, start_s=EARLY_S)
    plan, memory = the_round(a_snapshot([row], [a_node()], curve=curve, trigger=trigger), **parameters)
    assert ("a" in memory.held) == waits
    assert (started(plan) == {}) == waits


def test_passive_rounds_start_new_jobs_of_unknown_length_and_leave_held_ones() -> None:
    held = a_job("held", remaining_s=2 * HOUR_S, submitted_s=NOON_S - 60.0)
    curve = hourly_curve(CLEANER_SOON, start_s=EARLY_S)
    _, memory = the_round(a_snapshot([held], [a_node()], curve=curve), slack_s=43_200.0)
    both = a_snapshot([held, a_job("new")], [a_node()], curve=curve, trigger=Trigger.PASSIVE)
    plan, _ = the_round(both, memory, slack_s=43_200.0)
    assert list(started(plan)) == ["new"]


@pytest.mark.parametrize("trigger", [Trigger.ACTIVE, Trigger.PASSIVE])
@pytest.mark.parametrize(("active_s", "start_s"), [(600.0, HOUR_S), (5_400.0, 5_400.0)])
@pytest.mark.parametrize("width_by_hour", [False, True])
def test_a_held_job_learns_when_it_is_to_start(
    trigger: Trigger, active_s: float, start_s: float, width_by_hour: bool
) -> None:
    """In the first clean hour, or by the first active round after that."""
    jobs = [a_job(name, remaining_s=2 * HOUR_S, submitted_s=NOON_S - 60.0) for name in ("held", "other")]
    jobs.append(
        a_job("runs", gpus=1, on={"n0": (0,)}, preemptible=False, remaining_s=HOUR_S, submitted_s=NOON_S - 60.0)
    )
    curve = hourly_curve(CLEANER_SOON, start_s=EARLY_S)
    snapshot = replace(a_snapshot(jobs, [a_node()], curve=curve), next_active_s=NOON_S + active_s)
    given = {"slack_s": 43_200.0, "width_by_hour": width_by_hour}
    _, memory = the_round(snapshot, **given)
    plan, _ = the_round(replace(snapshot, trigger=trigger), memory, **given)
    expected = {each.job_id: each.expected_start_s for each in plan.actions if isinstance(each, Hold)}
    assert expected == {"held": NOON_S + start_s, "other": NOON_S + start_s}


def test_nodes_that_nobody_uses_sleep_after_a_while() -> None:
    def at(seconds: float, trigger: Trigger = Trigger.PASSIVE) -> Snapshot:
        snapshot = a_snapshot([a_job("a", gpus=1, on={"n0": (0,)})], [a_node("n0"), a_node("n1")], trigger=trigger)
        nodes = replace(snapshot.nodes, may_sleep=np.ones(2, dtype=np.bool_))
        return replace(snapshot, nodes=nodes, now_s=NOON_S + seconds)

    plan, memory = the_round(at(0.0), sleep_after_s=60.0)
    assert (plan.nodes, plan.look_again_s) == ((), NOON_S + 60.0)
    plan, memory = the_round(at(59.0), memory, sleep_after_s=60.0)
    assert not plan.nodes
    plan, memory = the_round(at(60.0), memory, sleep_after_s=60.0)
    assert [(node.node_id, node.on) for node in plan.nodes] == [("n1", False)]
    assert all(isinstance(node, PowerNode) for node in plan.nodes)
    plan, _ = the_round(at(99.0), sleep_after_s=None)
    assert (plan.nodes, plan.look_again_s) == ((), None)


def test_limits_are_set_anew_in_active_rounds_and_once_for_what_starts() -> None:
    curve = ControlCurve(np.array([150.0, 200.0, 250.0]), np.array([0.8, 0.95, 1.0]), np.array([145.0, 190.0, 235.0]))
    rows = [a_job("runs", gpus=1), a_job("starts")]

    def actions(trigger: Trigger, *, limit_w: float) -> dict[str, float | None]:
        snapshot = a_snapshot(rows, [a_node()], trigger=trigger)
        jobs = replace(
            snapshot.jobs, control_curve=np.zeros(2, dtype=np.int64), power_limit_w=np.array([limit_w, np.nan])
        )
        curves = ({(0, ControlKind.POWER_LIMIT): curve},)
        settable = (frozenset({ControlKind.POWER_LIMIT}),)
        snapshot = replace(snapshot, jobs=jobs, control_curves=curves, settable=settable)
        plan, _ = the_round(snapshot, hour_wh=0.0)
        assert [type(action) for action in plan.actions if isinstance(action, Start)] == [Start]
        return {each.job_id: each.value for each in plan.actions if isinstance(each, SetControl)}

    assert actions(Trigger.ACTIVE, limit_w=250.0) == {"runs": 150.0, "starts": 150.0}
    assert actions(Trigger.PASSIVE, limit_w=250.0) == {"starts": 150.0}
    assert actions(Trigger.PASSIVE, limit_w=np.nan) == {"runs": 150.0, "starts": 150.0}


def test_it_is_built_by_name_and_keeps_a_foreign_memory_out() -> None:
    policy = build_policy("joint", {"hour_wh": 5.0})
    assert policy.load({}) == policy.initial()


@pytest.mark.parametrize(
    ("parameters", "names", "gpus"),
    [
        ({}, "a", 4),  # there is room for its widest gang in the greenest hour
        ({"width_by_hour": False}, "a", 1),
        ({}, "ab", 1),  # not for those of both at once
        ({"width_by_hour": True}, "ab", 2),
    ],
)
def test_a_job_is_widest_in_the_greenest_hour_where_all_may_be(
    parameters: dict[str, bool], names: str, gpus: int
) -> None:
    """This hour is the greenest; carbon alone counts, so that one size for all hours is the smallest."""
    jobs = [a_job(name, max_gpus=4, remaining_s=6 * HOUR_S, submitted_s=NOON_S - 60.0) for name in names]
    curve = hourly_curve([*([300.0] * 24), 100.0, *([300.0] * 47)], start_s=EARLY_S)
    seen = a_snapshot(jobs, [a_node(gpus=4)], curve=curve)

    _, memory = the_round(seen, slack_s=43_200.0, hour_share=0.0, **parameters)

    assert dict(memory.sizes) == dict.fromkeys(names, gpus)
