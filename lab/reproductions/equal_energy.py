"""Curves of average completion time over energy, held against each other at equal energy and at equal time.

A curve is the front of a policy's points: those that no other point of it beats in both. Between its points it is taken
as linear, beyond its ends as unknown: curves are compared where both reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Curve:
    """A front: (n,) energy ascending and (n,) time descending, strictly."""

    energy_kwh: Floats
    jct_s: Floats

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Return the front of (energy, average completion time) points.

        Raises:
            DomainError: no point.
        """
        if not points:
            raise DomainError("a curve needs a point")
        front: list[tuple[float, float]] = []
        for energy_kwh, jct_s in sorted(points):
            if not front or jct_s < front[-1][1]:
                front.append((energy_kwh, jct_s))
        energy, jct = np.array(front, dtype=np.float64).T
        return cls(energy, jct)

    def turned(self) -> Curve:
        """Return the same with time and energy changed over."""
        return Curve(self.jct_s[::-1], self.energy_kwh[::-1])

    def at(self, energy_kwh: float) -> float:
        """Return the time at an energy; that of the nearer end beyond the ends."""
        return float(np.interp(energy_kwh, self.energy_kwh, self.jct_s))


@dataclass(frozen=True)
class Comparison:
    """How many times less the first curve needs at what both reach: where from and to, least and most times."""

    low: float
    high: float
    least: float
    most: float


def compared(ours: Curve, theirs: Curve) -> Comparison | None:
    """Return how many times less time ours takes at equal energy, ``None`` where the curves share no energy.

    The ratio of two linear pieces is monotone, so that the extremes lie on points of either curve or on the ends.
    At equal time, of energies: ``compared(ours.turned(), theirs.turned())``.
    """
    low = max(float(each.energy_kwh[0]) for each in (ours, theirs))
    high = min(float(each.energy_kwh[-1]) for each in (ours, theirs))
    if low > high:
        return None
    knots = np.concatenate((ours.energy_kwh, theirs.energy_kwh))
    knots = np.concatenate(([low, high], knots[(knots > low) & (knots < high)]))
    times = [theirs.at(energy) / ours.at(energy) for energy in knots.tolist()]
    return Comparison(low, high, min(times), max(times))
