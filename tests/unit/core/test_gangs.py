"""Tables of speed and power by gang size and setting, and how snapshots and records keep them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lab.recording import plan_to_json, snapshot_to_json
from lab.replay import snapshot_from_json
from services.core.cycle.plan import Plan, PowerNode
from services.core.domain.controls import ControlKind
from services.core.domain.errors import DomainError
from services.core.domain.gangs import GangTable, StackedTables
from services.core.domain.ids import NodeId
from services.core.domain.reasons import Reason
from tests.support.builders import a_job, a_snapshot


def a_table(sizes: tuple[int, ...] = (1, 2, 4)) -> GangTable:
    gpus = np.array(sizes)
    speed = gpus[:, None] ** 0.5 * np.array([0.5, 1.0])
    return GangTable(
        gpus, speed, gpus[:, None] * np.array([100.0, 200.0]), ControlKind.CLOCK, np.array([800.0, 1600.0])
    )


def test_between_sizes_a_table_is_linear_and_outside_the_nearest_per_gpu() -> None:
    speed, power_w = a_table().at(np.array([1, 3, 4, 8]))

    assert speed[:, 1].tolist() == pytest.approx([1.0, (2**0.5 + 2) / 2, 2.0, 2.0])
    assert power_w[:, 0].tolist() == pytest.approx([100.0, 300.0, 400.0, 800.0])
    assert a_table((2,)).at(np.array([1, 2]))[1].tolist() == [[100.0, 200.0], [200.0, 400.0]]


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.inf, np.nan])
@pytest.mark.parametrize("field", ["speed", "power_w"])
def test_a_speed_or_a_power_is_finite_and_above_nothing(field: str, wrong: float) -> None:
    values = np.array([[0.5, 1.0], [0.7, wrong], [1.0, 2.0]])
    with pytest.raises(DomainError, match="finite and above 0"):
        replace(a_table(), **{field: values})


def test_many_tables_at_once_say_what_each_says() -> None:
    sizes = [(1, 2, 4), (2, 8), (1, 2, 4), (3,)]
    tables = [replace(a_table(each), speed=a_table(each).speed * (1 + at)) for at, each in enumerate(sizes)]
    tables.append(a_table().default_only())
    which, gpus = np.array([0, 1, 2, 2, 3, 4, 0]), np.array([[1, 3], [2, 8], [4, 16], [3, 5], [1, 6], [2, 4], [7, 4]])
    stacked = StackedTables(tables)
    speed, power_w = stacked.at(which, gpus)
    default_speed, default_w = stacked.at(which, gpus, default=True)
    for row, table in enumerate(tables[at] for at in which.tolist()):
        of_speed, of_power_w = table.at(gpus[row])
        width = table.values.size
        assert speed[row, :, :width].tolist() == of_speed.tolist()
        assert power_w[row, :, :width].tolist() == of_power_w.tolist()
        assert not speed[row, :, width:].any()
        assert default_speed[row, :, 0].tolist() == of_speed[:, -1].tolist()
        assert default_w[row, :, 0].tolist() == of_power_w[:, -1].tolist()


def test_where_nothing_can_be_set_the_default_remains() -> None:
    table = a_table().default_only()

    assert table.kind is None
    assert table.at(np.array([4]))[0].tolist() == [[2.0]]


def test_an_impossible_table_is_refused() -> None:
    good = a_table()
    for change in (
        {"gpus": np.array([1, 1, 2])},
        {"gpus": np.array([1, 2])},
        {"speed": -good.speed},
        {"values": good.values[::-1]},
        {"kind": None},
    ):
        with pytest.raises(DomainError):
            replace(good, **change)


def test_a_snapshot_keeps_tables_and_what_nodes_draw_and_do_through_json() -> None:
    snapshot = a_snapshot([a_job("a")])
    nodes = replace(snapshot.nodes, asleep=np.array([True]), may_sleep=np.array([True]))
    written = replace(
        snapshot, nodes=nodes, gangs=({0: a_table()}, {}), idle_w=np.array([55.0]), next_active_s=9.0, placement="buddy"
    )

    read = snapshot_from_json(json.loads(json.dumps(snapshot_to_json(written))))

    assert (read.version, read.now_s, read.trigger) == (written.version, written.now_s, written.trigger)
    found = read.gangs[0][0]
    assert (found.gpus.tolist(), found.kind, found.values.tolist()) == ([1, 2, 4], ControlKind.CLOCK, [800.0, 1600.0])
    assert np.array_equal(found.power_w, a_table().power_w)
    assert (read.gangs[1], read.idle_w.tolist(), read.next_active_s, read.placement) == ({}, [55.0], 9.0, "buddy")
    assert (read.nodes.asleep.tolist(), read.nodes.may_sleep.tolist()) == ([True], [True])
    assert np.isnan(snapshot_from_json(json.loads(json.dumps(snapshot_to_json(snapshot)))).next_active_s)


def test_records_say_which_node_is_powered_down_or_woken() -> None:
    nodes = (PowerNode(NodeId("n0"), False, Reason.UNUSED), PowerNode(NodeId("n1"), True, Reason.NEEDED))

    assert plan_to_json(Plan(7, (), nodes)) == [
        {"action": "power_down", "node_id": "n0", "reason": "unused"},
        {"action": "wake", "node_id": "n1", "reason": "needed"},
    ]
