"""What a learner of peak rates sees: past rates relative to the recent level, so that growth needs no relearning."""

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.serving import STEPS_AHEAD, WINDOW_S
from services.core.profiles.traffic import DAY_STEPS, Traffic

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
