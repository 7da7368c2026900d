"""Buddy placement with its blocks kept sorted, held against a look at every block of every node for every gang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.core.cycle.buddy import buddy
from services.core.cycle.placing import FreeDevices
from services.core.cycle.services import without_devices
from services.core.cycle.snapshot import Snapshot
from tests.support.builders import a_node, a_snapshot

Free = dict[int, set[int]]


@st.composite
def clusters(draw: st.DrawFn) -> Snapshot:
    """Return up to six nodes, some of odd sizes, with holes, asleep or drained, with any devices free."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 4, 6, 8, 8]), min_size=1, max_size=6))
    drained = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    nodes = [
        a_node(f"n{at}", gpus=gpus, schedulable=not (out and at))
        for at, (gpus, out) in enumerate(zip(sizes, drained, strict=True))
    ]
    table = a_snapshot((), nodes).nodes
    free = tuple(tuple(sorted(draw(st.sets(st.integers(0, gpus - 1))))) for gpus in sizes)
    whole = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    free = tuple(tuple(range(gpus)) if all_of else each for gpus, all_of, each in zip(sizes, whole, free, strict=True))
    asleep = draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    hidden = [draw(st.sampled_from([set[int]()] * 3 + [{1, 5}, {0}])) & {*range(gpus)} for gpus in sizes]
    free = tuple(tuple(at for at in each if at not in out) for each, out in zip(free, hidden, strict=True))
    shown = table.gpus - np.array([*map(len, hidden)])
    table = replace(table, gpus=shown, schedulable=table.schedulable & (shown > 0))
    counted = np.array([len(each) for each in free], dtype=np.int64)
    return replace(
        a_snapshot((), nodes), nodes=replace(table, free_devices=free, free_gpus=counted, asleep=np.array(asleep))
    )


def plainly(snapshot: Snapshot, gpus: int, free: Free, spanned: set[int]) -> Mapping[int, tuple[int, ...]] | None:
    """Return node and devices of a gang by the rule, one node at a time."""
    nodes, left, taken = snapshot.nodes, gpus, dict[int, tuple[int, ...]]()
    while left:
        usable = [at for at in range(len(nodes)) if nodes.schedulable[at] and at not in taken]
        widest = max((int(nodes.gpus[at]) for at in usable), default=0)
        if left <= widest:
            open_to = [at for at in usable if not (taken and at in spanned)]
            block = smallest_block(snapshot, left, {at: free[at] for at in open_to})
            if block is not None:
                return {**taken, block[0]: block[1]}
            if not taken:
                return None
        empty = [at for at in usable if len(free[at]) == nodes.gpus[at] <= left]
        if not empty:
            return None
        node = min(empty, key=lambda at: (-int(nodes.gpus[at]), bool(nodes.asleep[at]), at))
        taken[node] = tuple(sorted(free[node]))
        left -= len(taken[node])
    return taken


def smallest_block(snapshot: Snapshot, gpus: int, free: Free) -> tuple[int, tuple[int, ...]] | None:
    """Return the first free block of the smallest size; of those the one awake, fullest, first."""
    nodes, size = snapshot.nodes, 1 << (gpus - 1).bit_length()
    for width in (size << more for more in range(4)):
        found: list[tuple[bool, int, int, int]] = []
        for node, devices in free.items():
            for first in range(0, 8, width):
                block, around = range(first, first + width), first - first % (2 * width)
                if devices.issuperset(block) and not devices.issuperset(range(around, around + 2 * width)):
                    found.append((bool(nodes.asleep[node]), len(devices), node, first))
        if found:
            _, _, node, first = min(found)
            return node, tuple(range(first, first + gpus))
    whole = [at for at, devices in free.items() if gpus <= len(devices) == nodes.gpus[at]]
    if whole:
        node = min(whole, key=lambda at: (bool(nodes.asleep[at]), int(nodes.gpus[at]), at))
        return node, tuple(sorted(free[node]))[:gpus]
    return None


@given(snapshot=clusters(), gangs=st.lists(st.integers(1, 24), max_size=8))
def test_every_gang_gets_what_a_look_at_all_blocks_would_give_it(snapshot: Snapshot, gangs: list[int]) -> None:
    free = FreeDevices(snapshot.nodes)
    left = {
        at: set(devices) if snapshot.nodes.schedulable[at] else set[int]()
        for at, devices in enumerate(snapshot.nodes.free_devices)
    }
    spanned: set[int] = set()
    for gpus in gangs:
        expected = plainly(snapshot, gpus, left, spanned)
        placed = buddy(snapshot, 0, gpus, 0, free)
        found = None if placed is None else {snapshot.nodes.index[s.node_id]: s.devices for s in placed.shares}
        assert found == expected
        for node, devices in (expected or {}).items():
            left[node] -= set(devices)
        if expected is not None and len(expected) > 1:
            spanned.update(expected)


def test_a_gang_gets_an_empty_node_whose_holes_leave_no_block_of_its_size() -> None:
    """It waited for ever where two GPUs of eight were cut, in a model server's hands, or out of service."""
    snapshot = a_snapshot((), [a_node("n0", gpus=8)])
    snapshot = replace(snapshot, nodes=without_devices(snapshot.nodes, {0: {1, 5}}))
    placed = buddy(snapshot, 0, 4, 0, FreeDevices(snapshot.nodes))
    assert placed is not None
    assert placed.shares[0].devices == (0, 2, 3, 4)
