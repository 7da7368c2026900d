"""What the day-ahead forecasts of wind and sun change about the hours that they reach.

    y(t) - s(t) = sum over sources of b (e(t) - mean of e(t - k days), k = 1 .. 7)

with y the intensity, s what the pretrained model says of it, and e the forecast generation. There is one slope b for a
source, whatever the hour, so that a fortnight is enough to learn from.
"""

from typing import cast

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.learning.carbon_history import DAY_H, History

WEEK_D = 7
PENALTY = 4.0
"""Slopes are smaller than the past says, as if so many more moments had shown that wind and sun change nothing."""


def unusual(history: History, moments: Ints, hours: int) -> Floats:
    """Return how much more generation is forecast after moments than in the same hour of the days before, MW.

    (moments, hours, sources). Days before the first that has forecasts do not count; on that day nothing is unusual.
    """
    first = int(history.expected.any(axis=1).argmax())  # what is not known before it is filled with zeros
    at = moments[:, None] + np.arange(hours)
    days = np.stack([at - DAY_H * day for day in range(1, WEEK_D + 1)])
    counts = (days >= first)[..., None]
    before = np.where(counts, history.expected[days], 0.0).sum(axis=0) / np.maximum(counts.sum(axis=0), 1)
    return np.where(counts.any(axis=0), history.expected[at] - before, 0.0)


def slopes(news: Floats, missed: Floats, weights: Floats) -> Floats:
    """Return by how much the intensity changes with each source's generation: (sources,).

    Args:
        news: As ``unusual`` returns it, at the moments that are learned from.
        missed: (moments, hours) by how much the intensity was above what was said of it.
        weights: (moments, 1) so that their squares weigh in the errors.
    """
    x, y = (weights[..., None] * news).reshape(-1, news.shape[2]), (weights * missed).ravel()
    gram = x.T @ x
    gram += np.diag(np.diag(gram)) * PENALTY / len(news)
    return cast(Floats, np.linalg.lstsq(gram, x.T @ y)[0])  # a source may have generated nothing


def from_day_to_day(history: History, moments: Ints, made: Floats) -> Floats:
    """Return forecasts made at moments a day apart, each changed by what the moments before it have shown.

    Args:
        history: With intensities in the units of the forecasts.
        made: (kinds, moments, hours), the likeliest first.
    """
    hours = min(history.expected_h, made.shape[2])
    if not hours or not len(moments):
        return made
    news, made = unusual(history, moments, hours), made.copy()
    came = history.values[moments[:-1, None] + np.arange(hours)]
    missed = came - made[0, :-1, :hours]
    for at in range(1, len(moments)):
        made[:, at, :hours] += news[at] @ slopes(news[:at], missed[:at], np.ones((at, 1)))
    return made
