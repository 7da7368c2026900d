"""What is known of a grid's past: hour by hour, without gaps, and without impossible values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Floats, Ints
from services.core.domain.errors import DomainError

HOUR_S, DAY_H = 3600.0, 24
MOST_DAYS = 3 * 365
LONGEST_GAP_H = 7 * DAY_H
"""Between the last value known and the moment of forecasting."""
SHAPE_DAYS = 14  #: Over which the steps within an hour are averaged


@dataclass(frozen=True)
class History:
    """The past of a grid, hour by hour, up to the forecast time."""

    start_s: float  #: When the first hour begins on the grid's clock, UTC seconds, a whole hour
    values: Floats
    """(hours,) gCO2/kWh, without gaps: a missing hour takes the value of the same hour on the last day that has one,
    else the last value before it. Nothing is filled from later values."""
    known: NDArray[np.bool_]  #: (hours,) whether the value was measured and is plausible
    shares: Floats  #: (hours, columns) such as percentages of renewable energy, filled likewise; no columns without any
    expected: Floats
    """(hours + ahead, columns) day-ahead forecasts of wind and solar generation by the hour they are for, at most 24 of
    them ahead of the forecast time: as many as had been published. No columns without any."""

    @property
    def end_s(self) -> float:
        """The forecast time."""
        return self.start_s + HOUR_S * len(self.values)

    @property
    def expected_h(self) -> int:
        """For how many hours after the forecast time wind and sun are forecast."""
        return len(self.expected) - len(self.values)

    @property
    def known_until(self) -> int:
        """Hours from the beginning to the end of the last hour that was measured."""
        return int(np.flatnonzero(self.known)[-1]) + 1

    def until(self, hours: int) -> History:
        """Return the first hours of the history."""
        expected = self.expected[: hours + self.expected_h]
        return History(self.start_s, self.values[:hours], self.known[:hours], self.shares[:hours], expected)


def history_of(
    times_s: Floats,
    values: Floats,
    until_s: float,
    shares: Floats | None = None,
    *,
    step_s: float = HOUR_S,
    expected: tuple[Floats, Floats] | None = None,
) -> History:
    """Return what was known at ``until_s``, hour by hour; shorter steps become the mean of their hour.

    Args:
        times_s: (n,) when each value took effect, UTC seconds, increasing.
        values: (n,) gCO2/kWh; NaN is no value.
        until_s: The forecast time, rounded down to the hour. Values that begin then or later are ignored.
        shares: (n, columns).
        step_s: How long a value holds at most.
        expected: The start of each hour covered by day-ahead forecasts of wind and solar generation, (m,) UTC seconds,
            and the forecasts, (m, columns). Of the 24 h after the forecast time as many count as have one.

    Raises:
        DomainError: Nothing is known before that time, or nothing of the week before it.
    """
    end = int(until_s // HOUR_S)
    hours = np.floor(times_s / HOUR_S).astype(np.int64)
    kept = (hours < end) & (hours >= end - MOST_DAYS * DAY_H) & np.isfinite(values)
    if not kept.any():
        raise DomainError(f"the history holds nothing before {_moment(until_s)}")
    if end - 1 - hours[kept][-1] - max(0, round(step_s / HOUR_S) - 1) > LONGEST_GAP_H:
        last = _moment(float(times_s[kept][-1]))
        raise DomainError(f"the history ends at {last}, more than a week before {_moment(until_s)}")
    believed = np.where(is_wild(values[kept]), np.nan, values[kept])
    begin = int(hours[kept][0])
    columns = np.column_stack([believed, *([] if shares is None else shares[kept].T)])
    means = _hourly(hours[kept] - begin, columns, end - begin)
    full = np.column_stack([filled(column) for column in means.T])
    ahead = np.empty((end - begin, 0))
    if expected is not None and expected[1].shape[1]:
        ahead = _hourly(np.floor(expected[0] / HOUR_S).astype(np.int64) - begin, expected[1], end - begin + DAY_H)
        published = np.isfinite(ahead[end - begin :]).any(axis=1)
        ahead = ahead[: end - begin + int(np.append(published, False).argmin())]
        ahead = np.column_stack([filled(column) for column in ahead.T])
    return History(begin * HOUR_S, full[:, 0], np.isfinite(means[:, 0]), full[:, 1:], ahead)


def _hourly(rows: Ints, columns: Floats, length: int) -> Floats:
    """Return the mean of the finite values of each hour, (length, columns); NaN for an hour without any."""
    within = (rows >= 0) & (rows < length)
    rows, columns = rows[within], columns[within]
    finite = np.isfinite(columns)
    return _means(rows, np.where(finite, columns, 0.0), finite, (length, columns.shape[1]))


def _means(at: Any, values: Floats, counts: Any, shape: tuple[int, int]) -> Floats:
    """Return the means of values by where they are to be added; NaN where nothing counts."""
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, at, values)
    np.add.at(count, at, counts)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def is_wild(values: Floats) -> NDArray[np.bool_]:
    """Return which values are implausible, such as those of a failed meter or in another unit: (n,).

    They lie outside the 1st to 99th percentile by more than the width of that range, and by more than the median's
    distance from zero; a grid's rare peaks do not.
    """
    low, median, high = np.quantile(values, (0.01, 0.5, 0.99))
    margin = max(high - low, abs(median))
    return (values < low - margin) | (values > high + margin)


def _moment(time_s: float) -> str:
    return f"{np.datetime64(int(time_s), 's')}Z"


def filled(column: Floats, day: int = DAY_H) -> Floats:
    """Return a column whose gaps take the (filled) value a day of steps before, else the previous; 0 before any."""
    full = column.copy()
    for at in np.flatnonzero(~np.isfinite(column)):
        full[at] = full[at - day] if at >= day else (full[at - 1] if at else 0.0)
    return full


def within_hours(times_s: Floats, values: Floats, until_s: float, step_s: float) -> Floats:
    """Return how steps differ from the mean of their hour, by hour of day over the last fortnight: (24, steps).

    A single column of zeros if steps are an hour or longer, or an hour is not a whole number of them; zeros for an hour
    without values.

    Args:
        times_s: (n,) when each value took effect, UTC seconds.
        values: (n,) gCO2/kWh.
        until_s: Values that begin then or later are ignored.
    """
    steps = round(HOUR_S / step_s) if step_s < HOUR_S and HOUR_S % step_s == 0 else 1
    shape = np.zeros((DAY_H, steps))
    kept = (times_s < until_s) & (times_s >= until_s - SHAPE_DAYS * DAY_H * HOUR_S) & np.isfinite(values)
    hour = (times_s[kept] // HOUR_S % DAY_H).astype(np.int64)
    step = np.minimum(times_s[kept] % HOUR_S // step_s, steps - 1).astype(np.int64)
    if steps > 1 and kept.any():
        means = _means((hour, step), values[kept], 1.0, (DAY_H, steps))
        whole = np.isfinite(means).all(axis=1)
        shape[whole] = means[whole] - means[whole].mean(axis=1, keepdims=True)
    return shape
