"""The nodes of an installation, and who has which of their GPUs. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.contracts.pools import PoolsResult
from services.contracts.serving import PoolPlace, PoolSpec
from services.core.domain.packing import pack


@dataclass(frozen=True)
class Node:
    """A node that accepts work."""

    zone: str  #: Its grid zone
    labels: Mapping[str, str]  #: Its labels
    gpus: Mapping[str, int]
    """How many of each model the pool may have there: its own instances', free ones, and those that training can be
    preempted from."""

    def is_of(self, zone: str, labels: Mapping[str, str]) -> bool:
        """Return whether it belongs to a place."""
        return self.zone == zone and labels.items() <= self.labels.items()


@dataclass(frozen=True)
class Need:
    """GPUs of one node that another pool's instance is waiting for."""

    zone: str
    labels: Mapping[str, str]
    model: str
    gpus: int


@dataclass(frozen=True)
class PoolNeeds:
    """The GPUs that instances of one pool need but do not hold."""

    awaited: list[Need] = field(default_factory=list[Need])
    """Needs of instances that were created and have no GPUs yet."""
    in_force: list[Need] = field(default_factory=list[Need])
    """Needs of instances that the plan in force wants and that were not created yet."""
    planned: list[Need] = field(default_factory=list[Need])
    """Like ``in_force``, for the newest plan that is or may be put in force."""


@dataclass(frozen=True)
class ClusterNode:
    """A node that accepts work, with the model of each of its devices, by index."""

    id: str
    zone: str
    labels: Mapping[str, str]
    devices: Mapping[int, str]


@dataclass(frozen=True)
class Cluster:
    """All nodes that accept work at one moment."""

    nodes: Sequence[ClusterNode]  #: The nodes
    held: Mapping[tuple[str, int], str | None]
    """Devices of jobs that may not be preempted, by node and index; with the pool if the job is its instance."""
    needs: Mapping[str, PoolNeeds]  #: Needs by pool
    ordered: frozenset[str | None] = frozenset()  #: Zones in which an order of the grid is in force; None for all

    def nodes_for(self, pool: str, *, by_plans_in_force: bool = False) -> list[Node]:
        """Return the nodes with the GPUs that a pool may have.

        Args:
            by_plans_in_force: Whether other pools get what their plans in force want; by default, they get what plans
                that may still be put in force want.
        """
        nodes: list[Node] = []
        idle: list[Counter[str]] = []
        for node in self.nodes:
            holders = [(self.held.get((node.id, index), ""), model) for index, model in node.devices.items()]
            nodes.append(Node(node.zone, node.labels, Counter(model for by, model in holders if by in ("", pool))))
            idle.append(Counter(model for by, model in holders if by == ""))
        others = [needs for name, needs in sorted(self.needs.items()) if name != pool]
        planned = [need for each in others for need in (each.in_force if by_plans_in_force else each.planned)]
        return without_needs(nodes, [*(need for each in others for need in each.awaited), *planned], idle)

    def ordered_places(self, spec: PoolSpec) -> list[str]:
        """Return the places of a pool in which an order of the grid is in force, by name."""
        return sorted(place.name for place in spec.places if self.ordered & {None, place.zone})

    def installed(self) -> list[Node]:
        return [Node(node.zone, node.labels, Counter(node.devices.values())) for node in self.nodes]


