"""Predictions in a simulation: learned from what has ended, shown to policies, and A-SRPT's own workload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lab.earlier_runs import EarlierRuns
from lab.foresight import Foresight, learning
from lab.recipes.recurrent import HISTORY_JOBS
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.errors import DomainError
from services.core.parallel.graph import data_parallel
from services.core.profiles.recurrence import Runs
from services.simulator.engine import EngineOptions, simulate
from services.simulator.engine.grid import Grid
from services.simulator.readers.carbon import read_carbon
from services.simulator.readers.jobs import read_jobs
from services.simulator.workload import ClusterSpec, ForecastKind, IssuedForecasts, Recurrence, Workload
from tests.support.workloads import START_S, a_profile, a_trace, a_workload

MEDIAN = EarlierRuns("median")


def recurring(jobs: list[tuple[float, float, int]], groups: list[int], **profile: Any) -> Workload:
    """Return jobs as ``a_workload`` has them, in groups, with group 1 known to take 50 iterations."""
    made = a_workload(jobs, [a_profile(restart_s=0.0, checkpoint_s=0.0, **profile)])
    ones = np.ones(len(jobs), dtype=np.int64)
    past = Runs(np.array([1]), np.array([1]), np.array([50.0]))
    return replace(made, recurrence=Recurrence(np.array(groups), ones, past))


def test_only_what_has_ended_is_known_and_only_from_the_next_training_on() -> None:
    """Iterations of 10 s. Group 2 is unseen; its first job, 300 s long, ends long before its third arrives."""
    jobs = recurring([(0.0, 300.0, 1), (90.0, 300.0, 1), (3_601.0, 300.0, 1), (3_700.0, 200.0, 1)], [2, 2, 2, 1])
    jobs = replace(jobs, profiles=(replace(jobs.profiles[0], iteration_s=10.0),))

    result = simulate("fifo", jobs, ClusterSpec.parse("1x8:V100"), a_trace(), predictor=learning(MEDIAN, 3_600.0))

    assert result.columns.predicted_work_s.tolist() == [0.0, 0.0, 300.0, 500.0]


def test_a_trace_without_groups_cannot_be_predicted() -> None:
    with pytest.raises(DomainError, match="recur"):
        Foresight(a_workload([(0.0, 1.0, 1)]), MEDIAN, 1.0)


def test_a_wide_gang_is_predicted_to_run_as_at_its_best_placement() -> None:
    """Sixteen replicas on two servers of eight: 100 s of work at the pace of one server takes longer."""
    graph = data_parallel(16, 4e8, 0.1)
    made = recurring([(0.0, 100.0, 16), (5.0, 900.0, 16)], [1, 1], graph=graph, reference=16)

    result = simulate("a-srpt", made, ClusterSpec.parse("2x8:V100"), a_trace(), options=EngineOptions(rigid=True))
    took_s = result.columns.ended_s - result.columns.started_s

    assert took_s[0] > 110.0
    length_s = took_s[0]  # all GPUs: g/G = 1
    assert result.columns.started_s[0] - START_S == pytest.approx(length_s)


@pytest.mark.parametrize("rounds_s", [60.0, 1_800.0])
def test_how_often_rounds_are_held_changes_nothing(rounds_s: float) -> None:
    rng = np.random.default_rng(5)
    at, work = np.sort(rng.uniform(0, 4_000, 60)), rng.integers(50, 3_000, 60)
    jobs = a_workload(
        list(zip(at.tolist(), work.astype(float).tolist(), rng.choice([1, 2, 4], 60).tolist(), strict=True))
    )
    profile = replace(a_profile(restart_s=0.0, checkpoint_s=0.0), graph=data_parallel(4, 1e8, 0.05))
    jobs = replace(jobs, profiles=(profile,))
    cluster = ClusterSpec.parse("3x4:V100")

    often = simulate("a-srpt", jobs, cluster, a_trace(), options=EngineOptions(round_interval_s=rounds_s))
    seldom = simulate("a-srpt", jobs, cluster, a_trace(), options=EngineOptions(round_interval_s=1e6))

    np.testing.assert_array_equal(often.columns.started_s, seldom.columns.started_s)
    assert often.preemptions == 0
    assert often.completed == 60


def test_the_bundled_trace_recurs_as_the_paper_says() -> None:
    jobs = read_jobs("a-srpt", start="2023-08-15", days=1, seed=1)
    again = read_jobs("a-srpt", start="2023-08-15", days=1, seed=1)
    known = jobs.recurrence
    assert known is not None

    groups = np.concatenate((known.history.group, known.group))
    in_large = np.bincount(groups)[groups] >= 5
    single = (jobs.min_gpus == 1).mean()

    assert len(jobs) == 12_637
    assert len(known.history) == HISTORY_JOBS
    assert in_large.mean() == pytest.approx(0.64, abs=0.03)  # 65 % of all; a fifth of the jobs lies after this day
    assert single == pytest.approx(0.7, abs=0.02)
    np.testing.assert_array_equal(jobs.work_s, again.work_s)
    told = EarlierRuns("median").fit(known.history).predict(known.group, known.user).amount
    units = np.array([profile.iteration_s for profile in jobs.profiles])[jobs.profile]
    exact = np.abs(told - jobs.work_s / units) < 0.01 * jobs.work_s / units
    assert exact.mean() == pytest.approx(0.6, abs=0.03)


def test_fewer_single_gpu_jobs_leave_arrivals_and_groups_as_they_are() -> None:
    many, none = (
        read_jobs("a-srpt", recipe=name, start="2023-08-15", days=0.05, seed=1) for name in ("a-srpt-80", "a-srpt-0")
    )

    assert many.recurrence is not None
    assert none.recurrence is not None
    np.testing.assert_array_equal(many.recurrence.group, none.recurrence.group)
    np.testing.assert_array_equal(many.submitted_s, none.submitted_s)
    assert (none.min_gpus > 1).all()


def test_policies_see_how_far_predictions_of_live_jobs_may_be_off() -> None:
    """The runs of group 1 took 40 and 60 iterations: 50, give or take a fifth. Of group 2 there is none."""
    jobs = recurring([(0.0, 100.0, 1), (10.0, 100.0, 1)], [1, 2])
    past = Runs(np.array([1, 1]), np.array([1, 1]), np.array([40.0, 60.0]))
    assert jobs.recurrence is not None
    jobs = replace(jobs, recurrence=replace(jobs.recurrence, history=past))
    foresight = Foresight(jobs, EarlierRuns("mean"), 3_600.0)
    assert [foresight.at_arrival(row, START_S) for row in (0, 1)] == [pytest.approx(0.5), 0.0]
    assert foresight.spreads == {jobs.ids[0]: pytest.approx(0.2)}
    foresight.ended(0)
    assert not foresight.spreads


def test_forecasts_are_as_unsure_as_those_before_them_were_wrong() -> None:
    """Daily issues of two days, wrong by 1, 2, 3 ... on their first day, and by ten times that on their second."""
    days = 16
    truth = a_trace([300.0] * 24 * (days + 4))
    starts_s = START_S + 86_400.0 * np.arange(days)
    off = np.arange(1.0, days + 1.0)[:, None] * np.repeat([1.0, 10.0], 24)
    trace = replace(truth, forecast=ForecastKind.FILE, issued=IssuedForecasts(starts_s, starts_s, 3_600.0, 300.0 - off))

    def known(day: int) -> CarbonOutlook:
        return Grid(trace, 86_400.0, 172_800.0).outlooks(START_S + day * 86_400.0)[0]

    early, late = known(9), known(11)
    assert early.low is None
    assert early.high is None
    assert late.low is not None
    assert late.high is not None
    times, value = late.curve.times_s - START_S, late.curve.intensity_gco2_per_kwh
    first_day, second_day = ((times > (11 + day) * 86_400.0) & (times < (12 + day) * 86_400.0) for day in (0, 1))
    assert (late.high - value)[first_day] == pytest.approx(10.0), "of 1, 2 ... 11 nine in ten are no more"
    assert (late.high - value)[second_day] == pytest.approx(90.0), "and of 10, 20 ... 100, as the last is not known yet"
    assert (late.low - value)[first_day | second_day] == pytest.approx(0.0), "none was too high"
    assert (late.high - value)[times <= 11 * 86_400.0].tolist() == [0.0] * 25


def test_how_unsure_the_first_forecast_of_a_trace_is_was_learned_before_it() -> None:
    """Hour for hour what a trace says that had begun a month earlier."""
    whole, late = (read_carbon("GB", start=start, days=40, forecast="issued") for start in ("2023-06-01", "2023-07-01"))
    now_s = late.curve.start_s + 86_400.0

    first, later = (Grid(each, 86_400.0, 345_600.0).outlooks(now_s)[0] for each in (late, whole))

    assert first.low is not None
    assert first.high is not None
    np.testing.assert_array_equal(first.curve.intensity_gco2_per_kwh, later.curve.intensity_gco2_per_kwh)
    np.testing.assert_array_equal(first.low, later.low)
    np.testing.assert_array_equal(first.high, later.high)
    ahead = first.curve.times_s > now_s
    assert (first.high - first.low)[ahead].mean() > 20.0, "gCO2/kWh"


def test_an_issue_that_ended_before_a_trace_began_is_not_in_force_there() -> None:
    """Issues of one day, four weeks before the trace and two days into it: until then the last day is repeated."""
    truth = a_trace([100.0] * 24 * 6)
    starts_s = START_S + 86_400.0 * np.array([-28.0, 3.0])
    old = IssuedForecasts(starts_s, starts_s, 3_600.0, np.array([[1.0] * 24, [7.0] * 24]))
    grid = Grid(replace(truth, forecast=ForecastKind.FILE, issued=old), 86_400.0, 86_400.0)

    for hour, value in ((30, 100.0), (72, 7.0)):
        curve = grid.outlooks(START_S + hour * 3_600.0)[0].curve
        ahead = curve.intensity_gco2_per_kwh[curve.times_s > START_S + hour * 3_600.0]
        assert ahead.tolist() == [value] * (24 if hour == 30 else 23)
