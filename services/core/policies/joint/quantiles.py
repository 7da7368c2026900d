"""How certain ``joint`` wants to be: quantiles of predicted lengths and of the intensity ahead, where those are known.

- A predicted length with a standard deviation is taken as lognormal, with the prediction as its mean. With a standard
  deviation of ``v`` times the mean, its quantile ``q`` is ``exp(z s - s^2 / 2)`` times the mean, with
  ``s^2 = ln(1 + v^2)`` and ``z`` the standard normal's.
- A forecast with deciles is taken as two half-normals that meet at its middle. The distance of ``q`` from the middle is
  that of the decile on its side, scaled by ``z`` over the decile's own ``z``.

Without a standard deviation or deciles, the prediction itself counts.
"""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from services.core.cycle.snapshot import JobTable, Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve, CarbonOutlook

MIDDLE = 0.5
_NORMAL = NormalDist()
_DECILE = _NORMAL.inv_cdf(0.9)


def length_factors(snapshot: Snapshot, quantile: float | None) -> Floats:
    """Return the ratio of this quantile of each job's predicted length to the prediction: (n_jobs,)."""
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


REPORTED = 1e-3  #: From this share of its work on, a job's own progress says how long it is
ALL_BUT_DONE = 0.999


@dataclass(frozen=True)
class Left:
    """Remaining and whole lengths at the smallest gang and the default power limit, seconds; NaN where unknown."""

    left_s: Floats  #: (n_jobs,) what each job still needs
    whole_s: Floats  #: (n_jobs,) the length of all its work


def left_of(jobs: JobTable, pace: Floats, factors: Floats | None = None) -> Left:
    """Return what all jobs still need: as predicted, or by their own progress; unknown until they report some.

    A prediction of 0 counts as none: that is what is predicted for a group that was never seen, and for a job that has
    outlived its prediction.

    Args:
        pace: (n_jobs,) work of each job per GPU second held so far, in units of a smallest gang's at the default.
        factors: (n_jobs,) by which predicted whole lengths are multiplied (``quantiles.length_factors``); None: 1.
    """
    progress = np.clip(np.nan_to_num(jobs.progress, nan=0.0), 0.0, ALL_BUT_DONE)
    done_s = np.nan_to_num(jobs.attained_gpu_s, nan=0.0) * pace
    by_progress_s = np.where(progress > REPORTED, done_s / np.maximum(progress, REPORTED) * (1.0 - progress), np.nan)
    predicted_s = jobs.remaining_s if factors is None else _stretched(jobs, factors)
    left_s = np.where(predicted_s > 0, predicted_s, by_progress_s)
    return Left(left_s, left_s / (1.0 - progress))


def _stretched(jobs: JobTable, factors: Floats) -> Floats:
    """Return what is left of predicted lengths multiplied by these factors: (n_jobs,), seconds.

    What a job has done is known from its progress, or else taken to be the time for which it held its GPUs.
    """
    had_s = np.where(np.isnan(jobs.progress), jobs.attained_gpu_s / jobs.min_gpus, 0.0)
    return np.maximum((jobs.remaining_s + had_s) * factors - had_s, 0.0)
