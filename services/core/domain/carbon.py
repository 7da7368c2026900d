"""Carbon intensity over time: a step curve and what a policy may ask of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.core.domain.errors import DomainError
from services.core.domain.signal import Signal


@dataclass(frozen=True)
class CarbonCurve:
    """Intensity as a step function: ``intensity_gco2_per_kwh[i]`` holds from ``times_s[i]`` until ``times_s[i + 1]``.

    Attributes:
        times_s: (n,) UTC seconds, strictly increasing, n >= 1.
        intensity_gco2_per_kwh: (n,) finite; marginal signals may be negative.
        end_s: When the last value stops holding.
    """

    times_s: NDArray[np.float64]
    intensity_gco2_per_kwh: NDArray[np.float64]
    end_s: float

    def __post_init__(self) -> None:
        times, values = self.times_s, self.intensity_gco2_per_kwh
        if times.ndim != 1 or times.shape != values.shape or times.size == 0:
            raise DomainError("a carbon curve needs one intensity per time and at least one of both")
        if not (np.all(np.isfinite(values)) and np.all(np.diff(times) > 0) and self.end_s > times[-1]):
            raise DomainError("a carbon curve needs finite intensities at strictly increasing times")

    def at(self, time_s: float) -> float:
        """Return the intensity in force at ``time_s``; the first and the last value extend beyond the ends."""
        index = int(np.searchsorted(self.times_s, time_s, side="right")) - 1
        return float(self.intensity_gco2_per_kwh[max(index, 0)])

    def mean(self, start_s: float, end_s: float) -> float:
        """Return the time-weighted mean over ``[start_s, end_s)``, clipped to the curve; gCO2/kWh."""
        edges = np.clip(np.append(self.times_s, self.end_s), start_s, end_s)
        weights = np.diff(edges)
        total = weights.sum()
        return float(weights @ self.intensity_gco2_per_kwh / total) if total > 0 else self.at(start_s)


@dataclass(frozen=True)
class CarbonOutlook:
    """What is known of the grid at the time of a decision.

    Attributes:
        zone: The grid zone the cluster draws from.
        signal: What the intensities measure.
        curve: Recent history and forecast in one curve.
        stale: The freshest value is past its age: decisions fall back to it and say so.
    """

    zone: str
    signal: Signal
    curve: CarbonCurve
    stale: bool = False
