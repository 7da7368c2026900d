"""``green``: as in the GREEN paper's simulator, a job's duration category decides which measured model it trains.

=============== ============================== ==========================================================
duration        models, equally likely         why
=============== ============================== ==========================================================
under 10 min    shufflenet, bert               small images; fine-tuning for minutes
10 to 60 min    shufflenet, bert               the same
1 to 10 h       shufflenet, bert, deepspeech2  speech takes hours, as in Pollux's and Sia's workloads
10 h and more   deepspeech2, resnet50, gpt2    ImageNet and language models take days there
=============== ============================== ==========================================================

Each runs at one of three batches per GPU, equally likely. Draws depend only on the seed and the job's place in the
trace. The mapping follows these models' sizes in Pollux's and Sia's workloads; it was written before any policy ran and
is not tuned. One consequence should be known: long jobs draw more power than short ones (ShuffleNet at small batches
draws a quarter of what ResNet-50 does), so power and length are correlated, as they are in the paper's list of models.

``requested_gpus`` is the size used by policies that do not scale jobs. The paper presets it to the size "where GREEN
achieves the best energy efficiency": that is 1 here wherever the trace does not say. There, progress per joule is
highest for every profile but resnet50's, which on one node get 1 to 4 % more out of a joule at two GPUs. Sizes 1 to 8
are open to policies that scale.
"""

from collections.abc import Callable

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.measured import REFERENCE_GPU, Assumed, batches_of, profile, tuning_profile
from services.simulator.recipes.recipe import reference_work_s, workload
from services.simulator.workload import Workload

EDGES_S = (600.0, 3_600.0, 36_000.0)
CATEGORIES: tuple[tuple[str, ...], ...] = (
    ("shufflenet", "bert"),
    ("shufflenet", "bert"),
    ("shufflenet", "bert", "deepspeech2"),
    ("deepspeech2", "resnet50", "gpt2"),
)
MODELS = ("shufflenet", "bert", "deepspeech2", "resnet50", "gpt2")
MAX_GPUS = 8


def green(raw: RawJobs, seed: int) -> Workload:
    """Return the jobs with measured models chosen by duration; see the module."""
    return with_models(raw, seed, "green")


def with_models(
    raw: RawJobs,
    seed: int,
    name: str,
    *,
    asked_for: Callable[[Ints, Floats], Ints] | None = None,
    assumed: Assumed | None = None,
) -> Workload:
    """Return the jobs with measured models chosen by duration.

    Args:
        asked_for: The GPUs that jobs ask for if the trace does not say, from the duration category and a draw in 0..1;
            one by default.
        assumed: What the measured models leave open; if given, jobs keep their batch.
    """
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("recipes 'green' need durations, which this trace does not state")
    rng = np.random.default_rng(seed)
    kinds = [(model, batch) for model in MODELS for batch in batches_of(model)]
    profiles = tuple(
        tuning_profile(model, batch, batch) if assumed is None else profile(model, batch, assumed)
        for model, batch in kinds
    )
    category = np.digitize(raw.duration_s, EDGES_S)
    model_draw, batch_draw, size_draw = rng.random((3, len(raw)))
    kind = np.zeros(len(raw), dtype=np.int64)
    for index, models in enumerate(CATEGORIES):
        rows = np.flatnonzero(category == index)
        model = np.array([MODELS.index(name) for name in models])[(model_draw[rows] * len(models)).astype(np.int64)]
        kind[rows] = 3 * model + (batch_draw[rows] * 3).astype(np.int64)
    asked = np.ones(len(raw), dtype=np.int64) if asked_for is None else asked_for(category, size_draw)
    requested = np.where(raw.gpus > 0, raw.gpus, asked)
    work_s = reference_work_s(raw, profiles, kind, requested, REFERENCE_GPU)
    note = f"models by duration (recipe {name}); power of RTX boards scaled from V100"
    return workload(raw, profiles, kind, work_s, requested, max_gpus=MAX_GPUS, notes=(note,))
