"""``a-srpt``: jobs that recur, of nine models in parallel layouts, as A-SRPT's evaluation has them.

The job groups of Alibaba's 2020 trace are not to be had. They are generated over the trace's arrivals and lengths:

- **Recurrence.** Groups have 1 to 215 jobs, a group of s in proportion to 1/s^2: 65 % of the jobs are then in groups of
  five and more, as the paper says of the trace. 758,223 jobs in random order; the first 80 %, on which the paper
  trains, are the history that predictors know beforehand, the workload is what follows.
- **Users.** Each group is of one of 1,300 users, about as many as the trace has.
- **Lengths.** Each group has the length of one of the trace's jobs. Three quarters of the groups repeat it exactly, the
  others run for 0 to 2 times as long, evenly: then about 60 % of the jobs can be predicted exactly, as in the paper.
- **GPUs.** 70 % of the groups take one GPU ("over 70 %", the paper says; ``a-srpt-80`` to ``a-srpt-0`` have other
  shares, for its Fig. 7). The others ask for gangs as users of Microsoft's Philly trace do.
- **Models.** Of the paper's nine any, all equally likely; for one GPU those five that fit one. Layouts are the
  planner's, of data and pipeline parallelism alone, as in the paper. An iteration takes what eq. 7 says; the number of
  iterations is the length over ``alpha~min`` on the paper's network, so that lengths hold for the best placement.

Every constant was set before any policy ran. Jobs start without delay, and draw the median power of the measured
models.

Source: A-SRPT sections IV-C, 3 and V-A, 1-b.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from lab.placement.architectures import ARCHITECTURES
from lab.placement.planner import plan_layout
from services.core.cycle.graph_placing import extremes_s, mapper_of
from services.core.domain.arrays import Floats, Ints
from services.core.domain.gpus import GPU_MODELS
from services.core.parallel.iteration import Network
from services.core.profiles.recurrence import Runs
from services.simulator.raw import RawJobs, TraceFormatError
from services.simulator.recipes.measured import HOST_W_PER_GPU, REFERENCE_GPU, median_fraction, power_w
from services.simulator.workload import ANY_MODEL, Behaviour, JobProfile, Recurrence, Workload

TRACE_JOBS, HISTORY_JOBS = 758_223, 606_578
LARGEST_GROUP = 215
"""The harmonic number of it is 5.95, that of 4 is 2.08: 65 % of jobs are in groups of five and more."""
USERS = 1_300
STEADY = 0.75
SINGLE = 0.7
ON_ONE_GPU = ("vgg19", "resnet152", "inception-v3", "bert-large", "xlnet-large")
GANGS = {2: 1_818, 4: 1_870, 8: 1_643, 16: 206, 32: 74, 64: 6, 128: 3}
"""Jobs of the Philly trace by GPUs; 12 counts as 16, and 24 as 32."""
KINDS = tuple((model, 1) for model in ON_ONE_GPU) + tuple((model, gpus) for gpus in GANGS for model in ARCHITECTURES)


def recurrent(single: float = SINGLE) -> Callable[[RawJobs, int], Workload]:
    """Return the recipe with this share of groups on one GPU; see the module."""
    return lambda raw, seed: _make(raw, seed, single)


def _make(raw: RawJobs, seed: int, single: float) -> Workload:
    if np.isnan(raw.duration_s).any():
        raise TraceFormatError("recipes 'a-srpt' need durations, which this trace does not state; use recipe 'sia'")
    if raw.slice_sevenths is not None:
        raise TraceFormatError("recipes 'a-srpt' choose the GPUs of all jobs, and this trace has jobs on slices")
    rng = np.random.default_rng(seed)
    group = _groups(max(TRACE_JOBS, HISTORY_JOBS + len(raw)), rng)[: HISTORY_JOBS + len(raw)]
    groups = int(group.max()) + 1
    user = rng.integers(0, USERS, groups)
    length_s = rng.choice(raw.duration_s, groups)
    varies = rng.random(groups) >= STEADY
    alone = rng.random(groups) < single
    gangs, counts = np.array(list(GANGS)), np.array(list(GANGS.values()))
    first = {gpus: len(ON_ONE_GPU) + at * len(ARCHITECTURES) for at, gpus in enumerate(GANGS)}
    wide = np.array([first[gpus] for gpus in rng.choice(gangs, groups, p=counts / counts.sum()).tolist()])
    model = rng.random(groups)
    kind = np.where(alone, model * len(ON_ONE_GPU), wide + np.floor(model * len(ARCHITECTURES))).astype(np.int64)
    drift = np.where(varies[group], rng.uniform(0.0, 2.0, group.size), 1.0)
    profiles = tuple(profile_of(*each) for each in KINDS)
    least_s = np.array([_least_s(*each) for each in KINDS])
    iterations = np.maximum(np.round(length_s[group] * drift / least_s[kind[group]]), 1.0)
    return _workload(raw, profiles, kind[group], user[group], group, iterations, single)


def _groups(jobs: int, rng: np.random.Generator) -> Ints:
    """Return the group of each of at least this many jobs, in random order."""
    sizes = np.arange(1, LARGEST_GROUP + 1)
    share = 1.0 / sizes**2
    mean = float((sizes * share).sum() / share.sum())
    drawn = rng.choice(sizes, int(1.2 * jobs / mean), p=share / share.sum())
    drawn = drawn[: int(np.searchsorted(np.cumsum(drawn), jobs)) + 1]
    return rng.permutation(np.repeat(np.arange(drawn.size), drawn)).astype(np.int64)


def _workload(
    raw: RawJobs,
    profiles: tuple[JobProfile, ...],
    kind: Ints,
    user: Ints,
    group: Ints,
    iterations: Floats,
    single: float,
) -> Workload:
    past, now = slice(0, HISTORY_JOBS), slice(HISTORY_JOBS, None)
    gpus = np.array([each for _, each in KINDS], dtype=np.int64)[kind[now]]
    unit_s = np.array([profile.iteration_s for profile in profiles])[kind[now]]
    shares = (
        f"{100 * float((gpus == 1).mean()):.0f} % of the jobs take one GPU, all together {gpus.mean():.2f} on average"
    )
    return Workload(
        ids=raw.ids,
        tenants=tuple(f"user-{each:04}" for each in user[now].tolist()),
        submitted_s=raw.submitted_s,
        work_s=iterations[now] * unit_s,
        requested_gpus=gpus,
        min_gpus=gpus,
        max_gpus=gpus,
        step_gpus=np.ones_like(gpus),
        profile=kind[now],
        profiles=profiles,
        recurrence=Recurrence(group[now], user[now], Runs(group[past], user[past], iterations[past])),
        notes=(f"recurring jobs of nine models, {100 * single:.0f} % of groups on one GPU: {shares}",),
    )


@cache
def profile_of(model: str, gpus: int) -> JobProfile:
    """Return a model in its layout on a number of GPUs; speed 1 is all of them on one node, however wide."""
    graph = plan_layout(model, gpus, tensor_parallel=1)
    size = np.array([gpus], dtype=np.int64)
    boards = {board: power_w(median_fraction(), board) for board in GPU_MODELS}
    true = {board: Behaviour(size, np.ones(1), np.array([watts])) for board, watts in boards.items()}
    true[ANY_MODEL] = true[REFERENCE_GPU]
    whole_s = mapper_of(graph, gpus, Network()).model.whole_s
    return JobProfile(
        f"{model} on {gpus}", true, host_power_w=HOST_W_PER_GPU, restart_s=0.0, graph=graph, iteration_s=whole_s
    )


def _least_s(model: str, gpus: int) -> float:
    return extremes_s(mapper_of(profile_of(model, gpus).graph, gpus, Network()))[0]
