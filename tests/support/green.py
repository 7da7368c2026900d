"""What GREEN remembers of jobs, by their ids."""

from __future__ import annotations

from itertools import compress

from services.core.domain.ids import JobId
from services.core.policies.green.memory import GreenMemory


def lower_of(memory: GreenMemory) -> set[JobId]:
    """Return the jobs that have left the upper queue."""
    return set(compress(memory.rank, memory.lower))


def gangs_of(memory: GreenMemory) -> dict[JobId, int]:
    """Return the size each job had or was to have."""
    return dict(zip(memory.rank, memory.gangs, strict=True))
