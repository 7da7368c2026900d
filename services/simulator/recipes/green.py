"""``green``: as the GREEN paper's simulator does, a job's category of duration decides which measured model it trains.

=============== ============================== ==========================================================
duration        models, equally likely         why
=============== ============================== ==========================================================
under 10 min    shufflenet, bert               small images; a fine-tuning of minutes
10 to 60 min    shufflenet, bert               the same
1 to 10 h       shufflenet, bert, deepspeech2  speech takes hours, as in Pollux' and Sia's workloads
10 h and more   deepspeech2, resnet50, gpt2    ImageNet and language models take days there
=============== ============================== ==========================================================

Each at one of three batches per GPU, equally likely. Draws come from the seed and the job's place in the trace alone.
The mapping follows the sizes these models have in Pollux' and Sia's workloads; it was written before any policy ran and
is not tuned. It has a consequence to know of: long jobs draw more power than short ones (ShuffleNet at small batches
draws a quarter of what ResNet-50 does), so power and length are correlated, as they are in the paper's list of models.

``requested_gpus`` is what policies that do not scale jobs use. The paper presets it to the size "where GREEN achieves
the best energy efficiency": that is 1 here wherever the trace does not say, where progress per joule is highest for
every profile but resnet50's, which on one node make 1 to 4 % more of a joule at two GPUs. Sizes 1 to 8 are open to
policies that scale.

``green-users`` instead lets users ask for gangs as they do in Microsoft's Philly trace, by category of duration, and
takes the trace's duration for that gang's: what a cluster looks like whose users choose for themselves.

``green-fast-links`` is ``green`` with the speed-ups of the nodes with the fastest links on any board;
``green-waiting-5`` and ``green-waiting-30`` are ``green`` with boards that wait for each other drawing 5 and 30 % of
their dynamic range. Their jobs cannot tune their batch.
"""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Ints
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.adaptive import tuning_profile
from services.simulator.recipes.measured import REFERENCE_GPU, Assumed, batches_of, profile
from services.simulator.recipes.recipe import Recipe, reference_work_s, workload
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
PHILLY_SIZES = (1, 2, 4, 8)
PHILLY_SHARES = (
    (0.9307, 0.0452, 0.0127, 0.0114),
    (0.9854, 0.0006, 0.0067, 0.0073),
    (0.9278, 0.0057, 0.0346, 0.0319),
    (0.5798, 0.0520, 0.1699, 0.1983),
)
"""Shares of gangs of 1, 2, 4 and 8 GPUs in the Philly trace by category of duration; wider ones count as 8."""


def green(raw: RawJobs, seed: int) -> Workload:
    """Return the jobs with measured models by duration; see the module."""
    return _make(raw, seed, "green")


def green_users(raw: RawJobs, seed: int) -> Workload:
    """Return the same with gangs as users of Philly asked for, where the trace does not say."""
    return _make(raw, seed, "green-users", users=True)


def green_assuming(name: str, assumed: Assumed) -> Recipe:
    """Return the recipe ``green`` under other assumptions; its jobs keep their batch."""
    words = "GPUs of a gang on links as fast as an A100 node's"
    if not assumed.fast_links:
        words = f"GPUs that wait drawing {100 * assumed.waiting_fraction:g} % of their range"
    return Recipe(name, f"`green` with {words}", lambda raw, seed: _make(raw, seed, name, assumed=assumed))


def _make(raw: RawJobs, seed: int, name: str, *, users: bool = False, assumed: Assumed | None = None) -> Workload:
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("recipes 'green' need durations, which this trace does not state; use recipe 'sia'")
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
    asked = users_sizes(category, size_draw) if users else np.ones(len(raw), dtype=np.int64)
    requested = np.where(raw.gpus > 0, raw.gpus, asked)
    work_s = reference_work_s(raw, profiles, kind, requested, REFERENCE_GPU)
    note = f"models by duration (recipe {name}); power of RTX boards scaled from V100"
    return workload(raw, profiles, kind, work_s, requested, max_gpus=MAX_GPUS, notes=(note,))


def users_sizes(category: Ints, draw: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Ints:
    """Return gangs as users of Philly asked for, by category of duration and a draw of 0..1: (n_jobs,)."""
    sizes = np.array(PHILLY_SIZES, dtype=np.int64)
    upto = np.cumsum(PHILLY_SHARES, axis=1)[category]
    return sizes[np.minimum((draw[:, None] >= upto).sum(axis=1), sizes.size - 1)]
