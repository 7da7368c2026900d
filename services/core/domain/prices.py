"""What electricity costs, hour by hour. Prices steer, and are reported; they never account for carbon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.domain.units import S_PER_HOUR

DAY_HOURS = 24


@dataclass(frozen=True)
class PriceCurve:
    """Prices of consecutive hours; beyond them, the same hour of the last day known, or else the nearest hour's.

    Raises:
        DomainError: there are none, one is not finite, or they do not begin at a whole hour.
    """

    start_s: float  #: When the first hour begins, UTC seconds
    per_kwh: Floats  #: (n_hours,) in the currency of the installation; may be negative

    def __post_init__(self) -> None:
        if not self.per_kwh.size or not np.isfinite(self.per_kwh).all() or self.start_s % S_PER_HOUR:
            raise DomainError("prices need finite values of whole hours, and at least one")

    @classmethod
    def of(cls, hours: Mapping[float, float]) -> PriceCurve | None:
        """Return prices by the beginnings of their hours; a gap has those of the day before, or of the hour before.

        None if there are none.
        """
        if not hours:
            return None
        first_s, end_s = min(hours), max(hours) + S_PER_HOUR
        dense: list[float] = []
        for at in range(round((end_s - first_s) / S_PER_HOUR)):
            before = dense[-DAY_HOURS if at >= DAY_HOURS else -1] if at else 0.0
            dense.append(hours.get(first_s + at * S_PER_HOUR, before))
        return cls(first_s, np.array(dense))

    def at(self, times_s: Floats) -> Floats:
        """Return the price in force at each time, per kWh: (n,) to (n,)."""
        hours, n_hours = (times_s - self.start_s) // S_PER_HOUR, self.per_kwh.size
        days_over = np.maximum(np.ceil((hours - n_hours + 1) / DAY_HOURS), 0)
        return self.per_kwh[np.clip(hours - DAY_HOURS * days_over, 0, n_hours - 1).astype(np.int64)]

    def cut(self, start_s: float, end_s: float) -> PriceCurve:
        """Return the known hours that overlap the window, or the one nearest to it."""
        first, last = (int((time_s - self.start_s) // S_PER_HOUR) for time_s in (start_s, np.nextafter(end_s, start_s)))
        first = min(max(first, 0), self.per_kwh.size - 1)
        return PriceCurve(self.start_s + first * S_PER_HOUR, self.per_kwh[first : max(last, first) + 1])
