"""What GREEN remembers of jobs, by their ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import compress

import numpy as np

from services.core.domain.ids import JobId
from services.core.policies.green.memory import AHEAD, BEHIND, GreenMemory


def lower_of(memory: GreenMemory) -> set[JobId]:
    """Return the jobs that have left the upper queue."""
    return set(compress(memory.jobs, memory.lower.tolist()))


def gangs_of(memory: GreenMemory) -> dict[JobId, int]:
    """Return the size each job had or was to have."""
    return dict(zip(memory.jobs, memory.gangs.tolist(), strict=True))


def a_memory(
    ids: Iterable[str],
    *,
    ahead: int = 0,
    lower: Collection[str] = (),
    gangs: Mapping[str, int] | None = None,
    held: Collection[str] = (),
) -> GreenMemory:
    """Return the memory of an active round that ranked these jobs so, at one GPU each unless said."""
    jobs = tuple(map(JobId, ids))
    return GreenMemory(
        jobs=jobs,
        queue=np.where(np.arange(len(jobs)) < ahead, AHEAD, BEHIND),
        key=np.arange(len(jobs), dtype=np.float64),
        submitted_s=np.zeros(len(jobs)),
        gangs=np.array([(gangs or {}).get(job_id, 1) for job_id in jobs], dtype=np.int64),
        lower=np.array([job_id in lower for job_id in jobs], dtype=np.bool_),
        held=np.array([job_id in held for job_id in jobs], dtype=np.bool_) if held else None,
    )


def held_by(memory: GreenMemory) -> set[JobId]:
    """Return the jobs that wait for greener hours."""
    return set() if memory.held is None else set(compress(memory.jobs, memory.held.tolist()))
