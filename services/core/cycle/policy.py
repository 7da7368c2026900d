"""The protocol between the round and the policies."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from services.core.cycle.plan import Plan
from services.core.cycle.snapshot import Snapshot

Memory = TypeVar("Memory")


class Policy(Protocol[Memory]):
    """Decides who runs, on how many GPUs and where.

    ``decide`` is a function of its arguments alone. What a policy remembers between rounds is its memory: an immutable
    value that goes through JSON, and is saved in the same transaction as the plan it came with.
    """

    name: str

    def initial(self) -> Memory:
        """Return the memory of a policy that has decided nothing yet."""
        ...

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return a plan for the snapshot, and what to remember of having made it."""
        ...

    def dump(self, memory: Memory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        ...

    def load(self, stored: dict[str, Any]) -> Memory:
        """Return the memory that ``dump`` wrote; unknown or missing keys fall back to ``initial``'s."""
        ...
