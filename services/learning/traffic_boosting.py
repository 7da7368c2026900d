"""Gradient boosting of peak rates, for ``services.core.profiles.traffic``: one model for all classes and steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEPS_AHEAD, WINDOW_S
from services.core.profiles.traffic import DAY_STEPS, Traffic
from services.learning.one_thread import one_thread

LEVEL_STEPS, LAGS = 3, 6
SPANS = (12, 36, DAY_STEPS)
LEAST_LEVEL_QPS = 1 / WINDOW_S  #: One request in a window: where nothing came of late, ratios are to this


def levels_qps(history: Traffic, origins: Ints) -> Floats:
    """Return the mean peak of the last few steps before each origin: (n_origins, n_classes), above 0."""
    return np.maximum(_means(history.peaks_qps, origins, LEVEL_STEPS, least=1), LEAST_LEVEL_QPS)


def features(history: Traffic, origins: Ints) -> Floats:
    """Return what is known at each origin about each step ahead: (n_origins, STEPS_AHEAD, n_classes, n_features).

    NaN stands for anything before the history begins and, if only peaks are known, for the rates within steps. Steps at
    or after an origin are never read.

    Args:
        origins: (n_origins,) first steps that are not known, 1 .. ``len(history)``.
    """
    peaks, level = history.peaks_qps, levels_qps(history, origins)
    past = np.concatenate([np.full((DAY_STEPS, history.n_classes), np.nan), peaks])  # step i stands at i + DAY_STEPS
    lags = [past[origins - lag + DAY_STEPS] / level for lag in range(1, LAGS + 1)]
    spans = [_means(peaks, origins, span, least=span) / level for span in SPANS]
    mean_qps = None if history.counts is None else history.counts.mean(axis=1) / WINDOW_S
    within = [
        np.full(level.shape, np.nan) if mean_qps is None else _means(mean_qps, origins, span, least=1) / level
        for span in (1, LEVEL_STEPS)
    ]
    each = np.stack([np.log(level), *lags, *spans, *within], axis=-1)
    yesterday = np.maximum(_means(peaks, origins - DAY_STEPS, LEVEL_STEPS, least=LEVEL_STEPS), LEAST_LEVEL_QPS)
    shape = (len(origins), STEPS_AHEAD, history.n_classes)
    ahead = np.arange(STEPS_AHEAD)
    own: list[Floats] = [
        past[origins[:, None] + ahead] / yesterday[:, None],  # a day earlier, as a ratio to the level there
        np.broadcast_to(ahead[None, :, None].astype(np.float64), shape),
        np.broadcast_to(np.arange(history.n_classes, dtype=np.float64), shape),
    ]
    repeated = np.broadcast_to(each[:, None], (*shape, each.shape[-1]))
    return np.concatenate([repeated, np.stack(own, axis=-1)], axis=-1)


def ratios(history: Traffic, origins: Ints) -> Floats:
    """Return the actual peaks relative to each origin's level: (n_origins, STEPS_AHEAD, n_classes), NaN if unknown."""
    padded = np.concatenate([history.peaks_qps, np.full((STEPS_AHEAD, history.n_classes), np.nan)])
    return padded[origins[:, None] + np.arange(STEPS_AHEAD)] / levels_qps(history, origins)[:, None]


def _means(values: Floats, origins: Ints, span: int, *, least: int) -> Floats:
    """Return the mean over up to ``span`` steps before each origin, NaN if there are fewer than ``least``."""
    sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
    high = np.maximum(origins, 0)
    low = np.maximum(origins - span, 0)
    steps = (high - low)[:, None]
    means = (sums[high] - sums[low]) / np.maximum(steps, 1)
    return np.where(steps >= least, np.maximum(means, 0.0), np.nan)


class Regressor(Protocol):
    """A regression of scikit-learn, which lacks types; imported by name, so that none are inferred from its sources."""

    def fit(self, x: Floats, y: Floats, /, sample_weight: Floats | None = None) -> Regressor:
        """Fit and return the regressor: x is (n, features), y (n,) or (n, outputs), the weights of the rows (n,)."""
        ...

    def predict(self, x: Floats, /) -> Floats:
        """Return the predictions, (n,) or (n, outputs), for (n, features)."""
        ...


_new_boosting = cast("Callable[..., Regressor]", import_module("sklearn.ensemble").HistGradientBoostingRegressor)

LATEST_STEPS = 14 * DAY_STEPS  #: Learned from at most two weeks: longer ones cost more than seconds


@dataclass(frozen=True)
class Boosting:
    """Learns the ratio of a peak to the recent level, from features that are ratios to that level too."""

    quantile: float = 0.5
    """Of the predicted peak, in (0, 1); the median has the least absolute error, 0.9 brings head-room of its own."""
    rounds: int = 60  #: Number of trees
    seed: int = 1  #: Equal history and equal seed give equal models

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise DomainError(f"a quantile lies between 0 and 1, not at {self.quantile}")

    @property
    def name(self) -> str:
        """The name, with the quantile unless it is the median."""
        return "gradient boosting" + ("" if self.quantile == 0.5 else f" p{100 * self.quantile:g}")

    def steps_needed(self, history: Traffic) -> int:
        """Return the number of lags; little is learned from a history that short."""
        del history
        return LAGS

    def fit(self, history: Traffic) -> BoostingModel:
        start = max(0, len(history) - LATEST_STEPS - DAY_STEPS)
        recent = history.since(start)
        origins = np.arange(max(1, len(recent) - LATEST_STEPS), len(recent))
        target = ratios(recent, origins).reshape(-1)
        seen = features(recent, origins).reshape(target.size, -1)
        known = ~np.isnan(target)
        columns = np.flatnonzero(~np.isnan(seen[known]).all(axis=0))  # scikit-learn bins no column that is all NaN
        trees = _new_boosting(
            loss="quantile",
            quantile=self.quantile,
            max_iter=self.rounds,
            max_leaf_nodes=15,
            early_stopping=False,
            random_state=self.seed,
        )
        with one_thread():
            return BoostingModel(trees.fit(seen[known][:, columns], target[known]), columns)


@dataclass(frozen=True)
class BoostingModel:
    """Fitted scikit-learn trees, and the feature columns that they see."""

    trees: Regressor
    columns: Ints

    def forecast(self, history: Traffic) -> Floats:
        """Return the peaks of the next half hour; (STEPS_AHEAD, n_classes) queries per second."""
        recent = history.since(max(0, len(history) - DAY_STEPS - LAGS))
        origin = np.array([len(recent)])
        rows = features(recent, origin).reshape(STEPS_AHEAD * history.n_classes, -1)
        with one_thread():
            predicted = self.trees.predict(rows[:, self.columns]).reshape(STEPS_AHEAD, history.n_classes)
        return np.maximum(predicted, 0.0) * levels_qps(recent, origin)
