"""What a recipe is, and the columns every recipe fills the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import RawJobs
from services.simulator.workload import Gates, JobProfile, Workload


@dataclass(frozen=True)
class Recipe:
    """A way to turn the jobs of a trace into jobs that behave.

    Attributes:
        name, description: For people.
        make: Of jobs and a seed, the workload; equal input, equal workload.
    """

    name: str
    description: str
    make: Callable[[RawJobs, int], Workload]


def workload(
    raw: RawJobs,
    profiles: tuple[JobProfile, ...],
    profile: Ints,
    work_s: Floats,
    requested: Ints,
    *,
    max_gpus: int | None,
    notes: tuple[str, ...],
) -> Workload:
    """Return a workload; jobs are elastic from 1 to ``max_gpus`` (or what was asked for), rigid where that is None."""
    ones = np.ones(len(raw), dtype=np.int64)
    return Workload(
        ids=raw.ids,
        tenants=tuple(tenant or "trace" for tenant in raw.tenants),
        submitted_s=raw.submitted_s,
        work_s=work_s,
        requested_gpus=requested,
        min_gpus=requested if max_gpus is None else ones,
        max_gpus=requested if max_gpus is None else np.maximum(requested, max_gpus),
        step_gpus=ones,
        profile=profile,
        profiles=profiles,
        notes=notes,
        gates=Gates(raw.array, raw.max_running, raw.after) if raw.max_running or any(raw.after) else None,
    )


def reference_work_s(raw: RawJobs, profiles: tuple[JobProfile, ...], profile: Ints, gpus: Ints, board: str) -> Floats:
    """Return what each job is in seconds at speed 1, having run for its duration on ``gpus`` of one node; (n_jobs,)."""
    work_s = np.empty(len(raw))
    for index, each in enumerate(profiles):
        rows = np.flatnonzero(profile == index)
        truth = each.truth(board)
        work_s[rows] = raw.duration_s[rows] * (1.0 if truth is None else truth.speed_at(gpus[rows]))
    return work_s
