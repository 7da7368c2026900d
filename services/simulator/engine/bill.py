"""What a simulated cluster pays for its electricity."""

from collections import defaultdict
from datetime import UTC, datetime

import numpy as np

from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.simulator.workload import SitePrices


class Bill:
    """Adds up the energy of each hour."""

    def __init__(self, prices: SitePrices) -> None:
        self._prices = prices
        self._hours_j: dict[int, float] = defaultdict(float)

    def draw(self, begin_s: float, end_s: float, power_w: float) -> None:
        """Add a constant draw over ``[begin_s, end_s)``, UTC seconds."""
        hour = int(begin_s // S_PER_HOUR)
        while begin_s < end_s:
            until_s = min(end_s, (hour + 1) * S_PER_HOUR)
            self._hours_j[hour] += power_w * (until_s - begin_s)
            begin_s, hour = until_s, hour + 1

    def figures(self) -> tuple[float, float]:
        """Return the money for energy, and that for each month's highest hour."""
        hours = sorted(self._hours_j)
        kwh = np.array([self._hours_j[hour] / J_PER_KWH for hour in hours])
        highest: dict[tuple[int, int], float] = {}
        for hour, mean_kw in zip(hours, kwh.tolist(), strict=True):
            at = datetime.fromtimestamp(hour * S_PER_HOUR, UTC)
            highest[at.year, at.month] = max(highest.get((at.year, at.month), 0.0), mean_kw)
        energy = kwh @ self._prices.curve.at(np.array(hours, dtype=np.float64) * S_PER_HOUR)
        return float(energy), self._prices.demand_per_kw_month * sum(highest.values())
