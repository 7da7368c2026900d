"""The forecasters of traffic to choose from, and a choice by their errors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.reproductions.traffic_lstm import Lstm
from services.core.profiles import traffic
from services.core.profiles.traffic import (
    Backtest,
    Choice,
    Forecaster,
    LastPeak,
    Model,
    SeasonalNaive,
    ServiceLevel,
    Traffic,
)
from services.learning.traffic_boosting import Boosting


def forecasters() -> list[Forecaster]:
    """Return all that ``services.core.profiles.traffic.choose`` may compare, the simpler first.

    Without torch the LSTMs are left out, and the choice says so.

    >>> from lab.serving.logs import observe
    >>> log = observe(range(6000), [0] * 6000, n_classes=1, start_s=0.0, end_s=6000.0)  # a request every second
    >>> choose(log, forecasters(), least_origins=6).model.forecast(log).round(2).T.tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    return [LastPeak(), SeasonalNaive(), Boosting(), Lstm("windows"), Lstm("peaks")]


class LeastError(ServiceLevel):
    """Chooses by mean absolute error, summed over classes; forecasts are used as they are."""

    @property
    def moments_needed(self) -> int:
        return 0

    def replayed(self, score: Backtest) -> Backtest:
        return score

    def cost_qps(self, score: Backtest) -> float:
        return float(score.mae_qps.sum())

    def ready(self, model: Model, score: Backtest) -> Model:
        del score
        return model


def choose(history: Traffic, compared: Sequence[Forecaster], **more: Any) -> Choice:
    """Return the forecaster with the least error, which does not distinguish shortage from spare capacity.

    Args:
        more: As for ``services.core.profiles.traffic.choose``.
    """
    return traffic.choose(history, compared, LeastError(), **more)
