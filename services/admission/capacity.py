"""The GPUs of all registered nodes together: a gang that needs more of them would wait forever."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from services.contracts.jobs import GpuRequest
from services.core.domain.counted import counted
from services.core.domain.mig import WHOLE, sevenths_of
from services.core.domain.topology import Topology


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
    largest: Mapping[str, int] = field(default_factory=dict[str, int], hash=False)
    """By level of the network, narrowest first: how many the domain has that has most of them."""


Capacity = Sequence[DeviceKind]


class Impossibility(NamedTuple):
    """Which field of a GPU request asks for too much, and why."""

    pointer: str
    detail: str


def impossibility(gpus: GpuRequest, capacity: Capacity) -> Impossibility | None:
    """Return why the smallest gang of ``gpus`` can never be placed; None if it can, or if no node has registered yet.

    Nodes that are drained or lost count too, as they may return.
    """
    if not capacity:
        return None
    zones = _listed(kind.zone for kind in capacity)
    if not (capacity := [kind for kind in capacity if gpus.zone in (None, kind.zone)]):
        said = f"No node of the cluster is in the grid zone {gpus.zone}; the zones there are: {zones}."
        return Impossibility("/gpus/zone", said)
    for name, level in (("within", gpus.within), ("near", gpus.near)):
        if level is not None and level not in (levels := capacity[0].largest):
            return Impossibility(f"/gpus/{name}", f"The cluster has no level {level}; it has {', '.join(levels)}.")
    if not (capacity := [kind for kind in capacity if gpus.slice or not kind.is_slice]):
        return Impossibility("/gpus/slice", "Such GPUs are all cut into MIG slices: ask for a slice.")
    if not (kinds := [kind for kind in capacity if gpus.model in (None, kind.model)]):
        where = "of the cluster" if gpus.zone is None else f"in the grid zone {gpus.zone}"
        models = _listed(kind.model for kind in capacity)
        said = f"No node {where} has a GPU of model {gpus.model}; the models there are: {models}."
        return Impossibility("/gpus/model", said)
    if gpus.slice is not None:
        return _no_slice(gpus, kinds)
    such, kinds = kinds, [kind for kind in kinds if kind.memory_gib >= (gpus.memory_gib or 0)]
    if not kinds:
        return _too_little_memory("GPU", gpus, such)
    counts = Counter[tuple[str, float, str]]()
    for kind in kinds:
        counts[kind.model, kind.memory_gib, kind.zone] += kind.count
    largest = max(counts.values())
    if gpus.within is not None and gpus.min <= largest:
        inside = Counter[tuple[str, float, str]]()
        for kind in kinds:
            inside[kind.model, kind.memory_gib, kind.zone] += kind.largest[gpus.within]
        if gpus.min > (most := max(inside.values())):
            return Impossibility("/gpus/min", f"The gang needs {counted(gpus.min, 'GPU')} within one {gpus.within}; "
                                 f"none has more than {most} such GPUs.")  # fmt: skip
    if gpus.min > largest:
        has = f"{largest} such GPUs" if len(counts) == 1 else f"at most {largest} of one kind in one zone"
        return Impossibility("/gpus/min", f"The gang needs {counted(gpus.min, 'GPU')}; the cluster has {has}.")
    return None


def _no_slice(gpus: GpuRequest, kinds: Capacity) -> Impossibility | None:
    """Return why no slice of this size can ever exist: there is none, and no GPU could be cut into one."""
    size = sevenths_of(gpus.slice or "")
    could_be = [kind for kind in kinds if (kind.is_slice and kind.sevenths == size) or kind.can_cut]
    if not could_be:
        return Impossibility("/gpus/slice", "No such GPU of the cluster is cut into MIG slices, or can be.")
    if max(kind.memory_gib for kind in could_be) < (gpus.memory_gib or 0):
        return _too_little_memory("slice", gpus, could_be)
    return None


def _too_little_memory(what: str, gpus: GpuRequest, kinds: Capacity) -> Impossibility:
    most_gib = max(kind.memory_gib for kind in kinds)
    said = f"No such {what} of the cluster has {gpus.memory_gib:g} GiB of memory; the largest has {most_gib:.4g} GiB."
    return Impossibility("/gpus/memory_gib", said)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names)))


def kinds_of(rows: Sequence[tuple[str, Mapping[str, str], DeviceKind]], topology: Topology) -> list[DeviceKind]:
    """Return the kinds of devices of the cluster, given what each node, by id and labels, has of each kind."""
    labels_of = {node: labels for node, labels, _ in rows}
    levels, names = topology.of([*labels_of.items()])
    domains = dict(zip(labels_of, names, strict=True))
    counts = Counter[DeviceKind](), Counter[tuple[DeviceKind, int, str]]()
    for node, _, kind in rows:
        bare = replace(kind, count=0)
        counts[0][bare] += kind.count
        counts[1].update({(bare, at, domain): kind.count for at, domain in enumerate(domains[node])})
    largest: dict[DeviceKind, dict[str, int]] = {kind: dict.fromkeys(levels, 0) for kind in counts[0]}
    for (kind, at, _), count in counts[1].items():
        largest[kind][levels[at]] = max(largest[kind][levels[at]], count)
    return [replace(kind, count=count, largest=largest[kind]) for kind, count in counts[0].items()]


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
