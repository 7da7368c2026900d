"""Gaps, persistence, and one curve out of history, now and forecast."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_service.curve import Kind, Step, as_curve, filled
from carbon_service.forecast import ahead, is_stale, merged, persistence
from carbon_service.providers.protocol import Feed, ForecastIssue, Point

HOUR_S, DAY_S = 3600.0, 86_400.0
NOON_S = 1_700_006_400.0 - 1_700_006_400.0 % DAY_S + DAY_S / 2
FEED = Feed("a zone", "", step_s=HOUR_S, max_age_s=3 * HOUR_S, poll_interval_s=60, history_s=DAY_S)


def hours(values: list[float], *, until_s: float = NOON_S) -> list[Point]:
    """Return hourly points of which the last ends at ``until_s``."""
    first_s = until_s - len(values) * HOUR_S
    return [Point(first_s + i * HOUR_S, first_s + (i + 1) * HOUR_S, value) for i, value in enumerate(values)]


def values(steps: list[Step]) -> list[float]:
    return [step.gco2_per_kwh for step in steps]


def test_tomorrow_is_as_today_hour_by_hour() -> None:
    today = [float(hour) for hour in range(24)]
    steps = persistence(hours(today), NOON_S, NOON_S + 2 * DAY_S, FEED)
    assert values(steps) == today * 2
    assert steps[0].start_s == NOON_S
    assert steps[-1].end_s == NOON_S + 2 * DAY_S


def test_the_day_before_fills_what_the_last_day_lacks() -> None:
    points = hours([float(hour) for hour in range(48)])
    without = [point for index, point in enumerate(points) if index != 30]
    assert values(persistence(without, NOON_S, NOON_S + DAY_S, FEED))[6] == 6.0


def test_less_than_a_day_known_takes_the_last_value_for_the_rest() -> None:
    steps = persistence(hours([1.0, 2.0]), NOON_S, NOON_S + DAY_S, FEED)
    assert values(steps) == [2.0, 1.0, 2.0]
    assert steps[0].end_s - steps[0].start_s == 22 * HOUR_S


def test_a_long_outage_repeats_the_last_day_known() -> None:
    today = [float(hour) for hour in range(24)]
    steps = persistence(hours(today), NOON_S + 10 * DAY_S + HOUR_S, NOON_S + 10 * DAY_S + 3 * HOUR_S, FEED)
    assert values(steps) == [1.0, 2.0]


def test_nothing_known_forecasts_nothing() -> None:
    assert persistence([], NOON_S, NOON_S + DAY_S, FEED) == []
    assert merged([], None, FEED, NOON_S, NOON_S - DAY_S, NOON_S + DAY_S) == []


def test_a_gap_takes_yesterday_else_the_value_before_it() -> None:
    points = hours([float(hour) for hour in range(26)])
    steps = filled([points[0], *points[2:24], points[25]], points[0].start_s, NOON_S, FEED)
    assert steps[1].gco2_per_kwh == 0.0  # nothing is known of the day before
    assert steps[1].kind is Kind.HELD
    assert steps[24].gco2_per_kwh == 0.0  # the hour a day before
    assert [step.is_estimated for step in steps if step.kind is Kind.MEASURED] == [False] * 24


def test_a_curve_begins_where_knowledge_does() -> None:
    points = hours([5.0, 6.0])
    assert filled(points, NOON_S - DAY_S, NOON_S, FEED)[0].start_s == points[0].start_s


def test_the_provider_is_believed_and_persistence_says_the_rest() -> None:
    points = hours([float(hour) for hour in range(24)])
    issued = tuple(Point(NOON_S + i * HOUR_S, NOON_S + (i + 1) * HOUR_S, 500.0 + i) for i in (0, 1, 3))
    steps = ahead(points, ForecastIssue(NOON_S, issued), NOON_S, NOON_S + 6 * HOUR_S, FEED)
    assert values(steps) == [500.0, 501.0, 2.0, 503.0, 4.0, 5.0]
    assert [step.kind for step in steps].count(Kind.PERSISTENCE) == 3


def test_a_late_value_is_held_and_then_the_forecast_says_more() -> None:
    points = hours([float(hour) for hour in range(24)])
    late = merged(points, None, FEED, NOON_S + HOUR_S / 2, NOON_S - HOUR_S, NOON_S + 4 * HOUR_S)
    assert [(step.gco2_per_kwh, step.kind) for step in late[:2]] == [(23.0, Kind.MEASURED), (23.0, Kind.HELD)]
    assert not is_stale(points, FEED, NOON_S + HOUR_S / 2)
    now_s = NOON_S + 5.5 * HOUR_S
    stale = merged(points, None, FEED, now_s, now_s - HOUR_S, now_s + HOUR_S)
    assert is_stale(points, FEED, now_s)
    assert {step.kind for step in stale} == {Kind.PERSISTENCE}
    assert stale[1].gco2_per_kwh == 5.0


@given(
    gaps=st.sets(st.integers(0, 70)),
    issued=st.sets(st.integers(0, 40)),
    now_h=st.floats(0, 80),
    back_h=st.floats(0, 60),
    on_h=st.floats(0.5, 90),
)
def test_the_curve_is_contiguous_and_covers_now(
    gaps: set[int], issued: set[int], now_h: float, back_h: float, on_h: float
) -> None:
    first_s = NOON_S - 72 * HOUR_S
    now_s = first_s + (now_h + 1) * HOUR_S
    points = [
        Point(first_s + i * HOUR_S, first_s + (i + 1) * HOUR_S, float(i))
        for i in range(72)
        if i not in gaps and first_s + i * HOUR_S <= now_s
    ]
    issue = ForecastIssue(now_s, tuple(Point(NOON_S + i * HOUR_S, NOON_S + (i + 1) * HOUR_S, -1.0) for i in issued))
    end_s = now_s + on_h * HOUR_S
    steps = merged(points, issue, FEED, now_s, now_s - back_h * HOUR_S, end_s)
    if points:
        assert steps[0].start_s <= max(now_s, points[0].start_s)
        assert steps[-1].end_s == pytest.approx(end_s, abs=1e-5)
    assert all(one.end_s == following.start_s for one, following in itertools.pairwise(steps))
    assert all(step.end_s > step.start_s for step in steps)


def test_windows_are_weighted_by_time() -> None:
    curve = as_curve([Step(0, 10, 100.0, Kind.MEASURED), Step(10, 30, 40.0, Kind.MEASURED)])
    means = curve.means(np.array([0.0, 5.0, 10.0]), 20.0)
    assert means == pytest.approx([70.0, 55.0, 40.0])
    assert means[1] == pytest.approx(curve.mean(5.0, 25.0))
