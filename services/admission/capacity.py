"""The GPUs of all registered nodes together: a gang that needs more of them would wait forever."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.contracts.jobs import GpuRequest
from services.core.domain.mig import WHOLE, sevenths_of


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices of one model and memory size in one grid zone, over all registered nodes: no gang has more kinds."""

    model: str
    memory_gib: float
    zone: str
    count: int
    sevenths: int = WHOLE  #: Size of each, 7 for a GPU that is not cut
    is_slice: bool = False  #: Whether they are slices that exist now
    can_cut: bool = False
    """Whether they are GPUs that are cut or that an agent can cut, so that further slices may appear."""


Capacity = Sequence[DeviceKind]


@dataclass(frozen=True, slots=True)
class Impossibility:
    """Which field of a GPU request asks for too much, and why."""

    pointer: str
    detail: str


def impossibility(gpus: GpuRequest, capacity: Capacity) -> Impossibility | None:
    """Return why the smallest gang of ``gpus`` can never be placed; None if it can, or if no node has registered yet.

    Nodes that are drained or lost count too, as they may return.
    """
    if not capacity:
        return None
    if not (capacity := [kind for kind in capacity if gpus.zone in (None, kind.zone)]):
        return Impossibility("/gpus/zone", f"No node of the cluster is in the grid zone {gpus.zone}.")
    if gpus.slice is not None:
        return _no_slice(gpus, capacity)
    kinds = [kind for kind in capacity if not kind.is_slice and gpus.model in (None, kind.model)]
    if not kinds:
        return Impossibility("/gpus/model", f"No node of the cluster has a GPU of model {gpus.model}.")
    kinds = [kind for kind in kinds if kind.memory_gib >= (gpus.memory_gib or 0)]
    if not kinds:
        return Impossibility("/gpus/memory_gib", f"No such GPU of the cluster has {gpus.memory_gib:g} GiB of memory.")
    counts = Counter[tuple[str, float, str]]()
    for kind in kinds:
        counts[kind.model, kind.memory_gib, kind.zone] += kind.count
    largest = max(counts.values())
    if gpus.min > largest:
        has = f"{largest} such GPUs" if len(counts) == 1 else f"at most {largest} of one kind in one zone"
        return Impossibility("/gpus/min", f"The gang needs {gpus.min} GPUs; the cluster has {has}.")
    return None


def _no_slice(gpus: GpuRequest, capacity: Capacity) -> Impossibility | None:
    """Return why no slice of this size can ever exist: there is none, and no GPU could be cut into one."""
    size = sevenths_of(gpus.slice or "")
    kinds = [kind for kind in capacity if gpus.model in (None, kind.model)]
    if not kinds:
        return Impossibility("/gpus/model", f"No node of the cluster has a GPU of model {gpus.model}.")
    could_be = [kind for kind in kinds if (kind.is_slice and kind.sevenths == size) or kind.can_cut]
    if not could_be:
        return Impossibility("/gpus/slice", "No such GPU of the cluster is cut into MIG slices, or can be.")
    if max(kind.memory_gib for kind in could_be) < (gpus.memory_gib or 0):
        return Impossibility("/gpus/memory_gib", f"No such slice of the cluster has {gpus.memory_gib:g} GiB of memory.")
    return None


class CapacityCache:
    """Caches the capacity. Jobs are refused only on a fresh reading, so that a new node counts at once."""

    def __init__(self, read: Callable[[], Awaitable[Capacity]], max_age_s: float) -> None:
        self._read, self._max_age_s = read, max_age_s
        self._capacity: Capacity = ()
        self._read_at_s = float("-inf")

    async def get(self, *, fresh: bool = False) -> Capacity:
        """Return the capacity; with ``fresh``, read it anew."""
        if fresh or time.monotonic() - self._read_at_s > self._max_age_s:
            read_at_s = time.monotonic()
            self._capacity = await self._read()
            self._read_at_s = read_at_s
        return self._capacity
