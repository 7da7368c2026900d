"""What Pollux remembers between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.core.domain.ids import JobId
from services.core.policies.memory import dumped, loaded


@dataclass(frozen=True)
class PolluxMemory:
    """About the jobs that were live at the last active round and no others.

    Attributes:
        sizes: What it gave each job, in the order in which they are placed; jobs it gave nothing are not in it.
        restarts: How often it stopped each job.
        largest: The most GPUs each job has had, of jobs whose speed is not predicted.
    """

    sizes: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    restarts: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    largest: Mapping[JobId, int] = field(default_factory=dict[JobId, int])


def dump_memory(memory: PolluxMemory) -> dict[str, Any]:
    """Return the memory as JSON values."""
    return dumped(memory) | {"sizes": list(memory.sizes.items())}


def load_memory(stored: dict[str, Any]) -> PolluxMemory:
    """Return the memory that ``dump_memory`` wrote; what is missing is empty."""
    return loaded(PolluxMemory, stored | {"sizes": dict(stored.get("sizes", ()))})
