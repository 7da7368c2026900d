"""What carbon-aware policies ask of a curve, for many jobs at once."""

from __future__ import annotations

import numpy as np

from services.core.cycle.snapshot import Floats
from services.core.domain.carbon import CarbonCurve


def steps_ahead(curve: CarbonCurve, start_s: float, end_s: float) -> tuple[Floats, Floats, Floats]:
    """Return the steps of the curve within ``[start_s, end_s)``, cut at both ends.

    Beyond the curve its first and last value go on.

    Returns:
        begins: (n,) UTC seconds; the first is ``start_s``.
        ends: (n,) UTC seconds; the last is ``end_s``.
        intensity: (n,) gCO2/kWh.
    """
    inside = curve.times_s[(curve.times_s > start_s) & (curve.times_s < end_s)]
    begins = np.append(start_s, inside)
    ends = np.append(inside, end_s)
    at = np.clip(np.searchsorted(curve.times_s, begins, side="right") - 1, 0, None)
    return begins, ends, curve.intensity_gco2_per_kwh[at]


def mean_over(curve: CarbonCurve, starts_s: Floats, length_s: float) -> Floats:
    """Return the mean intensity over ``[start, start + length_s)`` for each start, gCO2/kWh: (n,) to (n,)."""
    first, last = float(starts_s.min()), float(starts_s.max()) + length_s
    begins, ends, intensity = steps_ahead(curve, first, last)
    edges = np.append(begins, ends[-1])
    integral = np.append(0.0, np.cumsum(intensity * (ends - begins)))
    until: Floats = np.interp(starts_s + length_s, edges, integral)
    since: Floats = np.interp(starts_s, edges, integral)
    return (until - since) / length_s


def percentile(curve: CarbonCurve, start_s: float, end_s: float, percent: float) -> float:
    """Return the intensity below which the grid spends ``percent`` of the time of a window, gCO2/kWh."""
    begins, ends, intensity = steps_ahead(curve, start_s, end_s)
    order = np.argsort(intensity, kind="stable")
    spent: Floats = np.cumsum((ends - begins)[order])
    at = int(np.searchsorted(spent, percent / 100.0 * float(spent[-1])))
    return float(intensity[order][min(at, order.size - 1)])
