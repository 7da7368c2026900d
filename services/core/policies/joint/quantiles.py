"""How certain ``joint`` wants to be: quantiles of predicted lengths and of the intensity ahead, where those are known.

- A predicted length with a standard deviation is taken as lognormal, with the prediction as its mean. With a standard
  deviation of ``v`` times the mean, its quantile ``q`` is ``exp(z s - s^2 / 2)`` times the mean, with
  ``s^2 = ln(1 + v^2)`` and ``z`` the standard normal's.
- A forecast with deciles is taken as two half-normals that meet at its middle. The distance of ``q`` from the middle is
  that of the decile on its side, scaled by ``z`` over the decile's own ``z``.

Without a standard deviation or deciles, the prediction itself counts.
"""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve, CarbonOutlook

MIDDLE = 0.5
_NORMAL = NormalDist()
_DECILE = _NORMAL.inv_cdf(0.9)


def length_factors(snapshot: Snapshot, quantile: float | None) -> Floats:
    """Return the ratio of this quantile of each job's predicted length to the prediction: (n_jobs,).

    Args:
        quantile: Which quantile; None: the prediction itself.
    """
    factors = np.ones(len(snapshot.jobs))
    if quantile is None or not snapshot.length_spreads:
        return factors
    z = _NORMAL.inv_cdf(quantile)
    for job_id, spread in snapshot.length_spreads.items():
        if (job := snapshot.jobs.index.get(job_id)) is not None:
            variance = math.log1p(spread**2)
            factors[job] = math.exp(z * math.sqrt(variance) - variance / 2)
    return factors


def at_quantile(snapshot: Snapshot, quantile: float) -> Snapshot:
    """Return the snapshot with the intensity ahead taken at this quantile of its forecasts."""
    if quantile == MIDDLE or all(outlook.low is None or outlook.high is None for outlook in snapshot.outlooks):
        return snapshot
    return snapshot.again(outlooks=tuple(_at(outlook, quantile) for outlook in snapshot.outlooks))


def _at(outlook: CarbonOutlook, quantile: float) -> CarbonOutlook:
    low, high, curve = outlook.low, outlook.high, outlook.curve
    if low is None or high is None:
        return outlook
    z, middle = _NORMAL.inv_cdf(quantile) / _DECILE, curve.intensity_gco2_per_kwh
    shifted = middle + z * ((high - middle) if z > 0 else (middle - low))
    return replace(outlook, curve=CarbonCurve(curve.times_s, shifted, curve.end_s, curve.estimated))
