"""Which devices a gang gets, once it is decided that it starts.

A ``Placer`` looks at the devices still free and names some of them. Reconciliation hands it gangs one by one, in rank
order, and takes the devices it named off the free ones. Other placers (heavy-edge cuts, buddy blocks) have the same
type.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from services.core.cycle.snapshot import Ints, NodeTable, Snapshot
from services.core.domain.errors import DomainError
from services.core.domain.placement import NodeShare, Placement

NEVER_TIGHT = int(np.iinfo(np.int64).max)


class FreeDevices:
    """The free devices of one round, counted down as gangs are placed. Drained nodes have none.

    Attributes:
        count: (n_nodes,) devices still free on each node; read it, never write it.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._taken: dict[int, list[int]] = {}
        self.count: Ints = (
            nodes.free_gpus.copy() if nodes.all_schedulable else np.where(nodes.schedulable, nodes.free_gpus, 0)
        )
        self._of_model: dict[int, Ints] = {}

    def nodes_of(self, gpu_model: int) -> Ints:
        """Return the indices of the schedulable nodes of a model, ascending."""
        if gpu_model not in self._of_model:
            of_model = self._nodes.gpu_model == gpu_model
            if not self._nodes.all_schedulable:
                of_model &= self._nodes.schedulable
            self._of_model[gpu_model] = np.flatnonzero(of_model)
        return self._of_model[gpu_model]

    def on(self, node: int) -> tuple[int, ...]:
        """Return the device indices still free on a node, ascending."""
        if not self._nodes.schedulable[node]:
            return ()
        return tuple(self._taken[node]) if node in self._taken else self._nodes.free_devices[node]

    def take(self, shares: list[tuple[int, int]]) -> Placement:
        """Take the lowest devices of each (node, how many) pair and return them as a placement.

        Raises:
            DomainError: a node has fewer free devices than asked for.
        """
        placed: list[NodeShare] = []
        for node, gpus in shares:
            devices = self.on(node)
            if gpus < 1 or gpus > len(devices):
                raise DomainError(f"{gpus} devices asked of node {self._nodes.ids[node]}, {len(devices)} are free")
            self._taken[node] = list(devices[gpus:])
            self.count[node] -= gpus
            placed.append(NodeShare(self._nodes.ids[node], devices[:gpus]))
        return Placement(tuple(placed))


class Placer(Protocol):
    """Chooses devices for one gang."""

    def __call__(self, snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
        """Take ``gpus`` devices of one model from ``free`` for the job at index ``job``.

        Returns:
            The devices taken, or None to let the job wait; then nothing was taken.
        """
        ...


def consolidated(snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
    """Place a gang on the fewest nodes, and there on those it leaves fullest.

    On one node where one has room: the one with the fewest free devices that suffice. Otherwise the nodes with the most
    free devices, until what is left of the gang fits one node: again the tightest. Ties go to the node named first in
    the snapshot.
    """
    del snapshot, job
    nodes = free.nodes_of(gpu_model)
    counts = free.count[nodes]
    if int(counts.sum()) < gpus:
        return None
    shares: list[tuple[int, int]] = []
    left = gpus
    largest = int(counts.max(initial=0))
    while left > largest:
        at = int(counts.argmax())
        shares.append((int(nodes[at]), largest))
        counts[at] = 0
        left -= largest
        largest = int(counts.max())
    tightest = int(np.where(counts >= left, counts, NEVER_TIGHT).argmin())
    shares.append((int(nodes[tightest]), left))
    return free.take(shares)
