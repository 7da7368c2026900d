"""What PowerFlow remembers between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.core.domain.ids import JobId


@dataclass(frozen=True)
class PowerflowMemory:
    """Decisions of the last rounds; entries of ended jobs are dropped at active rounds.

    Attributes:
        targets: Sizes the last active round gave, by job: what a job that was stopped waits for.
        measured: Gangs being measured at every control value, and when that will certainly be over, UTC seconds.
        profiled: The sizes at which each job was measured.
        correction: Ratio of the cluster's measured power to the models'.
    """

    targets: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    measured: Mapping[JobId, float] = field(default_factory=dict[JobId, float])
    profiled: Mapping[JobId, tuple[int, ...]] = field(default_factory=dict[JobId, tuple[int, ...]])
    correction: float = 1.0


def dump_memory(memory: PowerflowMemory) -> dict[str, Any]:
    """Return the memory as JSON values."""
    return {
        "targets": dict(memory.targets),
        "measured": dict(memory.measured),
        "profiled": {job_id: list(sizes) for job_id, sizes in memory.profiled.items()},
        "correction": memory.correction,
    }


def load_memory(stored: dict[str, Any]) -> PowerflowMemory:
    """Return the memory that ``dump_memory`` wrote; missing parts are empty."""
    return PowerflowMemory(
        targets={JobId(job_id): int(gpus) for job_id, gpus in stored.get("targets", {}).items()},
        measured={JobId(job_id): float(until_s) for job_id, until_s in stored.get("measured", {}).items()},
        profiled={JobId(job_id): tuple(map(int, sizes)) for job_id, sizes in stored.get("profiled", {}).items()},
        correction=float(stored.get("correction", 1.0)),
    )
