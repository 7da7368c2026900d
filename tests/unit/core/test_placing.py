"""Consolidated placement: fewest nodes, tightest fit."""

from __future__ import annotations

import pytest

from services.core.cycle.placing import FreeDevices, consolidated
from services.core.domain.errors import DomainError
from tests.support.builders import a_job, a_node, a_snapshot


def place(free_by_node: dict[str, int], gpus: int) -> dict[str, tuple[int, ...]] | None:
    """Place a gang on nodes of 8 with so many free devices each."""
    nodes = [a_node(name, gpus=8) for name in free_by_node]
    held = [a_job(f"on-{name}", on={name: tuple(range(8 - free))}) for name, free in free_by_node.items() if free < 8]
    snapshot = a_snapshot(held, nodes)
    placement = consolidated(snapshot, 0, gpus, 0, FreeDevices(snapshot.nodes))
    return None if placement is None else {share.node_id: share.devices for share in placement.shares}


@pytest.mark.parametrize(
    ("free", "gpus", "expected"),
    [
        pytest.param({"a": 8, "b": 3, "c": 4}, 3, {"b": (5, 6, 7)}, id="the node it fills"),
        pytest.param({"a": 8, "b": 3, "c": 5}, 4, {"c": (3, 4, 5, 6)}, id="the tightest that has room"),
        pytest.param({"a": 4, "b": 4}, 2, {"a": (4, 5)}, id="the first of equals"),
        pytest.param(
            {"a": 2, "b": 8, "c": 8, "d": 3},
            11,
            {"b": (0, 1, 2, 3, 4, 5, 6, 7), "d": (5, 6, 7)},
            id="two nodes where two suffice, the rest on the tightest",
        ),
        pytest.param({"a": 2, "b": 1, "c": 3}, 6, {"c": (5, 6, 7), "a": (6, 7), "b": (7,)}, id="everything there is"),
        pytest.param({"a": 2, "b": 1}, 4, None, id="not enough"),
    ],
)
def test_a_gang_sits_on_the_fewest_nodes_and_the_tightest(
    free: dict[str, int], gpus: int, expected: dict[str, tuple[int, ...]] | None
) -> None:
    assert place(free, gpus) == expected


def test_devices_taken_are_gone_and_other_models_and_drained_nodes_are_not_touched() -> None:
    nodes = [a_node("a", gpus=2), a_node("v", gpus=8, model="V100"), a_node("d", gpus=8, schedulable=False)]
    snapshot = a_snapshot([a_job()], nodes)
    free = FreeDevices(snapshot.nodes)

    assert consolidated(snapshot, 0, 1, 0, free) is not None
    assert consolidated(snapshot, 0, 2, 0, free) is None
    assert free.count.tolist() == [1, 8, 0]
    assert (free.on(0), free.on(2)) == ((1,), ())


def test_more_devices_than_a_node_has_cannot_be_taken() -> None:
    with pytest.raises(DomainError):
        FreeDevices(a_snapshot().nodes).take([(0, 5)])
