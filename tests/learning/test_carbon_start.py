"""The pretrained forecasts: better than persistence on grids that taught nothing, and blind to the level."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learning.carbon import HORIZON_H, Backtest, forecast, mean_errors, persistence
from services.learning.carbon_history import HOUR_S, history_of
from services.learning.carbon_start import DAY_H, LENGTHS_D, quantiles, started, window
from tests.learning.test_carbon import START_S, grid, recording


@pytest.mark.parametrize("zone", ["US-CAL-CISO", "DE", "GB", "US-MIDA-PJM"])
def test_a_fortnight_of_a_grid_that_taught_nothing_is_enough_to_beat_persistence(zone: str) -> None:
    times, values = recording(zone)
    whole = history_of(times, values, times[-1] + HOUR_S)
    now = np.arange(14 * DAY_H, len(whole.values) - HORIZON_H, DAY_H)
    truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
    likely, low, high = started(np.sqrt(whole.values), whole.start_s, now, HORIZON_H) ** 2
    assert mean_errors(likely, truth) < mean_errors(persistence(whole, now, HORIZON_H), truth)
    assert 0.7 < ((truth >= low) & (truth <= high)).mean() < 0.9


@settings(max_examples=10, deadline=None)
@given(days=st.integers(1, 20), times=st.floats(0.01, 100), seed=st.integers(0, 99))
def test_a_grid_of_another_level_has_the_same_forecast_times_as_high(days: int, times: float, seed: int) -> None:
    _, values = grid(days, seed)
    now = np.array([DAY_H * days])
    one, other = (started(each, START_S, now, HORIZON_H) for each in (values, times * values))
    np.testing.assert_allclose(other, times * one, rtol=1e-6)
    assert (one[1] <= one[0]).all()
    assert (one[0] <= one[2]).all()


def test_nothing_beyond_the_last_fortnight_is_looked_at() -> None:
    _, values = grid(30)
    other = values.copy()
    other[: 16 * DAY_H] = 7.0
    now = np.array([30 * DAY_H])
    np.testing.assert_array_equal(*(started(each, START_S, now, HORIZON_H) for each in (values, other)))


@pytest.mark.parametrize("days", LENGTHS_D)
def test_with_few_days_known_nothing_else_is_looked_at(days: int) -> None:
    _, values = grid(20)
    begins, known = DAY_H * (20 - days), DAY_H * days
    whole = window(values, START_S, np.array([20 * DAY_H]), days)
    alone = window(values[begins:], START_S + HOUR_S * begins, np.array([known]), days)
    np.testing.assert_array_equal(whole.x, alone.x)
    np.testing.assert_array_equal(whole.unit, alone.unit)


def test_beyond_four_days_the_last_is_repeated() -> None:
    _, values = grid(20)
    made = started(values, START_S, np.array([20 * DAY_H]), 130)
    np.testing.assert_array_equal(made[:, :, :HORIZON_H], started(values, START_S, np.array([20 * DAY_H]), HORIZON_H))
    np.testing.assert_array_equal(made[:, :, 96:120], made[:, :, 72:96])
    np.testing.assert_array_equal(quantiles(14, 130)[:, 120:], quantiles(14, 130)[:, 72:82])


@pytest.mark.parametrize("days", [*LENGTHS_D, 5, 20, 36])
def test_a_forecast_from_few_days_is_pretrained_and_says_why(days: int) -> None:
    times, values = grid(days)
    made = forecast(history_of(times, values, times[-1] + HOUR_S))
    assert made.method == "pretrained"
    assert f"{days} are given" in made.note
    assert made.p10 is not None
    assert (made.backtest is not None) == (days >= 12)


def test_where_each_day_is_as_the_one_before_even_few_days_are_repeated() -> None:
    times, _ = grid(20)
    yesterday = np.tile(np.random.default_rng(3).uniform(100, 500, 24), 20)
    made = forecast(history_of(times, yesterday, times[-1] + HOUR_S))
    assert made.method == "persistence"
    assert isinstance(made.backtest, Backtest)
    assert made.backtest.mae["pretrained"][0] > made.backtest.mae["persistence"][0] == 0
    np.testing.assert_array_equal(made.values, np.tile(yesterday[:24], 4))
