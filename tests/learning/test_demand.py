"""The demand that pools are planned for: seldom short, little spare, and something to go by from the first step on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from lab.reproductions.forecasters import choose
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD
from services.core.profiles.traffic import HEAD_ROOM, LastPeak, Traffic, backtest
from services.learning.demand import LEAST_ORIGINS, candidates, forecast_demand
from services.learning.traffic_boosting import Boosting

ENOUGH = 1 + 24 + LEAST_ORIGINS


def noise(steps: int, seed: int = 7) -> Traffic:
    """Return two classes of Poisson requests, a large one and a small one, whose peaks no past predicts."""
    counts = np.random.default_rng(seed).poisson((20.0, 0.5), (steps, 60, 2))
    return Traffic.of_windows(counts.reshape(-1, 2))


def test_demand_is_as_seldom_short_as_asked_where_the_mean_error_is_not() -> None:
    """Noise of eight like classes, asked at three moments: 144 steps, of which 5 % shall be short."""
    counts = np.random.default_rng(7).poisson(20.0, (138, 60, 8))
    traffic = Traffic.of_windows(counts.reshape(-1, 8))
    asked = range(120, 138, STEPS_AHEAD)
    real = np.stack([traffic.peaks_qps[at : at + STEPS_AHEAD] for at in asked])
    least = choose(traffic.until(120), [LastPeak(), Boosting()], refit_steps=60).model
    blind = np.stack([least.forecast(traffic.until(at)) for at in asked])
    assert (real > blind).mean() > 0.4
    plans = [forecast_demand(traffic.until(at), None, head_room=1.0) for at in asked]
    demand = np.stack([each.peaks_qps for each in plans])
    assert (real > demand).mean() < 0.09
    assert np.maximum(demand - real, 0.0).mean() < 0.3 * real.mean()
    for each in plans:
        cost = {name: sum(score["cost_qps"]) for name, score in each.scores.items()}
        assert each.method == min(cost, key=lambda name: cost[name])
        assert not each.assumed


def test_more_service_is_more_demand_and_head_room_is_part_of_what_suffices() -> None:
    traffic = noise(80)
    half, most = (forecast_demand(traffic, None, service=service).peaks_qps.sum() for service in (0.5, 0.95))
    assert half < most
    bare = forecast_demand(traffic, None, head_room=1.0).peaks_qps.sum()
    assert most < bare < 1.2 * HEAD_ROOM * most


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 60), st.integers(0, 2**31), st.sampled_from([0.0, 0.02, 3.0, 5_000.0]))
def test_demand_is_deterministic_finite_and_not_negative(steps: int, seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    busy = rng.random((steps * 60, 1)) < rng.random()
    history = Traffic.of_windows(np.where(busy, rng.poisson(rate, (steps * 60, 3)), 0))
    assumed = rng.random(3) * rate
    first, again = (forecast_demand(history, assumed) for _ in range(2))
    assert_array_equal(first.peaks_qps, again.peaks_qps)
    assert (first.method, first.scores) == (again.method, again.scores)
    assert first.peaks_qps.shape == (STEPS_AHEAD, 3)
    assert np.isfinite(first.peaks_qps).all()
    assert (first.peaks_qps >= 0).all()
    assert np.isfinite([each for score in first.scores.values() for each in score.values()]).all()
    assert first.assumed == (steps < ENOUGH)
    assert set(first.scores) | set(first.left_out) == {each.name for each in candidates()}


def test_too_short_a_history_takes_what_the_operator_expects_and_no_less_than_was_seen() -> None:
    history = Traffic(np.array([[1.0, 9.0], [2.0, 0.0]]))
    assert forecast_demand(history, None).peaks_qps.tolist() == [[2.0, 9.0]] * STEPS_AHEAD
    given = forecast_demand(history, np.array([5.0, 5.0]))
    assert given.peaks_qps.tolist() == [[5.0, 9.0]] * STEPS_AHEAD
    assert (given.assumed, given.method, given.scores) == (True, "greatest peak so far", {})
    assert given.left_out["last peak"] == f"needs {ENOUGH} steps of history, which has 2"
    nothing = Traffic(np.zeros((0, 2)))
    demand = forecast_demand(nothing, np.array([5.0, 0.0]))
    assert (demand.method, demand.assumed, demand.peaks_qps[0].tolist()) == ("assumed", True, [5.0, 0.0])
    with pytest.raises(DomainError, match="no history to learn from, and no demand assumed"):
        forecast_demand(nothing, None)


@pytest.mark.parametrize("assumed", [[1.0], [1.0, -1.0], [1.0, np.nan], [[1.0, 2.0]]])
def test_an_assumption_that_cannot_be_is_refused(assumed: list[float]) -> None:
    with pytest.raises(DomainError, match="assumed peaks are 2 finite numbers"):
        forecast_demand(noise(2), np.array(assumed))


@pytest.mark.parametrize(("service", "head_room"), [(1.0, 1.1), (0.4, 1.1), (0.95, 0.0), (0.95, np.inf)])
def test_bounds_that_cannot_be_are_refused(service: float, head_room: float) -> None:
    with pytest.raises(DomainError, match=r"service level|head-room"):
        forecast_demand(noise(2), None, service=service, head_room=head_room)


def test_the_margin_is_in_the_scores_too() -> None:
    """The scores are those of what would have been planned for: shorter of the plain forecast more often."""
    traffic = noise(200)
    score = forecast_demand(traffic, None).scores["last peak"]
    plain = backtest(traffic, LastPeak(), range(40, 200)).under_share()
    assert (np.array(score["short_share"]) < 0.5 * plain).all()
    assert_allclose(score["short_share"], 0.05, atol=0.05)
