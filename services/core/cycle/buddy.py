"""Buddy placement: gangs in aligned blocks of powers of two, so that free devices stay in large blocks.

A node's devices form blocks of 1, 2, 4, ... devices, each beginning at a multiple of its size; two neighbours of one
size are buddies and together form a block of the next size. A gang no larger than a node gets the first devices of one
of the smallest free blocks that suffice. A wider gang gets whole empty nodes, the largest first, and for the remainder
a block on a node that no other such gang uses: a node holds at most one gang that spans nodes.

Gangs of powers of two on nodes of powers of two thus never share a block and never overlap. A gang of another size
takes a block of the next power of two, or a whole node, and leaves the end of it to others.

A gang waits if no block is free, even if enough single devices are. ``policies.powerflow.migration`` moves jobs
together where that pays.

Source: PowerFlow section 5.3; Zhao et al., HiveD, OSDI'20.
"""

import numpy as np

from services.core.cycle.blocks import ORDERS, aligned
from services.core.cycle.levels import rooms
from services.core.cycle.placing import FreeDevices
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Ints
from services.core.domain.placement import Placement


def buddy(snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
    """Place a gang in one block, or on whole nodes and one block; see the module.

    Among equal blocks, prefer one on a node that is awake, then on the fullest node, then on the first.
    """
    nodes = snapshot.nodes
    blocks = free.blocks(gpu_model)
    order = (gpus - 1).bit_length()
    found = blocks.smallest(order) if order < ORDERS else None
    if found is not None:
        node, first = found
        return free.take_devices([(node, tuple(range(first, first + gpus)))])
    for _, count in rooms(snapshot, job, gpus, gpu_model, free.count):
        shares = _whole_nodes(snapshot, gpus, nodes.gpu_model == gpu_model, count > 0, free)
        if shares is not None:
            return free.take_devices(shares)
    return None


def _whole_nodes(
    snapshot: Snapshot, gpus: int, usable: Bools, among: Bools, free: FreeDevices
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return whole nodes and, for the remainder, a block, of these nodes alone (``among``); None if that is too few."""
    nodes = snapshot.nodes
    usable = usable & nodes.schedulable
    left, shares = gpus, list[tuple[int, tuple[int, ...]]]()
    while left:
        widest = int(nodes.gpus[usable].max(initial=0))
        if not widest:
            return None
        if left <= widest and (block := _block(snapshot, usable & among, left, free, spans=bool(shares))) is not None:
            shares.append(block)
            break
        empty = usable & among & (free.count == nodes.gpus) & (nodes.gpus <= left)
        if (left <= widest and not shares) or not empty.any():
            return None
        size = int(nodes.gpus[empty].max())
        awake_first = np.flatnonzero(empty & (nodes.gpus == size))
        awake_first = awake_first[np.argsort(nodes.asleep[awake_first], kind="stable")]
        # several at once, as long as what is left is more than a node
        for node in awake_first[: max(-((widest - left) // size), 1)].tolist():
            shares.append((node, free.on(node)))
            usable[node] = False
            left -= size
    return shares


def free_blocks(masks: Ints, order: int) -> Ints:
    """Return where free aligned blocks of ``2**order`` devices begin, as bit masks: (n_nodes,) to (n_nodes,)."""
    starts = masks
    for each in range(order):
        starts = starts & (starts >> (1 << each)) & aligned(each + 1)
    return starts


def _block(
    snapshot: Snapshot, usable: Bools, gpus: int, free: FreeDevices, *, spans: bool
) -> tuple[int, tuple[int, ...]] | None:
    """Return a node and devices from the smallest free block, for a gang or the remainder of one that spans nodes."""
    nodes, order = snapshot.nodes, (gpus - 1).bit_length()
    candidates = usable & (free.count >= gpus)
    if spans:
        candidates &= ~free.spanned(snapshot.jobs.placements)
    whole = candidates & (free.count == nodes.gpus)  # of an odd size, or with holes, and all of it free
    rows = np.flatnonzero(candidates & (nodes.gpus >= 1 << order))
    starts = free_blocks(free.masks()[rows], order)
    for size in range(order, ORDERS):
        wider = starts & (starts >> (1 << size)) & aligned(size + 1)
        smallest = starts & ~wider & ~(wider << (1 << size))
        found = np.flatnonzero(smallest)
        if found.size:
            at = int(found[np.lexsort((free.count[rows[found]], nodes.asleep[rows[found]]))[0]])
            first = (int(smallest[at]) & -int(smallest[at])).bit_length() - 1
            return int(rows[at]), tuple(range(first, first + gpus))
        starts = wider
    if whole.any():
        node = int(np.flatnonzero(whole)[np.lexsort((nodes.gpus[whole], nodes.asleep[whole]))[0]])
        return node, free.on(node)[:gpus]
    return None
