"""The forecasters of traffic to choose from."""

from __future__ import annotations

from lab.reproductions.traffic_lstm import Lstm
from services.core.profiles.traffic import Forecaster, LastPeak, SeasonalNaive
from services.learning.traffic_boosting import Boosting


def forecasters() -> list[Forecaster]:
    """Return all that ``services.core.profiles.traffic.choose`` may compare, the simpler first.

    Without torch the LSTMs are left out, and the choice says so.

    >>> from lab.serving.logs import observe
    >>> from services.core.profiles.traffic import choose
    >>> log = observe(range(6000), [0] * 6000, n_classes=1, start_s=0.0, end_s=6000.0)  # a request every second
    >>> outlook = choose(log, forecasters(), least_origins=6).forecast(log)
    >>> outlook.peaks_qps.round(2).T.tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    """
    return [LastPeak(), SeasonalNaive(), Boosting(), Lstm("windows"), Lstm("peaks")]
