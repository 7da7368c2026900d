"""The nodes of a snapshot: what they have, what of it is free, which work they take, and what they draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from services.contracts.engines import OURS
from services.contracts.nodes import PowerState
from services.core.cycle.levels import numbered
from services.core.cycle.snapshot import NodeTable
from services.core.domain.arrays import Bools, Floats
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId, NodeId
from services.core.domain.mig import gpu_of, is_gpu
from services.core.domain.topology import Topology
from services.core.profiles.boards import board_of
from services.scheduler.repository.documents import StoredDevice, StoredServiceTerms
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.snapshots import AwayRow, ClaimRow, ClusterRows, JobRow, NodeRow, PartitionRow


class NodeKind(NamedTuple):
    """What makes nodes interchangeable to a job.

    GPU model, memory of each GPU, whether images run there, what runs jobs there (our agents, or an engine, with the
    queues of it that use the node), and the grid zone: no gang spans kinds, so none spans zones.
    """

    gpu_model: str
    memory_gib: float
    containers: bool
    engine: str = OURS
    queues: tuple[str, ...] = ()
    zone: str = ""


def kind_of(node: NodeRow | AwayRow) -> NodeKind:
    """Return a node's kind, by its first GPU."""
    first = node.devices[0]
    model, memory_gib = first["model"], float(first["memory_gib"])
    return NodeKind(model, memory_gib, node.containers, node.engine, tuple(sorted(node.queues)), node.zone)


@dataclass(frozen=True)
class Cluster:
    """The nodes that plans may use."""

    nodes: Sequence[NodeRow]
    """Each with at least one GPU, and without its slices; none that is off and cannot be woken."""
    claims: Sequence[ClaimRow]
    hosts_w: Mapping[str, float]
    covers: Callable[[str], bool]  #: Whether there is a hook that powers a node
    slices: Mapping[str, Sequence[StoredDevice]]  #: The MIG slices of nodes with GPUs that are cut
    partitions: Sequence[PartitionRow]
    unusable: frozenset[tuple[str, int]] = frozenset()  #: GPUs that get no new work, by node and index

    @classmethod
    def of(cls, rows: ClusterRows, covers: Callable[[str], bool]) -> Cluster:
        """Return the cluster of these rows."""
        slices = {
            node.id: [device for device in node.devices if device.get("parent") is not None]
            for node in rows.nodes
            if any("mig_enabled" in device for device in node.devices)  # agents say it of GPUs that are cut alone
        }
        nodes = [_gpus_of(node) if node.id in slices else node for node in rows.nodes]
        used = [node for node in nodes if node.devices and (node.power != PowerState.OFF or covers(node.id))]
        return cls(used, rows.claims, rows.hosts_w, covers, slices, rows.partitions, rows.unusable)

    @cached_property
    def kinds(self) -> list[NodeKind]:
        """The kinds of nodes there are; a snapshot's GPU models are these, in this order."""
        return sorted({kind_of(node) for node in self.nodes})

    @property
    def widest_node_gpus(self) -> int:
        """How many devices the widest node has."""
        return max((len(node.devices) for node in self.nodes), default=1)


def _gpus_of(node: NodeRow) -> NodeRow:
    """Return a node without its slices: a GPU's draw includes theirs."""
    return node._replace(
        devices=[device for device in node.devices if device.get("parent") is None],
        readings=[each for each in node.readings if is_gpu(each["index"])],
    )


def meets(node: NodeRow | AwayRow, terms: StoredServiceTerms | None) -> bool:
    """Return whether a service instance may run on a node by its terms; None: of a job that has none."""
    terms = terms or {}
    is_there = terms.get("zone") in (None, node.zone)
    return is_there and (terms.get("node_labels") or {}).items() <= node.labels.items()


def takes_work(node: NodeRow) -> bool:
    """Return whether a node gets new work."""
    return not node.draining and node.power != PowerState.GOING_DOWN


def node_table(cluster: Cluster, zones: Sequence[str]) -> NodeTable:
    """Return the nodes as policies see them; a node in none of these zones counts as one in the first."""
    claimed: dict[str, set[int]] = {}
    for claim in cluster.claims:
        claimed.setdefault(claim.node_id, set()).update((claim.device, gpu_of(claim.device)))
    position = {kind: at for at, kind in enumerate(cluster.kinds)}
    zone_at = {zone: at for at, zone in enumerate(zones)}
    nodes = cluster.nodes

    def bools(values: Iterable[bool]) -> Bools:
        return np.fromiter(values, np.bool_, len(nodes))

    return NodeTable(
        ids=tuple(NodeId(node.id) for node in nodes),
        gpu_model=np.array([position[kind_of(node)] for node in nodes], dtype=np.int64),
        gpus=np.array([len(node.devices) for node in nodes], dtype=np.int64),
        schedulable=bools(map(takes_work, nodes)),
        asleep=bools(node.power == PowerState.OFF for node in nodes),
        may_sleep=bools(node.may_sleep and cluster.covers(node.id) for node in nodes),
        free_devices=tuple(tuple(sorted(device_indices(node) - claimed.get(node.id, set()))) for node in nodes),
        zone=np.array([zone_at.get(node.zone, 0) for node in nodes], dtype=np.int64),
    )


