"""Carbon intensity ahead from as little as one day of a grid's past, by what other grids have taught.

A linear model learned once from the hours of many grids and shipped as weights (``carbon_start.npz``; NOTICE has their
source, ``lab/reproductions/carbon_start.py`` makes them). It sees the last fortnight, or the part of it that is known
over and over, as differences from the last week's mean in units of the fortnight's standard deviation. Nothing in it is
peculiar to a grid, a level or an hour of day: the daily course is read off the window. There is one set of weights for
each length of history in ``LENGTHS_D``.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from services.core.domain.arrays import Floats, Ints

DAY_H, WINDOW_D, WEEK_D = 24, 14, 7
REACH_H = 96
LENGTHS_D = (1, 2, 3, 7, 14)
WEIGHTS_FILE = Path(__file__).with_name("carbon_start.npz")
THURSDAY_S = 7 * 86_400.0  #: Weeks of the clock begin on the Thursday of 1970-01-01


@dataclass(frozen=True)
class Window:
    """What the model looks at before each moment, and the units of what it says."""

    x: Floats  #: (moments, features)
    last: Floats  #: (moments, 1) the last value known
    scale: Floats  #: (moments, 1) the window's standard deviation, at least a thousandth of its level
    unit: Floats
    """(moments, 1) of the quantiles: the mean change from one day to the next; with one day known, the scale."""


@dataclass(frozen=True)
class Weights:
    """What was learned for one length of history."""

    change: Floats  #: (features, 96) from the features to the change from the last value, in units of the scale
    quantiles: Floats  #: (2, 96) p10 and p90 of the errors, in the windows' units


def window(values: Floats, start_s: float, moments: Ints, days: int) -> Window:
    """Return what is seen of the last ``days`` before each moment.

    Args:
        values: (hours,) as ``services.learning.carbon_intervals.inside`` gives them.
        start_s: When the first of them begins, UTC seconds.
        moments: Hours since then, each at least ``days`` days.
    """
    past = values[moments[:, None] - 1 - np.arange(WINDOW_D * DAY_H) % (days * DAY_H)]  # the newest first
    level = past[:, : WEEK_D * DAY_H].mean(axis=1, keepdims=True)
    scale = np.maximum((past - level).std(axis=1, keepdims=True), 1e-3 * np.abs(level) + 1e-6)
    past, last = (past - level) / scale, past[:, :1]
    by_day = past.reshape(-1, WINDOW_D, DAY_H)
    restless = np.abs(past[:, DAY_H:] - past[:, :-DAY_H]).mean(axis=1, keepdims=True)
    weekday = np.eye(7)[((start_s + 3600.0 * moments) % THURSDAY_S // 86_400.0).astype(np.int64)]
    seen = (past[:, : 3 * DAY_H], by_day[:, WEEK_D - 1], by_day[:, :WEEK_D].mean(axis=1), by_day.mean(axis=1))
    x = np.hstack([*seen, by_day.mean(axis=2), weekday, np.log1p(np.abs(level / scale)), restless])
    return Window(x, last, scale, scale * np.maximum(restless, 0.1) if days > 1 else scale)


@cache
def shipped() -> dict[int, Weights]:
    """Return the weights by days of history."""
    with np.load(WEIGHTS_FILE) as file:
        return {
            days: Weights(*(file[f"{name}_{days}"].astype(np.float64) for name in ("change", "quantiles")))
            for days in LENGTHS_D
        }


def started(values: Floats, start_s: float, moments: Ints, hours: int) -> Floats:
    """Return the forecasts made at moments of a past, p10 and p90: (3, moments, hours), in the values' units.

    Beyond 96 h the last day forecast is repeated.

    Args:
        values: (hours,) as for ``window``.
        start_s: When the first of them begins, UTC seconds.
        moments: Hours since then, each at least a day.
        hours: How far ahead.
    """
    made = np.empty((3, len(moments), REACH_H))
    lengths = np.array(LENGTHS_D)[np.searchsorted(LENGTHS_D, moments // DAY_H, side="right") - 1]
    for days in np.unique(lengths).tolist():
        of = lengths == days
        seen, learned = window(values, start_s, moments[of], days), shipped()[days]
        likely = seen.last + seen.scale * (seen.x @ learned.change)
        made[:, of] = np.stack([likely, *(likely + seen.unit * each for each in learned.quantiles)])
    return made[:, :, _reached(hours)]


def quantiles(days: int, hours: int) -> Floats:
    """Return p10 and p90 of the errors of other grids by hour ahead, in the windows' units: (2, hours)."""
    return shipped()[days].quantiles[:, _reached(hours)]


def _reached(hours: int) -> Ints:
    ahead = np.arange(hours)
    return np.where(ahead < REACH_H, ahead, REACH_H - DAY_H + ahead % DAY_H)
