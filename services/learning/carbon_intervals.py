"""How far off forecasts of carbon intensity may be: quantiles of past errors, in units of the grid's recent
variability.

Errors are taken of square roots if no intensity is negative, because they grow with the level, and divided by how
much the days before the moment differed from one another (normalised conformal prediction): the intervals widen as soon
as a grid becomes more variable, not only once its errors have become large.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.arrays import Floats, Ints

DAY_H, ROUGH_DAYS = 24, 13
QUANTILES = (0.1, 0.9)
PRIOR_MOMENTS = 60  #: How many moments weigh as much as the quantiles of other grids
LEAST_ROUGHNESS = 0.1  #: Of the usual one: after days without any change the intervals do not close


def inside(values: Floats, root: bool) -> Floats:
    """Return the square roots of the values if ``root``, otherwise the values."""
    return np.sqrt(np.maximum(values, 0.0)) if root else values


def outside(values: Floats, root: bool) -> Floats:
    """Return the values in gCO2/kWh; the inverse of ``inside``."""
    return np.maximum(values, 0.0) ** 2 if root else values


@dataclass(frozen=True)
class MeasuredGrid:
    """The hours of a grid's past: (hours,) gCO2/kWh, whether each was measured, and whether square roots are taken."""

    values: Floats
    known: NDArray[np.bool_]
    root: bool

    def ahead(self, moments: Ints, hours: int) -> Floats:
        """Return what came after each moment, (moments, hours): NaN where it was not measured.

        An hour ahead that was never measured takes the values that fill its gaps.
        """
        at = moments[:, None] + np.arange(hours)
        known = self.known[at]
        return np.where(known | ~known.any(axis=0), self.values[at], np.nan)

    def roughness(self, moments: Ints) -> Floats:
        """Return the mean absolute change from one day to the next over the fortnight before each moment; (moments,).

        NaN if nothing of the fortnight was measured.
        """
        levels = inside(self.values, self.root)
        both = self.known[DAY_H:] & self.known[:-DAY_H]
        changes = np.where(both, np.abs(levels[DAY_H:] - levels[:-DAY_H]), 0.0)
        total, count = (np.concatenate(([0.0], np.cumsum(each))) for each in (changes, both))
        last = np.maximum(moments - DAY_H, 0)
        first = np.maximum(last - ROUGH_DAYS * DAY_H, 0)
        seen = count[last] - count[first]
        return np.where(seen > 0, total[last] - total[first], np.nan) / np.maximum(seen, 1.0)


@dataclass(frozen=True)
class Intervals:
    """Quantiles of errors."""

    low: Floats  #: (hours,) by hour ahead, as multiples of the roughness; at most 0
    high: Floats  #: The same; at least 0
    usual: float  #: The median roughness of the history

    @classmethod
    def of(cls, grid: MeasuredGrid, moments: Ints, made: Floats, prior: Floats | None = None) -> Intervals:
        """Return the quantiles of the errors of the (moments, hours) predictions made at past moments.

        They are averaged with ``prior``, the (2, hours) of other grids, which weighs less the more moments there are.
        """
        hours = int(made.shape[1])
        truth = grid.ahead(moments, hours)
        rough = grid.roughness(moments)
        usual = float(np.nanmedian(rough)) if np.isfinite(rough).any() else 0.0
        empty = cls(np.zeros(hours), np.zeros(hours), usual)
        missed = (inside(truth, grid.root) - inside(made, grid.root)) / empty._scale(rough)
        # Of each hour ahead and the hours beside it: their errors are alike, and the more there are the steadier.
        beside = [missed[:, max(0, hour - 1) : hour + 2] for hour in range(hours)]
        found = np.array([np.nanquantile(each, QUANTILES) for each in beside]).T
        share = 0.0 if prior is None else PRIOR_MOMENTS / (PRIOR_MOMENTS + len(moments))
        low, high = found if prior is None else (1 - share) * found + share * prior
        return cls(np.minimum(low, 0.0), np.maximum(high, 0.0), usual)

    def at(self, grid: MeasuredGrid, moments: Ints, made: Floats) -> tuple[Floats, Floats]:
        """Return p10 and p90 of the (moments, hours) predictions, gCO2/kWh."""
        scale, level = self._scale(grid.roughness(moments)), inside(made, grid.root)
        return outside(level + scale * self.low, grid.root), outside(level + scale * self.high, grid.root)

    def _scale(self, rough: Floats) -> Floats:
        """Return the unit of the errors at each moment, (moments, 1); the usual roughness where none is known."""
        least = max(LEAST_ROUGHNESS * self.usual, 1e-6)
        return np.maximum(np.where(np.isnan(rough), self.usual, rough), least)[:, None]
