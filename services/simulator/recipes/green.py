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

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.measured import BATCHES, KINDS, REFERENCE_GPU, tuning_profile
from services.simulator.recipes.recipe import reference_work_s, workload
from services.simulator.workload import Workload

EDGES_S = (600.0, 3_600.0, 36_000.0)
CATEGORIES: tuple[tuple[str, ...], ...] = (
    ("shufflenet", "bert"),
    ("shufflenet", "bert"),
    ("shufflenet", "bert", "deepspeech2"),
    ("deepspeech2", "resnet50", "gpt2"),
)
MODELS = tuple(BATCHES)
NOTE = "models by duration (recipe {}); power of RTX boards scaled from V100"
MAX_GPUS = 8


def green(raw: RawJobs, seed: int) -> Workload:
    """Return the jobs with measured models chosen by duration; see the module."""
    kind, _ = kinds(raw, seed)
    profiles = tuple(tuning_profile(*each) for each in KINDS)
    requested = np.where(raw.gpus > 0, raw.gpus, 1)
    work_s = reference_work_s(raw, profiles, kind, requested, REFERENCE_GPU)
    return workload(raw, profiles, kind, work_s, requested, max_gpus=MAX_GPUS, notes=(NOTE.format("green"),))


def kinds(raw: RawJobs, seed: int) -> tuple[Ints, Floats]:
    """Return each job's index in ``KINDS``, and a draw of 0..1 that is still free; (n_jobs,) each."""
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("recipes 'green' need durations, which this trace does not state")
    category = np.digitize(raw.duration_s, EDGES_S)
    model_draw, batch_draw, free_draw = np.random.default_rng(seed).random((3, len(raw)))
    kind = np.zeros(len(raw), dtype=np.int64)
    for index, models in enumerate(CATEGORIES):
        rows = np.flatnonzero(category == index)
        model = np.array([MODELS.index(name) for name in models])[(model_draw[rows] * len(models)).astype(np.int64)]
        kind[rows] = 3 * model + (batch_draw[rows] * 3).astype(np.int64)
    return kind, free_draw
