"""When and where a reservation fits, and how clean the grid is then."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.domain.arrays import Bools
from services.core.domain.carbon import CarbonCurve
from services.core.domain.ids import NodeId
from services.core.domain.windows import most_taken
from services.core.policies.windows.layer import endings_of

DAY_S = 86_400.0


@dataclass(frozen=True)
class Slot:
    """GPUs of one model, in one zone, that can be had for a time."""

    start_s: float  #: UTC seconds
    gpus: Mapping[NodeId, int]  #: How many of each node
    gpu_model: int
    zone: int
    intensity: float  #: Mean of the zone over the slot, gCO2/kWh
    estimated: bool  #: Whether the forecast ends before it does, so that its last day stands in for later ones


class Stuck(NamedTuple):
    """A gang's part on a node that may not be stopped."""

    until_s: float  #: When the gang has ended at the latest, UTC seconds; inf: unknown
    job: int
    node: int
    gpus: int


def stuck(snapshot: Snapshot) -> list[Stuck]:
    """Return what holds GPUs and may not be stopped."""
    jobs, nodes, found = snapshot.jobs, snapshot.nodes, list[Stuck]()
    until_s = snapshot.now_s + endings_of(snapshot)[0]
    for job in np.flatnonzero((jobs.phase != QUEUED) & ~jobs.preemptible).tolist():
        for share in placement.shares if (placement := jobs.placements[job]) else ():
            if share.node_id in nodes.index:
                found.append(Stuck(until_s.item(job), job, nodes.index[share.node_id], len(share.devices)))
    return found


def slots(snapshot: Snapshot, usable: Bools, gpus: int, lasts_s: float, starts_s: Iterable[float]) -> list[Slot]:
    """Return the cleanest way to have this many GPUs from each of these times on, if any, the cleanest first.

    Args:
        usable: (n_nodes,) the nodes that may be reserved.
        lasts_s: How long they are wanted, seconds.
        starts_s: UTC seconds.
    """
    nodes, found = snapshot.nodes, list[Slot]()
    until_s, _, on, held = np.array(stuck(snapshot), dtype=np.float64).reshape(-1, 4).T
    on = on.astype(np.int64)
    for start_s in starts_s:
        room = nodes.gpus - np.bincount(on, held * (until_s > start_s), len(nodes)).astype(np.int64)
        for node_id in {node_id for window in snapshot.windows for node_id in window.gpus if node_id in nodes.index}:
            room[nodes.index[node_id]] -= most_taken(snapshot.windows, node_id, start_s, start_s + lasts_s)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node in np.flatnonzero(usable & (room > 0)).tolist():
            groups[int(nodes.zone[node]), int(nodes.gpu_model[node])].append(node)
        ways: list[Slot] = []
        for (zone, model), members in groups.items():
            taken, left = dict[NodeId, int](), gpus
            for node in sorted(members, key=lambda node: (-room[node], nodes.ids[node])):
                if left:
                    taken[nodes.ids[node]] = min(int(room[node]), left)
                    left -= taken[nodes.ids[node]]
            if not left:
                mean, estimated = mean_ahead(snapshot.outlooks[zone].curve, start_s, start_s + lasts_s)
                ways.append(Slot(start_s, taken, model, zone, mean, estimated))
        found += sorted(ways, key=lambda slot: (slot.intensity, len(slot.gpus), slot.zone, slot.gpu_model))[:1]
    return sorted(found, key=lambda slot: (slot.intensity, slot.start_s))


def mean_ahead(curve: CarbonCurve, start_s: float, end_s: float) -> tuple[float, bool]:
    """Return the mean intensity of a time ahead, gCO2/kWh, and whether it is that of the same hours on earlier days."""
    days = max(math.ceil((end_s - curve.end_s) / DAY_S), 0)
    return curve.mean(start_s - days * DAY_S, end_s - days * DAY_S), days > 0
