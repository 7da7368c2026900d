"""How long jobs still need: as predicted, or by their own progress; unknown until they report some.

A prediction of 0 counts as none: that is what is predicted for a group that was never seen, and for a job that has
outlived its prediction.
"""

from dataclasses import dataclass

import numpy as np

from services.core.cycle.snapshot import JobTable
from services.core.domain.arrays import Floats

REPORTED = 1e-3  #: From this share of its work on, a job's own progress says how long it is
ALL_BUT_DONE = 0.999


@dataclass(frozen=True)
class Left:
    """Remaining and whole lengths at the smallest gang and the default power limit, seconds; NaN where unknown."""

    left_s: Floats  #: (n_jobs,) what each job still needs
    whole_s: Floats  #: (n_jobs,) the length of all its work


def left_of(jobs: JobTable, pace: Floats, factors: Floats | None = None) -> Left:
    """Return what all jobs still need.

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
