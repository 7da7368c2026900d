"""Recipes that add little to what a trace states: ``plain``, ``measured`` and ``sia``.

``plain``: rigid gangs as the trace has them (1 where it does not say), which is all that is known of a site's own past.
Power is the median share of the dynamic range over the measured models and batches.

``measured``: the same, with each job's own mean power where its energy was measured (rounded to 5 W so that jobs share
profiles); what the hosts drew is in it, so no host power is added. A whole GPU would have drawn 7/2 of what a
job on a 2g slice drew.

``sia``: jobs that name what they train (Sia's and Pollux' workloads). Work is the samples that application needs until
trained at the batch size asked for; the gang keeps the measured batch per GPU nearest to the one it asked for, which
fixes its speed. Sizes are open up to 64 GPUs.
"""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Ints
from services.core.domain.mig import WHOLE
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.adaptive import tuning_profile
from services.simulator.recipes.measured import (
    SPEED_OF,
    batches_of,
    flat_profile,
    lossless,
    median_fraction,
    samples_to_train,
    speeds,
)
from services.simulator.recipes.recipe import workload
from services.simulator.workload import ANY_MODEL, JobProfile, Workload

BIN_W = 5.0
SIA_MAX_GPUS = 64
SIA_MODELS = {"cifar10": "shufflenet", "imagenet": "resnet50"}
"""Whose power stands for an application that has no model of its own name."""


def plain(raw: RawJobs, seed: int) -> Workload:
    """Return rigid jobs of one power; ``seed`` draws nothing."""
    gpus = _gangs(raw)
    typical = flat_profile("unknown model", median_fraction())
    note = f"recipe plain: every job draws {100 * median_fraction():.0f} % of its board's dynamic range"
    kind = np.zeros(len(raw), dtype=np.int64)
    return workload(raw, (typical,), kind, raw.duration_s * gpus, gpus, max_gpus=None, notes=(note,))


def measured(raw: RawJobs, seed: int) -> Workload:
    """Return rigid jobs of the power each was measured at; ``seed`` draws nothing."""
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
        raise TraceFormatError("this recipe needs durations, which the trace does not state; use recipe 'sia'")
    return np.where(raw.gpus > 0, raw.gpus, 1)


def sia(raw: RawJobs, seed: int) -> Workload:
    """Return jobs of the applications they name; ``seed`` draws nothing."""
    known = set(SPEED_OF.values())
    unknown = sorted({name for name in raw.application if name not in known})
    if unknown:
        name = unknown[0] or "an unnamed model"
        raise TraceFormatError(f"recipe 'sia' knows {', '.join(sorted(known))}, not {name!r}")
    kinds: dict[tuple[str, int, int], int] = {}
    kind = np.zeros(len(raw), dtype=np.int64)
    work_s = np.zeros(len(raw))
    for row, application in enumerate(raw.application):
        model = SIA_MODELS.get(application, application)
        per_gpu = float(raw.batch_size[row]) / max(int(raw.gpus[row]), 1)
        batch = min(batches_of(model), key=lambda size: abs(np.log(size / per_gpu)))
        total = int(raw.batch_size[row])
        kind[row] = kinds.setdefault((model, batch, total), len(kinds))
        speed = speeds()[(application, "rtx", batch)][("one", 1)]
        work_s[row] = samples_to_train(application, total) / speed
    profiles = tuple(tuning_profile(*each) for each in kinds)
    note = "recipe sia: work is the samples each application needs until trained, at the nearest measured batch per GPU"
    return workload(raw, profiles, kind, work_s, _gangs_named(raw), max_gpus=SIA_MAX_GPUS, notes=(note,))


def _gangs_named(raw: RawJobs) -> Ints:
    return np.maximum(raw.gpus, 1)