@dataclass(frozen=True)
class PlaceGpus:
    """The GPUs that a place has for a pool."""

    models: Mapping[str, int] = field(default_factory=dict[str, int])
    """GPUs by model, for the models that a mode takes."""
    fits: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many instances of a mode alone would fit on its nodes: each needs all its GPUs on one node."""
    nodes: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    """How many GPUs of a model each node has, without nodes that have none."""


FEW_STEPS = 500  #: More than one for each need: the search is made for each pool, and must end soon without a way, too


def without_needs(nodes: Sequence[Node], needs: Iterable[Need], idle: Sequence[Counter[str]]) -> list[Node]:
    """Return the nodes less the GPUs that others wait for, placed so that all fit; else the largest that fit.

    They get ``idle`` GPUs, (n_nodes,) by model, rather than those that the pool itself has.
    """
    left, idle = [Counter(node.gpus) for node in nodes], [Counter(each) for each in idle]
    of_model: dict[str, list[Need]] = defaultdict(list)
    for need in sorted(needs, key=lambda need: -need.gpus):
        of_model[need.model].append(need)
    for model, waiting in of_model.items():
        sizes = [need.gpus for need in waiting]
        there = np.array([[node.is_of(need.zone, need.labels) for node in nodes] for need in waiting], np.bool_)
        steps = FEW_STEPS + len(waiting)
        ways = (pack(sizes, there, [each[model] for each in room], steps) for room in (idle, left))
        placed = next((way for way in ways if way is not None), None)
        for at, gpus in enumerate(sizes):
            rooms = (enumerate(room) for room in (idle, left))
            fits = (node for room in rooms for node, has in room if there[at, node] and has[model] >= gpus)
            node = next(fits, None) if placed is None else placed[at]
            if node is not None:
                left[node][model] -= gpus
                idle[node][model] -= gpus
    return [Node(node.zone, node.labels, has) for node, has in zip(nodes, left, strict=True)]


def gpus_by_place(spec: PoolSpec, nodes: Iterable[Node]) -> dict[str, PlaceGpus]:
    """Return the GPUs of each place; a node in two places counts for the first, so that no GPU is planned twice."""
    of_place = _nodes_by_place(spec, nodes)
    return {place.name: _place_gpus(place, spec, of_place[place.name]) for place in spec.places}


def installed_by_place(spec: PoolSpec, nodes: Iterable[Node]) -> dict[str, dict[str, int]]:
    """Return the GPUs of each place's nodes by model, including those that no mode takes."""
    of_place = _nodes_by_place(spec, nodes)
    none = Counter[str]()
    return {place: dict(sum((Counter(node.gpus) for node in there), none)) for place, there in of_place.items()}


def misfits(spec: PoolSpec, plan: PoolsResult, nodes: Iterable[Node]) -> list[str]:
    """Return the places where a plan's instances do not fit on whole nodes, however they are placed."""
    of_place = _nodes_by_place(spec, nodes)
    modes = {mode.name: mode for mode in spec.modes}
    found: list[str] = []
    for place in spec.places:
        planned: dict[str, list[int]] = defaultdict(list)
        for each in plan.instances:
            if each.location == place.name and each.mode in modes:
                planned[modes[each.mode].gpu_model] += [modes[each.mode].gpus] * each.count
        for model, sizes in planned.items():
            most = sum(sizes) if place.gpus is None else place.gpus.get(model, 0)
            free = [node.gpus.get(model, 0) for node in of_place[place.name]]
            anywhere = np.ones((len(sizes), len(free)), np.bool_)
            if sum(sizes) > min(most, sum(free)) or pack(sizes, anywhere, free) is None:
                found.append(place.name)
                break
    return found


def _nodes_by_place(spec: PoolSpec, nodes: Iterable[Node]) -> dict[str, list[Node]]:
    """Return the nodes of each place; a Kubernetes cluster is one that has all the GPUs that the spec allows there."""
    of_place = {
        place.name: [Node(place.zone, {}, place.gpus)] if place.cluster and place.gpus else list[Node]()
        for place in spec.places
    }
    places = [place for place in spec.places if not place.cluster]
    for node in nodes:
        place = next((each for each in places if node.is_of(each.zone, each.node_labels)), None)
        if place is not None:
            of_place[place.name].append(node)
    return of_place


def _place_gpus(place: PoolPlace, spec: PoolSpec, nodes: Sequence[Node]) -> PlaceGpus:
    models: dict[str, int] = {}
    for model in sorted({mode.gpu_model for mode in spec.modes}):
        there = sum(node.gpus.get(model, 0) for node in nodes)
        models[model] = there if place.gpus is None else min(there, place.gpus.get(model, 0))
    fits = {mode.name: sum(node.gpus.get(mode.gpu_model, 0) // mode.gpus for node in nodes) for mode in spec.modes}
    whole = list[Node]() if place.cluster else nodes  # the cluster's own scheduler knows its nodes
    each = {model: [node.gpus[model] for node in whole if node.gpus.get(model)] for model in models}
    return PlaceGpus(models, fits, each)
