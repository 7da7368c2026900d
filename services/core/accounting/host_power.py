"""Power a host draws besides its GPUs. Without NumPy, because agents are installed without it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class CpuPowerModel:
    """CPU power as a piecewise linear function of utilisation, for hosts without a power meter.

    GREEN refers to a published model of this shape but prints no coefficients. Two points, idle and peak, are the
    minimum (``between``); more can be measured per host.

    Source: GREEN section 4.1.
    """

    utilisation: tuple[float, ...]  #: (k,) share of all cores in use, from 0 to 1, strictly increasing, k >= 2
    power_w: tuple[float, ...]  #: (k,) watts at those points, not decreasing

    def __post_init__(self) -> None:
        points, watts = self.utilisation, self.power_w
        if len(points) != len(watts) or len(points) < 2 or points[0] != 0.0 or points[-1] != 1.0:
            raise DomainError("a CPU power model needs one power per utilisation, from utilisation 0 to 1")
        ascending = all(before < after for before, after in pairwise(points))
        if not (ascending and all(before <= after for before, after in pairwise(watts)) and watts[0] >= 0):
            raise DomainError("a CPU power model needs ascending utilisations and powers that do not fall")

    @classmethod
    def between(cls, idle_w: float, peak_w: float) -> CpuPowerModel:
        """Return the straight line from idle to peak watts."""
        return cls((0.0, 1.0), (idle_w, peak_w))

    def at(self, utilisation: float) -> float:
        """Return the power at a utilisation, watts; readings slightly outside 0..1 are clamped."""
        share = min(max(utilisation, 0.0), 1.0)
        upper = min(bisect_right(self.utilisation, share), len(self.utilisation) - 1)
        (x0, x1), (y0, y1) = self.utilisation[upper - 1 : upper + 1], self.power_w[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
