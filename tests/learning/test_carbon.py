"""Forecasts learned from a grid's past: they see no future, know when they know little, and beat persistence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_service.providers.recorded import load
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.learning.carbon import HORIZON_H, forecast, greenest_regret, mean_errors, persistence, training_days, tune
from services.learning.carbon_history import HOUR_S, History, history_of
from services.learning.carbon_weather import unusual

START_S = 1_640_995_200.0  # 2022-01-01T00:00Z


def grid(days: int, seed: int = 1) -> tuple[Floats, Floats]:
    """Return times and intensities of a grid with days, weeks and noise that lasts."""
    rng = np.random.default_rng(seed)
    hour = np.arange(24 * days)
    noise = np.convolve(rng.normal(0, 12, 24 * days + 40), 0.9 ** np.arange(41), "valid")
    shape = 300 + 60 * np.sin(2 * np.pi * hour / 24) - 40 * (hour // 24 % 7 >= 5)
    return START_S + HOUR_S * hour, np.maximum(shape + noise, 1.0)


def recording(zone: str, hours: int = 24 * 170) -> tuple[Floats, Floats]:
    """Return the first hours of a bundled recording, a real grid of 2021."""
    found = load(zone)
    return found.times_s[:hours], found.measured[:hours]


@pytest.mark.parametrize("zone", ["US-CAL-CISO", "DE"])
def test_a_real_grid_is_predicted_better_than_by_persistence(zone: str) -> None:
    times, values = recording(zone, 24 * 184)
    tested = 24 * 140
    whole = history_of(times, values, times[-1] + HOUR_S)
    now = np.arange(tested, len(whole.values) - HORIZON_H, 24)
    before = whole.until(tested)
    tuned = tune(before)
    assert tuned is not None
    truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
    ours = mean_errors(tuned.at(whole, training_days(before, HORIZON_H), now), truth)
    assert tuned.method == "ridge"
    assert ours[0] < mean_errors(persistence(whole, now, HORIZON_H), truth)[0]


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 99), at_h=st.integers(24 * 60, 24 * 90 - 1), with_shares=st.booleans())
def test_the_future_changes_no_forecast(seed: int, at_h: int, with_shares: bool) -> None:
    times, values = grid(90)
    rng = np.random.default_rng(seed)
    shares = np.column_stack([100 - values / 10, values / 20]) if with_shares else None
    other, others = values.copy(), None if shares is None else shares.copy()
    other[at_h:] = rng.uniform(0, 1e4, len(values) - at_h)
    if others is not None:
        others[at_h:] = np.nan
    at_s = times[0] + HOUR_S * at_h
    one = forecast(history_of(times, values, at_s, shares))
    two = forecast(history_of(times, other, at_s, others))
    assert one.backtest == two.backtest
    np.testing.assert_array_equal([one.values, one.p10, one.p90], [two.values, two.p10, two.p90])


def test_no_forecast_of_the_backtest_learned_from_what_it_was_to_predict() -> None:
    times, values = grid(120)
    whole = tune(history_of(times, values, times[-1] + HOUR_S))
    assert whole is not None
    first = int((whole.backtest.first_s - times[0]) / HOUR_S)
    known = history_of(times, values, times[first])
    early = training_days(known, HORIZON_H)
    assert early[-1] + HORIZON_H <= first


def test_intervals_hold_four_of_five_hours_also_where_the_grid_has_become_restless() -> None:
    """A calm year, and two months whose days differ three times as much, of which the last is predicted."""
    rng = np.random.default_rng(4)
    days, restless = 425, 365
    level = np.repeat(rng.normal(0, 1, days) * np.where(np.arange(days) < restless, 20, 60), 24)
    hour = np.arange(24 * days)
    values = 1_000 + 60 * np.sin(2 * np.pi * hour / 24) + level + rng.normal(0, 5, 24 * days)
    whole = history_of(START_S + HOUR_S * hour, values, START_S + HOUR_S * 24 * days)
    before = whole.until(24 * restless)
    tuned = tune(before)
    assert tuned is not None
    now = 24 * np.arange(restless + 20, days - 4)
    truth = whole.values[now[:, None] + np.arange(HORIZON_H)]
    made = tuned.at(whole, training_days(before, HORIZON_H), now)
    low, high = tuned.quantiles(whole, now, made)
    assert 0.7 < ((truth >= low) & (truth <= high)).mean() < 0.92
    calm = tuned.quantiles(whole, np.full(len(now), 24 * restless), made)
    assert ((truth >= calm[0]) & (truth <= calm[1])).mean() < 0.5
    assert 0.7 < tuned.backtest.coverage < 0.9


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 99), gaps=st.sets(st.integers(0, 24 * 80 - 2), max_size=60), negative=st.booleans())
def test_quantiles_are_ordered_whatever_is_missing(seed: int, gaps: set[int], negative: bool) -> None:
    times, values = grid(80, seed)
    values = values - 320 if negative else values
    values[list(gaps)] = np.nan
    kept = np.array([hour for hour in range(len(times)) if hour % 97 or not hour])  # some rows are not there at all
    made = forecast(history_of(times[kept], values[kept], times[-1] + HOUR_S))
    assert made.p10 is not None
    assert made.p90 is not None
    assert made.values.shape == made.p10.shape == made.p90.shape == (HORIZON_H,)
    assert (made.p10 <= made.values + 1e-9).all()
    assert (made.values <= made.p90 + 1e-9).all()
    assert negative or (made.p10 >= 0).all()
    assert np.isfinite([made.values, made.p10, made.p90]).all()


@pytest.mark.parametrize("hours", [1, 5, 23])
def test_less_than_a_day_is_repeated_and_that_is_said(hours: int) -> None:
    times, values = grid(1)
    made = forecast(history_of(times[:hours], values[:hours], times[0] + HOUR_S * hours))
    last = values[max(0, hours - 24) : hours]
    assert made.method == "persistence"
    assert f"{hours / 24:.0f} are given" in made.note
    assert made.backtest is None
    assert made.p10 is None
    assert set(made.values) <= set(last)


def test_what_repetition_tells_best_is_repeated() -> None:
    times, _ = grid(60)
    yesterday = np.tile(np.random.default_rng(3).uniform(100, 500, 24), 60)
    made = forecast(history_of(times, yesterday, times[-1] + HOUR_S))
    assert made.backtest is not None
    assert min(np.mean(each) for each in made.backtest.mae.values()) == pytest.approx(
        np.mean(made.backtest.mae[made.method])
    )
    np.testing.assert_allclose(made.values, np.tile(yesterday[:24], 4), atol=1e-6)


def test_shorter_steps_become_the_mean_of_their_hour() -> None:
    times = START_S + 300.0 * np.arange(12 * 24)
    found = history_of(times, np.arange(12 * 24, dtype=np.float64), START_S + 20.5 * HOUR_S, step_s=300)
    np.testing.assert_allclose(found.values, 5.5 + 12 * np.arange(20))
    assert found.end_s == START_S + 20 * HOUR_S


def test_a_gap_takes_the_day_before_and_never_what_comes_later() -> None:
    times, values = grid(4)
    missing = values.copy()
    missing[50:80] = np.nan
    found = history_of(times, missing, times[-1] + HOUR_S)
    np.testing.assert_array_equal(found.values[50:74], values[26:50])
    np.testing.assert_array_equal(found.values[74:80], values[26:32])
    assert found.known.sum() == 96 - 30


def day_one_error(values: Floats, clean: Floats, times: Floats, origins: range) -> float:
    """Return the mean absolute error of the first day over several origins, gCO2/kWh."""
    errors = []
    for now in origins:
        made = forecast(history_of(times[:now], values[:now], times[now]), 24)
        assert made.method == "ridge"
        errors.append(np.abs(made.values - clean[now : now + 24]).mean())
    return float(np.mean(errors))


ORIGINS = range(24 * 130, 24 * 165, 24 * 5)


def test_gaps_cost_little_of_a_forecast() -> None:
    times, clean = recording("DE")
    values = np.where(np.random.default_rng(5).random(len(clean)) < 0.15, np.nan, clean)
    values[[now - 1 for now in ORIGINS]] = clean[[now - 1 for now in ORIGINS]]  # silence is another test's
    assert day_one_error(values, clean, times, ORIGINS) < 1.25 * day_one_error(clean, clean, times, ORIGINS)


def test_wild_values_are_not_learned_from() -> None:
    times, clean = recording("DE")
    rng = np.random.default_rng(6)
    values = clean.copy()
    values[rng.choice(len(clean), 25, replace=False)] = rng.choice([-1e6, 0.5e5, 1e9], 25)
    assert day_one_error(values, clean, times, ORIGINS) < 1.1 * day_one_error(clean, clean, times, ORIGINS)
    assert history_of(times, clean, times[-1] + HOUR_S).known.all()


def test_after_a_silence_the_forecast_begins_at_the_last_known_hour() -> None:
    times, clean = recording("US-CAL-CISO")
    last = len(clean) - 24
    heard = forecast(history_of(times[:last], clean[:last], times[last]), 54)
    silent = forecast(history_of(times[:last], clean[:last], times[last] + 6 * HOUR_S), 48)
    assert silent.start_s == times[last] + 6 * HOUR_S
    assert "the last 6 h are not known" in silent.note
    np.testing.assert_array_equal(silent.values, heard.values[6:])


@pytest.mark.parametrize("published_h", [0, 9, 24, 30])
@pytest.mark.parametrize(("days", "left"), [(16, 0.8), (142, 0.5)])  # by the pretrained model alone; by the grid's past
def test_forecasts_of_wind_tell_as_much_of_tomorrow_as_was_published(days: int, left: float, published_h: int) -> None:
    rng = np.random.default_rng(8)
    times, calm = grid(days + 8)
    wind = np.repeat(rng.uniform(0, 100, 2 * days + 20), 12)  # levels of half a day, which the one before does not tell
    wind = np.column_stack([wind, np.zeros_like(wind)])  # and a source that never generates
    values = calm + 200 - 2 * wind[: len(calm), 0]
    ahead = START_S + HOUR_S * np.arange(len(wind))

    def errors(published: int | None) -> Floats:
        made = list[Floats]()
        for now in range(24 * days, 24 * (days + 8), 24):
            known = None if published is None else (ahead[: now + published], wind[: now + published])
            history = history_of(times[:now], values[:now], times[now], expected=known)
            made.append(np.abs(forecast(history, 24).values - values[now : now + 24]))
        return np.mean(made, axis=0)

    without, found = errors(None), errors(published_h)
    if not published_h:
        np.testing.assert_allclose(found, without)
        return
    assert found[: min(published_h, 24)].mean() < left * without[: min(published_h, 24)].mean()
    assert found[published_h:].sum() <= 1.15 * without[published_h:].sum()  # of what is not told, nothing is known


@pytest.mark.parametrize("days", [20, 142])
def test_forecasts_of_wind_say_no_less_where_they_began_later_than_the_history(days: int) -> None:
    rng = np.random.default_rng(8)
    wind = 1000.0 + np.repeat(rng.uniform(0, 100, (200 * 2, 1)), 12, axis=0)
    begins, hours = 24 * (days - 10), 24 * days
    expected = np.vstack([np.zeros((begins, 1)), wind[begins : hours + 24]])
    values, known = np.full(hours, 300.0), np.ones(hours, dtype=np.bool_)
    later = History(START_S, values, known, np.empty((hours, 0)), expected)
    moments = np.arange(begins, hours + 1, 24)

    news = unusual(later, moments, 24)
    assert np.abs(news).max() <= 100
    whole = unusual(History(START_S, values, known, np.empty((hours, 0)), wind[: hours + 24]), moments, 24)
    np.testing.assert_allclose(news[7:], whole[7:])


def test_forecasts_of_wind_that_mean_nothing_are_soon_known_for_it() -> None:
    rng = np.random.default_rng(5)
    times, values = grid(30)
    wind = rng.uniform(0, 100, (31 * 24, 1))
    ahead = START_S + HOUR_S * np.arange(len(wind))
    now = 20 * 24
    known = (ahead[: now + 24], wind[: now + 24])
    plain, found = (
        forecast(history_of(times[:now], values[:now], times[now], expected=each), 24) for each in (None, known)
    )
    assert np.abs(found.values - plain.values).mean() < 0.02 * values.mean()


def test_a_horizon_that_is_no_whole_number_of_days_is_the_beginning_of_one_that_is() -> None:
    times, clean = recording("US-CAL-CISO")
    known = history_of(times, clean, times[-1] + HOUR_S)
    short, whole = forecast(known, 30), forecast(known, 48)
    assert np.abs(short.values - whole.values[:30]).mean() < 0.05 * whole.values.mean()


def test_a_history_with_too_many_gaps_says_so() -> None:
    times, values = grid(90)
    kept = np.flatnonzero(np.arange(len(times)) % 24 < 10)
    made = forecast(history_of(times[kept], values[kept], times[kept][-1] + HOUR_S))
    assert made.method == "persistence"
    assert "% of the hours are missing" in made.note


def test_what_cannot_be_forecast_is_refused() -> None:
    times, values = grid(30)
    with pytest.raises(DomainError, match="nothing before"):
        history_of(times, values, times[0])
    with pytest.raises(DomainError, match="more than a week before"):
        history_of(times, values, times[-1] + 9 * 24 * HOUR_S)
    with pytest.raises(DomainError, match="1 to 168"):
        forecast(history_of(times, values, times[-1]), 169)


def test_regret_is_what_the_chosen_hours_emitted_beyond_the_best() -> None:
    truth = np.array([[1.0] * 6 + [3.0] * 18])
    assert greenest_regret(truth, truth) == 0.0
    assert greenest_regret(-truth, truth) == pytest.approx(2.0)
