"""``green`` under other assumptions (``services/simulator/recipes/green.py``).

``green-users`` instead lets users ask for gangs as they do in Microsoft's Philly trace, by category of duration, and
takes the trace's duration for that gang's: what a cluster looks like whose users choose for themselves.

``green-fast-links`` is ``green`` with the speed-ups of the nodes with the fastest links on any board;
``green-waiting-5`` and ``green-waiting-30`` are ``green`` with boards that wait for each other drawing 5 and 30 % of
their dynamic range. Their jobs cannot tune their batch.
"""

from __future__ import annotations

import numpy as np

from lab.recipes.measured import Assumed, profile, tuning_profile
from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import RawJobs
from services.simulator.recipes.green import EDGES_S, MAX_GPUS, NOTE, kinds
from services.simulator.recipes.measured import KINDS, REFERENCE_GPU
from services.simulator.recipes.recipe import Recipe, reference_work_s, workload
from services.simulator.workload import JobProfile, Workload

PHILLY_SIZES = (1, 2, 4, 8)
PHILLY_SHARES = (
    (0.9307, 0.0452, 0.0127, 0.0114),
    (0.9854, 0.0006, 0.0067, 0.0073),
    (0.9278, 0.0057, 0.0346, 0.0319),
    (0.5798, 0.0520, 0.1699, 0.1983),
)
"""Shares of gangs of 1, 2, 4 and 8 GPUs in the Philly trace by category of duration; wider ones count as 8."""


def green_users(raw: RawJobs, seed: int) -> Workload:
    """Return the same with gangs as users of Philly asked for, where the trace does not say."""
    kind, draw = kinds(raw, seed)
    asked = users_sizes(np.digitize(raw.duration_s, EDGES_S), draw)
    return _workload(raw, "green-users", kind, asked, tuple(tuning_profile(*each, each[1]) for each in KINDS))


def green_assuming(name: str, assumed: Assumed) -> Recipe:
    """Return the recipe ``green`` under other assumptions; its jobs keep their batch."""
    words = "GPUs of a gang on links as fast as an A100 node's"
    if not assumed.fast_links:
        words = f"GPUs that wait drawing {100 * assumed.waiting_fraction:g} % of their range"

    def make(raw: RawJobs, seed: int) -> Workload:
        kind, _ = kinds(raw, seed)
        return _workload(raw, name, kind, np.ones_like(kind), tuple(profile(*each, assumed) for each in KINDS))

    return Recipe(name, f"`green` with {words}", make)


def _workload(raw: RawJobs, name: str, kind: Ints, asked: Ints, profiles: tuple[JobProfile, ...]) -> Workload:
    requested = np.where(raw.gpus > 0, raw.gpus, asked)
    work_s = reference_work_s(raw, profiles, kind, requested, REFERENCE_GPU)
    return workload(raw, profiles, kind, work_s, requested, max_gpus=MAX_GPUS, notes=(NOTE.format(name),))


def users_sizes(category: Ints, draw: Floats) -> Ints:
    """Return gangs as users of Philly asked for, by category of duration and a draw of 0..1: (n_jobs,)."""
    sizes = np.array(PHILLY_SIZES, dtype=np.int64)
    upto = np.cumsum(PHILLY_SHARES, axis=1)[category]
    return sizes[np.minimum((draw[:, None] >= upto).sum(axis=1), sizes.size - 1)]
