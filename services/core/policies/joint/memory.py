"""What ``joint`` remembers between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from services.core.domain.ids import JobId, NodeId
from services.core.policies.memory import dumped, loaded


@dataclass(frozen=True)
class JointMemory:
    """What the last active round decided, except for the last three fields."""

    sizes: Mapping[JobId, int] = field(default_factory=dict[JobId, int])  #: The gang of every job to run, best first
    held: frozenset[JobId] = frozenset()  #: The jobs that wait for greener hours
    measured: frozenset[JobId] = frozenset()  #: The gangs to be measured at each power limit that still hold their GPUs
    empty_since_s: Mapping[NodeId, float] = field(default_factory=dict[NodeId, float])
    """Since when nobody has used a node that is awake, UTC seconds."""
    declined_since_s: Mapping[JobId, float] = field(default_factory=dict[JobId, float])
    """Since when a gang has been waiting for better seats than it was offered, UTC seconds."""

    @cached_property
    def place(self) -> Mapping[JobId, int]:
        """The position of each job in ``sizes``; cached, because passive rounds ask for it repeatedly."""
        return {job_id: at for at, job_id in enumerate(self.sizes)}


def dump_memory(memory: JointMemory) -> dict[str, Any]:
    return dumped(memory) | {"sizes": list(memory.sizes.items())}  # in their order, which JSON objects lose


def load_memory(stored: dict[str, Any]) -> JointMemory:
    return loaded(JointMemory, stored | {"sizes": dict(stored.get("sizes", ()))})
