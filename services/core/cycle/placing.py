"""Choose the devices of a gang that is to start.

A ``Placer`` looks at the devices still free and names some of them. Reconciliation hands it gangs one by one, in rank
order, and removes the devices it names from the free ones. Other placers (heavy-edge cuts, buddy blocks) have the same
type.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from services.core.cycle.blocks import MASK_BITS, ORDERS, FreeBlocks
from services.core.cycle.levels import rooms
from services.core.cycle.snapshot import NodeTable, Snapshot
from services.core.domain.arrays import Bools, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import NodeId
from services.core.domain.placement import NodeShare, Placement

FEW_NODES = 64  #: Among fewer nodes one that a gang fills exactly is found sooner in a list
NEVER_TIGHT = int(np.iinfo(np.int64).max)


@lru_cache(maxsize=1 << 14)
def mask_of(devices: Sequence[int]) -> int:
    """Return the devices as bits; those beyond ``MASK_BITS`` are left out."""
    return sum(1 << device for device in devices if device < MASK_BITS)


def block_among(free: tuple[int, ...], gpus: int) -> tuple[int, ...]:
    """Return which of a node's free devices to take: from the smallest aligned block, so that others stay whole."""
    order = (gpus - 1).bit_length()
    found = FreeBlocks({0: mask_of(free)}, [len(free)], [False]).smallest(order) if order < ORDERS else None
    return free[:gpus] if found is None else tuple(range(found[1], found[1] + gpus))


@lru_cache(maxsize=1 << 14)
def placement_on(*shares: tuple[NodeId, tuple[int, ...]]) -> Placement:
    """Return the placement on these devices of these nodes; cached, because a simulation repeats the same ones."""
    return Placement(tuple(NodeShare(node_id, devices) for node_id, devices in shares))


class FreeDevices:
    """The free devices of one round, counted down as gangs are placed. Drained nodes have none."""

    def __init__(self, nodes: NodeTable) -> None:
        self._nodes = nodes
        self._taken: dict[int, tuple[int, ...]] = {}
        self.count: Ints = (
            nodes.free_gpus.copy() if nodes.all_schedulable else np.where(nodes.schedulable, nodes.free_gpus, 0)
        )
        """(n_nodes,) devices still free on each node; for reading only."""
        self._masks: Ints | None = None
        self._blocks: dict[int, FreeBlocks] = {}
        self._spread: set[int] = set()
        self._spanned: Bools | None = None

    def on(self, node: int) -> tuple[int, ...]:
        """Return the indices of the devices still free on a node, ascending."""
        if not self._nodes.all_schedulable and not self._nodes.schedulable[node]:
            return ()
        return self._taken[node] if node in self._taken else self._nodes.free_devices[node]

    def masks(self) -> Ints:
        """Return which devices of each node are free, as bits: (n_nodes,); drained nodes have none."""
        if self._masks is None:
            free = (mask_of(self.on(node)) for node in range(len(self._nodes)))
            self._masks = np.fromiter(free, np.int64, len(self._nodes))
        return self._masks

    def blocks(self, gpu_model: int) -> FreeBlocks:
        """Return the free blocks of a model's nodes; they are updated as ``take_devices`` takes devices."""
        if gpu_model not in self._blocks:
            rows = np.flatnonzero((self._nodes.gpu_model == gpu_model) & (self.count > 0)).tolist()
            masks = {node: mask_of(self.on(node)) for node in rows}
            self._blocks[gpu_model] = FreeBlocks(masks, self.count.tolist(), self._nodes.asleep.tolist())
        return self._blocks[gpu_model]

    def spanned(self, placements: Iterable[Placement | None]) -> Bools:
        """Return which nodes hold part of a gang that spans nodes, whether running or placed in this round."""
        if self._spanned is None:
            wide = (placed.shares for placed in placements if placed is not None and len(placed.shares) > 1)
            on = {share.node_id for shares in wide for share in shares}
            self._spanned = np.fromiter((node_id in on for node_id in self._nodes.ids), np.bool_, len(self._nodes))
        self._spanned[list(self._spread)] = True
        return self._spanned

    def take_devices(self, shares: list[tuple[int, tuple[int, ...]]]) -> Placement:
        """Take exactly these free devices of each node and return them as a placement."""
        for node, devices in shares:
            taken = set(devices)
            self._taken[node] = tuple(device for device in self.on(node) if device not in taken)
            self.count[node] -= len(devices)
            if self._masks is not None:
                self._masks[node] &= ~mask_of(devices)
            for blocks in self._blocks.values():
                blocks.take(node, mask_of(devices), len(devices))
            if len(shares) > 1:
                self._spread.add(node)
        return placement_on(*((self._nodes.ids[node], devices) for node, devices in shares))

    def take(self, shares: list[tuple[int, int]]) -> Placement:
        """Take each node's lowest free devices, by (node, count) pairs; ``DomainError`` if it has fewer."""
        placed: list[tuple[NodeId, tuple[int, ...]]] = []
        for node, gpus in shares:
            devices = self.on(node)
            if gpus < 1 or gpus > len(devices):
                raise DomainError(f"{gpus} devices asked of node {self._nodes.ids[node]}, {len(devices)} are free")
            self._taken[node] = devices[gpus:]
            self.count[node] -= gpus
            placed.append((self._nodes.ids[node], devices[:gpus]))
        return placement_on(*placed)


class Placer(Protocol):
    """Chooses devices for one gang."""

    def __call__(self, snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
        """Take ``gpus`` devices of one model from ``free`` for the job at index ``job``.

        Returns:
            The devices taken, or None, with nothing taken, to let the job wait.
        """
        ...


def consolidated(snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
    """Place a gang on the fewest nodes, choosing those it leaves fullest; ties go to the first node."""
    for _, count in rooms(snapshot, job, gpus, gpu_model, free.count):
        if (shares := fewest_nodes(count, gpus)) is not None:
            return free.take(shares)
    return None


def fewest_nodes(count: Ints, gpus: int) -> list[tuple[int, int]] | None:
    """Return the (index, count) of the fewest nodes that hold a gang; None if all together do not.

    If one node has room, the one with the fewest free devices that suffice is used. Otherwise nodes with the most free
    devices are taken first, until the rest of the gang fits on one node, again the tightest. Ties go to the first.

    Args:
        count: (n_nodes,) free devices.
    """
    if count.size <= FEW_NODES and gpus in (free := count.tolist()):
        return [(free.index(gpus), gpus)]
    shares: list[tuple[int, int]] = []
    left = gpus
    fullest = int(count.argmax()) if count.size else -1
    most = int(count[fullest]) if count.size else -1
    if most < left and (most < 0 or int(count.sum()) < left):
        return None
    while left > most:
        if not shares:
            count = count.copy()
        shares.append((fullest, most))
        count[fullest] = 0
        left -= most
        fullest = int(count.argmax())
        most = int(count[fullest])
    tightest = int(np.where(count >= left, count, NEVER_TIGHT).argmin())
    shares.append((tightest, left))
    return shares
