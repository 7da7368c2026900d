"""What a policy is; the round, the scheduler and the simulator use only this interface.

Besides ``Policy``, a class may implement any of the optional protocols here.
"""

from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from services.core.cycle.plan import Plan
from services.core.cycle.snapshot import Snapshot

Memory = TypeVar("Memory")


class Policy(Protocol[Memory]):
    """Decides who runs, on how many GPUs and where.

    ``decide`` is a function of its arguments alone. What a policy remembers between rounds is its memory: an immutable
    value that survives conversion to JSON, and is saved in the same transaction as the plan it came with.
    """

    name: str

    def initial(self) -> Memory:
        """Return the memory of a policy that has decided nothing yet."""
        ...

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return a plan for the snapshot, and the memory to keep for the next round."""
        ...

    def dump(self, memory: Memory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        ...

    def load(self, stored: dict[str, Any]) -> Memory:
        """Return the memory that ``dump`` wrote; for unknown or missing keys it falls back to ``initial``."""
        ...


class StatelessPolicy:
    """The memory methods of a policy that remembers nothing; its memory is None."""

    def initial(self) -> None:
        """Return None: there is no memory."""

    def dump(self, memory: None) -> dict[str, Any]:
        del memory
        return {}

    def load(self, stored: dict[str, Any]) -> None:
        del stored


@runtime_checkable
class PowerLimited(Protocol):
    """A policy that keeps the cluster within a power limit; optional."""

    def power_limit_w(self, snapshot: Snapshot) -> float:
        """Return what the cluster may draw, watts; inf for no limit."""
        ...

    def power_error_w(self, snapshot: Snapshot) -> float:
        """Return by how much the gangs may exceed their predicted draw, given the models' stated error, watts."""
        ...


@runtime_checkable
class PlacesGangs(Protocol):
    """A policy that chooses its own way of placing gangs, whatever the cluster's; optional."""

    @property
    def placement(self) -> str:
        """The way it places gangs: a name in ``placers.PLACERS``."""
        ...


@runtime_checkable
class PacksJobs(Protocol):
    """A policy that may put two jobs on one GPU; optional. Under all others, guests on shared GPUs are stopped."""

    @property
    def packs(self) -> bool:
        """Whether it puts two jobs on one GPU."""
        ...


class Layer(Generic[Memory]):
    """A policy that changes another one's plans, in a ``decide`` of its own; its memory is the other's."""

    def __init__(self, inner: Policy[Memory]) -> None:
        self.inner = inner
        self.name = inner.name

    @property
    def packs(self) -> bool:
        return isinstance(self.inner, PacksJobs) and self.inner.packs

    def initial(self) -> Memory:
        return self.inner.initial()

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        raise NotImplementedError

    def dump(self, memory: Memory) -> dict[str, Any]:
        return self.inner.dump(memory)

    def load(self, stored: dict[str, Any]) -> Memory:
        return self.inner.load(stored)
