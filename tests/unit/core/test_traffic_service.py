"""Margins for capacity: what they learn, that they know no future, and what shortage costs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD
from services.core.profiles.traffic import Backtest, LastPeak, ServiceLevel, Traffic, backtest, choose


def told_of(actual: list[float], forecast: float = 4.0) -> Backtest:
    """Return a backtest of one class, asked at each step, whose peaks at each origin are one number."""
    came = np.broadcast_to(np.array(actual)[:, None, None], (len(actual), STEPS_AHEAD, 1))
    return Backtest("each", np.arange(len(actual)), np.full(came.shape, forecast), came)


def test_the_newsvendors_cost_counted_by_hand() -> None:
    score = told_of([6.0, 3.0])  # capacity is 5: one short, two spare
    assert_allclose(score.newsvendor_qps(0.9, 1.25), [(0.9 * 1.0 + 0.1 * 2.0) / 2])


def test_the_margin_is_the_conformal_quantile_of_past_errors_and_head_room_counts() -> None:
    criterion = ServiceLevel(0.75, head_room=1.0)  # three errors, of which it takes the greatest: rank ceil(4 x 0.75)
    assert (criterion.errors_needed, criterion.moments_needed) == (3, 8)
    raised = criterion.replayed(told_of([9.0, 16.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]))
    assert raised.origins.tolist() == [8, 9]  # the sixth step of a third forecast is known then
    assert_allclose(raised.forecast_qps[0, STEPS_AHEAD - 1], 16.0)
    assert_allclose(raised.forecast_qps[1, 0], 9.0)  # of nine errors the eighth
    with_room = ServiceLevel(0.75, head_room=4.0).replayed(told_of([9.0, 16.0, 4.0] + [1.0] * 7))
    assert_allclose(with_room.forecast_qps, 4.0)  # 4 x 4 suffices, and is not lowered
    with pytest.raises(DomainError, match="too few"):
        criterion.replayed(told_of([1.0] * 8))


def test_a_forecast_of_nothing_is_raised_too() -> None:
    criterion = ServiceLevel(0.75, head_room=1.0)
    assert criterion.replayed(told_of([9.0] * 10, forecast=0.0)).forecast_qps.min() == pytest.approx(9.0)


@settings(max_examples=25)
@given(st.integers(26, 59), st.integers(0, 2**31))
def test_no_future_is_seen(now: int, seed: int) -> None:
    real, other = (np.random.default_rng(each).poisson(9.0, (60, 2)) / 5.0 for each in (1, seed))
    mixed = np.concatenate([real[:now], other[now:]])
    raised = [ServiceLevel().replayed(backtest(Traffic(each), LastPeak(), range(1, 60))) for each in (real, mixed)]
    known = raised[0].origins <= now
    assert known.any()
    assert_array_equal(raised[0].forecast_qps[known], raised[1].forecast_qps[known])
    criterion = ServiceLevel()
    ready = criterion.ready(LastPeak(), backtest(Traffic(real[:now]), LastPeak(), range(1, now)))
    assert_allclose(ready.forecast(Traffic(real[:now])), raised[0].forecast_qps[raised[0].origins == now][0])


def test_a_choice_by_service_is_thinned_and_counts_its_margins_history() -> None:
    traffic = Traffic(np.random.default_rng(2).poisson(9.0, (400, 1)) / 5.0)
    choice = choose(traffic, [LastPeak()], ServiceLevel(), most_origins=50, latest_steps=150)
    origins = choice.scores[0].origins
    assert np.unique(np.diff(origins)).tolist() == [3]
    assert origins[0] > 250
    assert len(origins) <= 50 - 19
    with pytest.raises(DomainError, match="needs 49 steps"):
        choose(traffic.until(48), [LastPeak()], ServiceLevel())
