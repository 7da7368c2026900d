"""What an hour of completion time is worth now, as power: ``w / c`` of the package's formula."""

from __future__ import annotations

from services.core.cycle.grids import JobCurves
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve

HALF_DAY_S = 43_200.0
GREENEST = 0.05
"""An hour greener than this share of the day's mean counts as one at it, so that nothing is worth everything."""


def hour_w(curves: JobCurves, now_s: float, hour_wh: float) -> float | Floats:
    """Return how many watts more a gang may draw, in exchange for no delay: (n_jobs,) or one number for all.

    Args:
        curves: What the jobs draw by.
        now_s: UTC seconds.
        hour_wh: As ``JointConfig.hour_wh``.
    """
    return curves.each(lambda curve: hour_wh * _mean(curve, now_s) / _now(curve, now_s))


def hour_g(curve: CarbonCurve, now_s: float, hour_wh: float) -> float:
    """Return ``w``, gCO2 per hour."""
    return hour_wh / 1000.0 * _mean(curve, now_s)


def _mean(curve: CarbonCurve, now_s: float) -> float:
    """Return the mean of the day around now, as far as it is known, gCO2/kWh."""
    since_s, until_s = max(curve.start_s, now_s - HALF_DAY_S), min(curve.end_s, now_s + HALF_DAY_S)
    mean = curve.mean(since_s, until_s) if since_s < until_s else curve.at(now_s)
    return mean if mean > 0 else 1.0


def _now(curve: CarbonCurve, now_s: float) -> float:
    return max(curve.at(now_s), GREENEST * _mean(curve, now_s))
