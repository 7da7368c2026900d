"""What a recipe is, and the columns that every recipe fills in the same way."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.simulator.raw import RawJobs
from services.simulator.workload import Gates, JobProfile, Workload


@dataclass(frozen=True)
class Recipe:
    """A way to give the jobs of a trace a behaviour.

    Attributes:
        name, description: For people.
        make: Makes the workload from jobs and a seed; equal inputs give equal workloads.
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
    """Return a workload; jobs are elastic from 1 to ``max_gpus`` (or what was asked for), rigid if that is None.

    ``work_s`` counts the time of a job on a slice as if it had run on a GPU; a slice gets less work done in that time.
    """
    most = requested if max_gpus is None else np.maximum(requested, max_gpus)
    if raw.slice_sevenths is not None and raw.ran_sevenths is not None:
        on_slices = np.flatnonzero(raw.slice_sevenths)
        most = np.where(raw.slice_sevenths > 0, 1, most)
        ran = [profiles[profile[row]].slice_speed(int(raw.ran_sevenths[row])) for row in on_slices.tolist()]
        work_s = work_s.copy()
        work_s[on_slices] *= np.array(ran)
        notes = (*notes, _of_slices(raw.slice_sevenths, profiles, profile))
    ones = np.ones(len(raw), dtype=np.int64)
    return Workload(
        ids=raw.ids,
        tenants=tuple(tenant or "trace" for tenant in raw.tenants),
        submitted_s=raw.submitted_s,
        work_s=work_s,
        requested_gpus=requested,
        min_gpus=requested if max_gpus is None else ones,
        max_gpus=most,
        step_gpus=ones,
        profile=profile,
        profiles=profiles,
        notes=notes,
        slice_sevenths=raw.slice_sevenths,
        gates=Gates(raw.array, raw.max_running, raw.after) if raw.max_running or any(raw.after) else None,
    )


def _of_slices(sevenths: Ints, profiles: tuple[JobProfile, ...], profile: Ints) -> str:
    """Return a sentence that says how fast jobs on slices are assumed to be."""
    on_slices: list[int] = np.flatnonzero(sevenths).tolist()
    measured = sum(int(sevenths[row]) in profiles[profile[row]].slice_speeds for row in on_slices)
    rest = len(on_slices) - measured
    said = [f"{measured} as fast as measured on an A100's slices"] if measured else []
    said += [f"{rest} by the slice's share of the compute (assumed: 2g is 2/7 of a GPU)"] if rest else []
    return f"speed on slices, jobs: {', '.join(said)}; energy above idle is in proportion to the work"


def reference_work_s(raw: RawJobs, profiles: tuple[JobProfile, ...], profile: Ints, gpus: Ints, board: str) -> Floats:
    """Return each job's work in seconds at speed 1, given its duration on ``gpus`` of one node; (n_jobs,)."""
    work_s = np.empty(len(raw))
    for index, each in enumerate(profiles):
        rows = np.flatnonzero(profile == index)
        truth = each.truth(board)
        work_s[rows] = raw.duration_s[rows] * (1.0 if truth is None else truth.speed_at(gpus[rows]))
    return work_s
