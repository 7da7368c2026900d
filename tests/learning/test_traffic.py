"""Learned forecasts of traffic: that they learn, know no future, and say what they lack."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from lab.reproductions import traffic_lstm
from lab.reproductions.forecasters import choose, forecasters
from lab.reproductions.traffic_lstm import Lstm
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD
from services.core.profiles.traffic import Forecaster, LastPeak, Traffic, backtest
from services.learning.traffic_boosting import Boosting

LSTMS = (Lstm("windows", epochs=1), Lstm("peaks"))


def waves(steps: int = 120, *, noise: bool = True, seed: int = 5) -> Traffic:
    """Return two classes, one with a wave of an hour, one without requests."""
    rate = 30.0 + 25.0 * np.sin(np.arange(steps) * np.pi / 6)
    counts = np.zeros((steps, 60, 2), dtype=np.int64)
    rng = np.random.default_rng(seed)
    counts[:, :, 0] = rng.poisson(rate[:, None], (steps, 60)) if noise else rate[:, None]
    return Traffic(counts.max(axis=1) / 5.0, counts)


def learners(*, lstm: bool) -> list[Forecaster]:
    """Return those with an LSTM, which need torch, or those without."""
    if lstm:
        pytest.importorskip("torch", reason="torch is not installed: pip install './lab[lstm]'")
        return list(LSTMS)
    return [Boosting(), Boosting(quantile=0.9)]


@pytest.mark.parametrize("lstm", [False, True])
def test_no_future_is_seen(lstm: bool) -> None:
    real, other = waves(60), waves(60, seed=6)
    assert real.counts is not None
    assert other.counts is not None
    pairs = ((real.peaks_qps, other.peaks_qps), (real.counts, other.counts))
    now = 40
    mixed = Traffic(*(np.concatenate([a[:now], 2 * b[now:]]) for a, b in pairs))
    for each in learners(lstm=lstm):
        told = [backtest(t, each, range(30, 44), refit_steps=6).forecast_qps for t in (real, mixed)]
        assert_array_equal(told[0][: now - 30 + 1], told[1][: now - 30 + 1])
        assert not np.array_equal(told[0], told[1])  # what came did differ


@pytest.mark.parametrize("lstm", [False, True])
def test_a_wave_is_learned(lstm: bool) -> None:
    traffic = waves()
    naive = backtest(traffic, LastPeak(), range(80, 120)).mae_qps[0]
    for each in learners(lstm=lstm):
        tested = backtest(traffic, each, range(80, 120), refit_steps=20)
        assert tested.forecast_qps.shape == (40, STEPS_AHEAD, 2)
        assert np.all(tested.forecast_qps >= 0)
        if each != LSTMS[0]:  # trained only as long as the time of a test allows
            assert tested.mae_qps[0] < 0.5 * naive, each.name
        assert_allclose(tested.forecast_qps[:, :, 1], 0.0, atol=0.2)


def test_a_quantile_brings_head_room() -> None:
    median, high = (
        backtest(waves(), Boosting(quantile=quantile), range(80, 120), refit_steps=20) for quantile in (0.5, 0.9)
    )
    assert high.under_share(1.0)[0] < median.under_share(1.0)[0]
    with pytest.raises(DomainError):
        Boosting(quantile=1.0)


def test_equal_histories_give_equal_forecasts() -> None:
    traffic = waves(40)
    assert_array_equal(*(Boosting().fit(traffic).forecast(traffic) for _ in range(2)))


def test_equal_histories_train_equal_networks_and_leave_the_global_seed_alone() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install './lab[lstm]'")
    traffic = waves(40)
    before = torch.random.get_rng_state()
    assert_array_equal(*(Lstm("peaks", epochs=2).fit(traffic).forecast(traffic) for _ in range(2)))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_torch_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(traffic_lstm, "find_spec", lambda name: None)
    monkeypatch.setattr(traffic_lstm.importlib, "import_module", missing)
    choice = choose(waves(60), forecasters())
    line = "needs torch: pip install './lab[lstm]'"
    assert choice.left_out == {"LSTM on windows": line, "LSTM on peaks": line}
    assert choice.method == "gradient boosting"
    with pytest.raises(DomainError, match="the LSTM needs torch"):
        Lstm().fit(waves(60))
