"""Demand ahead: peaks from a request log, the naive forecasters, backtests that know no future, and the choice."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from lab.reproductions.forecasters import choose
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD
from services.core.profiles.traffic import DAY_STEPS, LastPeak, SeasonalNaive, Traffic, backtest
from services.learning.traffic_boosting import features, levels_qps, ratios


def some_traffic(steps: int, seed: int = 3, n_classes: int = 2) -> Traffic:
    """Return random counts, with a step without requests."""
    counts = np.random.default_rng(seed).poisson(4.0, (steps, 60, n_classes))
    counts[steps // 2] = 0
    return Traffic(counts.max(axis=1) / 5.0, counts)


def test_windows_are_counted_back_from_their_end() -> None:
    """The next step begins where the counts end; what is older than whole steps is ignored."""
    counts = np.zeros((130, 2), dtype=np.int64)
    counts[9, 0], counts[10, 0], counts[69, 0], counts[70, 1], counts[129, 0] = 50, 3, 2, 5, 1
    traffic = Traffic.of_windows(counts)
    assert_allclose(traffic.peaks_qps, [[0.6, 0.0], [0.2, 1.0]])
    assert traffic.counts is not None
    assert traffic.counts.sum() == 11
    assert len(Traffic.of_windows(counts[:59])) == 0


@pytest.mark.parametrize("counts", [np.zeros(60, dtype=int), np.zeros((60, 1)), np.full((60, 1), -1)])
def test_counts_that_cannot_be_are_refused(counts: NDArray[np.int64]) -> None:
    with pytest.raises(DomainError, match="whole numbers"):
        Traffic.of_windows(counts)


@pytest.mark.parametrize("peaks", [np.zeros(3), np.zeros((3, 0)), np.array([[-1.0]]), np.array([[np.inf]])])
def test_peaks_that_cannot_be_are_refused(peaks: Floats) -> None:
    with pytest.raises(DomainError):
        Traffic(peaks)


def test_the_naive_forecasters() -> None:
    ramp = Traffic(np.arange(DAY_STEPS + 3, dtype=np.float64)[:, None])
    assert LastPeak().fit(ramp).forecast(ramp)[:, 0].tolist() == [DAY_STEPS + 2.0] * STEPS_AHEAD
    assert SeasonalNaive().fit(ramp).forecast(ramp)[:, 0].tolist() == [3, 4, 5, 6, 7, 8]
    short = ramp.until(DAY_STEPS - 2)  # the first two steps of the day before are not known
    last = DAY_STEPS - 3.0
    assert SeasonalNaive().forecast(short)[:, 0].tolist() == [last, last, 0, 1, 2, 3]


def test_a_backtest_counted_by_hand() -> None:
    traffic = Traffic(np.array([[1.0], [2.0], [2.1], [5.0]]))
    tested = backtest(traffic, LastPeak(), [1, 2, 3])
    errors = [1.0, 1.1, 4.0, 0.1, 3.0, 2.9]
    assert_allclose(tested.mae_qps, [np.mean(errors)])
    assert_allclose(tested.under_share(1.1), [5 / 6])  # 2.1 is within 1.1 x 2
    assert np.isnan(tested.actual_qps[2, 1:]).all()


@settings(max_examples=25)
@given(st.integers(6, 39), st.integers(0, 2**31))
def test_no_future_is_seen(now: int, seed: int) -> None:
    """What comes at a step or after it changes no forecast and no feature of that step."""
    real = some_traffic(40)
    other = some_traffic(40, seed)
    assert real.counts is not None
    assert other.counts is not None
    mixed = Traffic(*(np.concatenate([a[:now], b[now:]]) for a, b in
                      ((real.peaks_qps, other.peaks_qps), (real.counts, other.counts))))  # fmt: skip
    for forecaster in (LastPeak(), SeasonalNaive()):
        runs = [backtest(each, forecaster, range(1, 40), refit_steps=5).forecast_qps[:now] for each in (real, mixed)]
        assert_array_equal(*runs)
    origins = np.arange(1, now + 1)
    assert_array_equal(features(real, origins), features(mixed, origins))
    assert_array_equal(features(real, origins), features(real.until(now), origins))
    assert_array_equal(levels_qps(real, origins), levels_qps(mixed, origins))


def test_features_reach_a_day_back_and_are_ratios() -> None:
    traffic = some_traffic(2 * DAY_STEPS)
    origins = np.array([DAY_STEPS + 40])
    seen = features(traffic, origins)
    level = traffic.peaks_qps[origins[0] - 3 : origins[0]].mean(axis=0)
    assert_allclose(seen[0, 2, :, 1], traffic.peaks_qps[origins[0] - 1] / level)
    a_day_before = traffic.peaks_qps[40 + 2] / traffic.peaks_qps[37:40].mean(axis=0)
    assert_allclose(seen[0, 2, :, -3], a_day_before)
    grown = Traffic(traffic.peaks_qps * 7.0)
    assert_allclose(features(grown, origins)[..., 1:10], seen[..., 1:10])
    assert_allclose(ratios(grown, origins), ratios(traffic, origins))
    assert np.isnan(ratios(traffic, np.array([len(traffic) - 1]))[0, 1:]).all()


@dataclass(frozen=True)
class Oracle:
    """Knows a wave that comes again every eight steps."""

    needs: int | str = 8
    name: str = "oracle"

    def steps_needed(self, history: Traffic) -> int | str:
        return self.needs

    def fit(self, history: Traffic) -> "Oracle":
        return self

    def forecast(self, history: Traffic) -> Floats:
        return history.peaks_qps[-8 : -8 + STEPS_AHEAD]


def test_the_one_that_did_best_is_chosen_and_all_scores_are_kept() -> None:
    wave = Traffic(5.0 + 4.0 * np.sin(np.arange(80) * np.pi / 4)[:, None])
    choice = choose(wave, [LastPeak(), SeasonalNaive(), Oracle()])
    assert choice.method == "oracle"
    assert_allclose(choice.model.forecast(wave), wave.peaks_qps[:STEPS_AHEAD], atol=1e-9)
    assert [score.name for score in choice.scores] == ["last peak", "seasonal naive", "oracle"]
    assert len({tuple(score.origins) for score in choice.scores}) == 1
    assert choose(wave, [LastPeak(), SeasonalNaive()]).method == "last peak"  # the first of equals


def test_who_cannot_be_compared_is_named() -> None:
    wave = some_traffic(30)
    choice = choose(wave, [LastPeak(), Oracle(needs=20)])
    assert choice.left_out == {"oracle": "needs 44 steps of history, which has 30"}
    assert choose(wave, [LastPeak(), Oracle(needs="needs torch")]).left_out == {"oracle": "needs torch"}
    with pytest.raises(DomainError, match="needs 25 steps"):
        choose(wave.until(10), [LastPeak()])
    with pytest.raises(DomainError, match="needs 8 steps before"):
        backtest(wave, Oracle(), [7])
