"""Recipes that add little to what a trace states: ``plain`` and ``measured``.

``plain``: rigid gangs of the trace's sizes (1 if it does not say), which is all that is known of a site's own past.
Power is the median share of the dynamic range over the measured models and batches.

``measured``: the same, with each job's own mean power if its energy was measured (rounded to 5 W so that jobs share
profiles); this includes what the hosts drew, so no host power is added. A job on a 2g slice is assumed to draw 7/2 as
much on a whole GPU.
"""

import numpy as np

from services.core.domain.arrays import Ints
from services.core.domain.mig import WHOLE
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.measured import flat_profile, lossless, median_fraction
from services.simulator.recipes.recipe import workload
from services.simulator.workload import ANY_MODEL, JobProfile, Workload

BIN_W = 5.0


def plain(raw: RawJobs, seed: int) -> Workload:
    """Return rigid jobs of equal power; ``seed`` is not used."""
    gpus = _gangs(raw)
    typical = flat_profile("unknown model", median_fraction())
    note = f"recipe plain: every job draws {100 * median_fraction():.0f} % of its board's dynamic range"
    kind = np.zeros(len(raw), dtype=np.int64)
    return workload(raw, (typical,), kind, raw.duration_s * gpus, gpus, max_gpus=None, notes=(note,))


def measured(raw: RawJobs, seed: int) -> Workload:
    """Return rigid jobs, each at its measured power; ``seed`` is not used."""
    gpus = _gangs(raw)
    power_w = raw.energy_j / (raw.duration_s * gpus)
    if raw.ran_sevenths is not None:
        power_w = np.where(raw.ran_sevenths > 0, power_w * WHOLE / np.maximum(raw.ran_sevenths, 1), power_w)
    power_w = np.round(power_w / BIN_W) * BIN_W
    known = np.isfinite(power_w) & (power_w > 0)
    levels = np.unique(power_w[known])
    profiles = (flat_profile("unknown model", median_fraction()), *(_of_power(level) for level in levels.tolist()))
    kind = np.zeros(len(raw), dtype=np.int64)
    kind[known] = 1 + np.searchsorted(levels, power_w[known])
    note = f"recipe measured: {int(known.sum())} of {len(raw)} jobs have a measured power"
    return workload(raw, profiles, kind, raw.duration_s * gpus, gpus, max_gpus=None, notes=(note,))


def _of_power(power_w: float) -> JobProfile:
    return JobProfile(f"{power_w:.0f} W", {ANY_MODEL: lossless(power_w)})


def _gangs(raw: RawJobs) -> Ints:
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("this recipe needs durations, which the trace does not state")
    return np.where(raw.gpus > 0, raw.gpus, 1)
