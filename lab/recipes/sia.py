"""``sia``: jobs that name what they train (Sia's and Pollux' workloads).

Work is the samples that application needs until trained at the batch size asked for; the gang keeps the measured batch
per GPU nearest to the one it asked for, which fixes its speed. Sizes are open up to 64 GPUs.
"""

from __future__ import annotations

import numpy as np

from lab.recipes.measured import SPEED_OF, batches_of, samples_to_train, speeds, tuning_profile
from services.core.domain.arrays import Ints
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.recipe import workload
from services.simulator.workload import Workload

SIA_MAX_GPUS = 64
SIA_MODELS = {"cifar10": "shufflenet", "imagenet": "resnet50"}
"""Whose power stands for an application that has no model of its own name."""


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
