"""Buddy placement: aligned blocks, the smallest that suffice, and at most one gang per node that spans nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from services.core.cycle.buddy import buddy, free_blocks
from services.core.cycle.placing import FreeDevices, mask_of
from services.core.cycle.snapshot import Snapshot
from tests.support.builders import a_job, a_node, a_snapshot


def cluster(held: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> Snapshot:
    """Return nodes of these sizes, each with one job on the devices held."""
    jobs = [a_job(f"on-{name}", on={name: devices}) for name, devices in held.items()]
    return a_snapshot(jobs, [a_node(name, gpus=gpus) for name, gpus in sizes.items()])


def place(snapshot: Snapshot, *gangs: int) -> list[dict[str, tuple[int, ...]] | None]:
    """Place gangs one after the other; return node and devices of each."""
    free = FreeDevices(snapshot.nodes)
    placed = [buddy(snapshot, 0, gpus, 0, free) for gpus in gangs]
    return [None if each is None else {share.node_id: share.devices for share in each.shares} for each in placed]


def test_blocks_begin_at_multiples_of_their_size() -> None:
    masks = np.array([mask_of(range(8)), mask_of((1, 2, 3, 6, 7)), mask_of((1, 2, 5))])

    assert free_blocks(masks, 1).tolist() == [0b01010101, 0b01000100, 0]
    assert free_blocks(masks, 2).tolist() == [0b00010001, 0, 0]
    assert free_blocks(masks, 3).tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    ("held", "gpus", "expected"),
    [
        pytest.param({"b": (0,)}, 1, {"b": (1,)}, id="the buddy of what is taken"),
        pytest.param({"b": (0, 1)}, 2, {"b": (2, 3)}, id="the smallest block"),
        pytest.param({"a": (0,), "b": (0, 4, 5)}, 2, {"b": (2, 3)}, id="of equals the fullest node"),
        pytest.param({}, 8, {"a": tuple(range(8))}, id="the first of equals"),
        pytest.param({"a": (3, 4), "b": (0, 4)}, 4, None, id="no block, though devices enough"),
        pytest.param({"b": (0, 1, 2, 3)}, 3, {"b": (4, 5, 6)}, id="the beginning of the next power of two"),
    ],
)
def test_a_gang_sits_in_one_of_the_smallest_free_blocks(
    held: dict[str, tuple[int, ...]], gpus: int, expected: dict[str, tuple[int, ...]] | None
) -> None:
    assert place(cluster(held, {"a": 8, "b": 8}), gpus) == [expected]


def test_a_wide_gang_takes_whole_nodes_and_one_gang_at_most_spans_a_node() -> None:
    snapshot = cluster({}, {"a": 4, "b": 4, "c": 4})

    assert place(snapshot, 8, 4) == [{"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}, {"c": (0, 1, 2, 3)}]
    assert place(snapshot, 5, 5, 2) == [{"a": (0, 1, 2, 3), "b": (0,)}, None, {"b": (2, 3)}]
    wide = a_snapshot(
        [a_job("w", on={"a": (0, 1, 2, 3), "b": (0,)})], [a_node(name, gpus=4) for name in ("a", "b", "c", "d")]
    )
    assert place(wide, 5) == [{"c": (0, 1, 2, 3), "d": (0,)}]


def test_nodes_of_other_sizes_than_powers_of_two_serve_whole_gangs() -> None:
    assert place(cluster({}, {"a": 6, "b": 6}), 6, 2, 5, 4) == [
        {"a": (0, 1, 2, 3, 4, 5)},
        {"b": (4, 5)},
        None,
        {"b": (0, 1, 2, 3)},
    ]


def test_nodes_awake_come_before_nodes_asleep() -> None:
    snapshot = cluster({}, {"a": 4, "b": 4, "c": 4})
    sleepy = replace(snapshot, nodes=replace(snapshot.nodes, asleep=np.array([True, False, True])))

    assert place(sleepy, 4, 8) == [{"b": (0, 1, 2, 3)}, {"a": (0, 1, 2, 3), "c": (0, 1, 2, 3)}]