def levels_of(topology: Topology, nodes: Sequence[NodeRow], jobs: JobRows) -> dict[str, Any]:
    """Return what a snapshot says of the levels of the network, and of the jobs that name one; nothing without any.

    Returns:
        ``levels``, ``domains`` of the nodes, ``within`` and ``near``.
    """
    asked = {name: [(JobId(job.id), getattr(job, name)) for job in jobs.where(jobs.have(name))]
             for name in ("within", "near")}  # fmt: skip
    levels, domains = numbered(topology, [(node.id, node.labels) for node in nodes])
    if len(levels) == 1 and not any(asked.values()):
        return {}
    at = {level: position for position, level in enumerate(levels)}
    return {
        "levels": levels,
        "domains": domains,
        "within": {job_id: at.get(level, -1) for job_id, level in asked["within"]},
        "near": {job_id: at[level] for job_id, level in asked["near"] if level in at},
    }


def shared_pairs(claims: Sequence[ClaimRow], jobs: Sequence[JobRow]) -> tuple[tuple[JobId, JobId], ...]:
    if len(set(claims)) == len(claims):
        return ()
    on: dict[ClaimRow, list[JobId]] = {}
    for job in jobs:
        for share in job.shares or ():
            for device in share["devices"]:
                on.setdefault(ClaimRow(share["node_id"], device), []).append(JobId(job.id))
    claimed_twice = sorted(claim for claim, holders in Counter(claims).items() if holders > 1)
    pairs = [on.get(claim, []) for claim in claimed_twice]
    return tuple((pair[0], pair[1]) for pair in pairs if len(pair) == 2)


def device_indices(node: NodeRow) -> set[int]:
    return {device["index"] for device in node.devices}


def settable(cluster: Cluster) -> tuple[frozenset[ControlKind], ...]:
    """Return, for each kind of node, the controls that all of its devices support."""
    return tuple(
        _taken_by_all([device for node in cluster.nodes if kind_of(node) == kind for device in node.devices])
        for kind in cluster.kinds
    )


def _taken_by_all(devices: Sequence[StoredDevice]) -> frozenset[ControlKind]:
    takes = {
        ControlKind.POWER_LIMIT: all(device.get("can_set_power_limit") for device in devices),
        ControlKind.CLOCK: all(device.get("can_set_clock") for device in devices),
    }
    return frozenset(kind for kind, by_all in takes.items() if by_all)


def is_awake(node: NodeRow) -> bool:
    """Return whether a node is on, so that its newest readings are not from before it went off."""
    return node.power not in (PowerState.OFF, PowerState.WAKING)


def drawn_w(cluster: Cluster) -> float:
    """Return what GPUs draw, by the newest heartbeats, and what hosts draw, watts; NaN if no GPU was read."""
    readings = [each["power_w"] for node in cluster.nodes if is_awake(node) for each in node.readings]
    return sum(readings) + sum(cluster.hosts_w.values()) if readings else float("nan")


def host_w(cluster: Cluster) -> Floats:
    """Return what hosts of each kind of node draw per GPU, 0 where there is no meter: (n_gpu_models,) watts."""
    host_power_w, gpus = np.zeros((2, len(cluster.kinds)))
    for node in cluster.nodes:
        if node.id in cluster.hosts_w:
            at = cluster.kinds.index(kind_of(node))
            host_power_w[at] += cluster.hosts_w[node.id]
            gpus[at] += len(node.devices)
    return host_power_w / np.maximum(gpus, 1)


def idle_w(cluster: Cluster, hidden: Mapping[str, set[int]]) -> Floats:
    """Return what a free device of each kind draws now, or else what its board is known to draw: (n_gpu_models,) watts.

    The median of those at rest: until the next heartbeat, one that was just given up still shows what its gang drew.

    Args:
        hidden: GPUs that policies do not see, by node: their slices may be in use.
    """
    claimed = {*cluster.claims, *(ClaimRow(node, gpu) for node, gpus in hidden.items() for gpu in gpus)}
    readings_w: dict[NodeKind, list[float]] = {kind: [] for kind in cluster.kinds}
    for node in filter(is_awake, cluster.nodes):
        readings_w[kind_of(node)] += [
            each["power_w"]
            for each in node.readings
            if each["utilization"] == 0 and ClaimRow(node.id, each["index"]) not in claimed
        ]
    medians = [median(each) if each else board_of(kind.gpu_model).idle_w for kind, each in readings_w.items()]
    return np.array(medians, dtype=np.float64)
