"""The blend of the last value and yesterday: weights counted by hand, no future, and quantiles that hold."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from services.core.domain.errors import DomainError
from services.learning.carbon_blend import blended, learn, steps_of


def walk(days: int, seed: int = 1, hour: int = 12) -> NDArray[np.float64]:
    """Return a random walk, which knows no time of day."""
    return 500 + np.cumsum(np.random.default_rng(seed).normal(0, 3, days * 24 * hour))


def test_a_weight_leads_from_yesterday_to_the_last_value() -> None:
    values = np.arange(8.0)  # a day of four steps
    assert_allclose(blended(values, np.array([8]), np.array([0.0, 0.5, 1.0, 0.0, 0.0]), 4), [[4.0, 6.0, 7.0, 7.0, 4.0]])


def test_what_moves_without_a_daily_shape_keeps_its_last_value_and_what_repeats_itself_does_not() -> None:
    drifting = learn(walk(20), 24, 12)
    assert drifting.is_better
    assert drifting.weights[0] > 0.8
    day = np.random.default_rng(2).uniform(100, 500, 288)
    assert (learn(np.tile(day, 20), 24, 12).weights == 0).all()


def test_the_weights_of_the_backtest_come_from_what_came_before_it() -> None:
    values = walk(20)
    whole = learn(values, 24, 12)
    assert len(whole.origins) >= 48
    before = learn(values[: whole.origins[0]], 24, 12).weights
    truth = values[whole.origins[:, None] + np.arange(288)]
    errors = np.abs(blended(values, whole.origins, before, 288) - truth).mean(axis=0)
    assert_allclose(whole.mae["blend"], errors)


def test_the_quantiles_hold_on_what_comes_after() -> None:
    values = walk(60, seed=4, hour=4)
    cut = 40 * 96
    blend = learn(values[:cut], 24, 4)
    inside = []
    for origin in range(cut, len(values) - 96, 16):
        _, low, high = blend.at(values[:origin], 96)
        truth = values[origin : origin + 96]
        inside.append((truth >= low) & (truth <= high))
    assert 0.65 < np.mean(inside) < 0.95
    assert 0.6 < blend.coverage < 0.95


def test_gaps_take_the_day_before_and_never_what_comes_later() -> None:
    times = 300.0 * np.arange(2 * 288)
    values = np.arange(2.0 * 288)
    kept = np.ones(len(times), dtype=bool)
    kept[[3, 300, 301]] = False
    filled = steps_of(times[kept], values[kept], 300.0)
    assert filled[[3, 300, 301]].tolist() == [2.0, 12.0, 13.0]
    assert len(filled) == 2 * 288


def test_too_short_a_past_and_steps_that_fit_no_hour_are_refused() -> None:
    with pytest.raises(DomainError, match="about 13 days are needed to blend, and 9 are given"):
        learn(walk(9), 96, 12)
    with pytest.raises(DomainError, match="no whole number"):
        steps_of(np.array([0.0, 420.0]), np.ones(2), 420.0)
