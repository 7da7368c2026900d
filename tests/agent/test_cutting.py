"""A node whose GPUs are cut: what it registers, what jobs on slices get, what is left by an agent that is killed."""

from __future__ import annotations

import json

import pytest

from services.contracts.nodes import DeviceInfo, EnergySource, PartitionState, PartitionStatus, WantedPartition
from services.core.domain.controls import ControlKind
from services.core.domain.mig import slice_index
from tests.agent.conftest import Node, eventually
from tests.agent.test_energy import LOADED, assert_gapless, split_error
from tests.agent.test_ranks import SLEEP

FOUR, THREE = slice_index(0, 0), slice_index(0, 4)


def want(node: Node, revision: int, sizes: list[int]) -> None:
    """Want GPU 0 of a node cut."""
    node.plane.partitions = [WantedPartition(gpu=0, revision=revision, sizes=sizes)]


def status(node: Node) -> PartitionStatus:
    """What the node's last heartbeat says of GPU 0."""
    return (node.plane.heartbeats[-1].partitions or [])[0]


def devices(node: Node) -> list[DeviceInfo]:
    """What the node has registered, without whole GPUs."""
    return [device for device in node.plane.registrations[-1].devices if device.parent is not None]


async def cut(node: Node, revision: int, sizes: list[int]) -> None:
    """Have GPU 0 cut."""
    want(node, revision, sizes)
    await eventually(lambda: (status(node).revision, status(node).state) == (revision, PartitionState.APPLIED))


async def test_slices_are_registered_before_the_cut_is_reported_as_done(node: Node) -> None:
    await node.start(GPU_AGENT_SIMULATED_GPUS="2")
    assert [each.sizes for each in node.plane.heartbeats[-1].partitions or []] == [[], []]
    assert devices(node) == []
    await cut(node, 1, [4, 3])
    assert [(each.index, each.parent, each.profile) for each in devices(node)] == [
        (FOUR, 0, "4g.20gb"),
        (THREE, 0, "3g.20gb"),
    ]
    assert [each.mig_enabled for each in node.plane.registrations[-1].devices[:2]] == [True, False]
    applied = next(
        number
        for number, beat in enumerate(node.plane.heartbeats)
        if any(each.revision == 1 and each.state is PartitionState.APPLIED for each in beat.partitions or ())
    )
    assert node.plane.registered[applied] == 2
    await cut(node, 2, [])
    assert devices(node) == []


async def test_a_job_on_a_slice_sees_it_and_keeps_it(node: Node) -> None:
    await node.start()
    await cut(node, 1, [4, 3])
    uuid = devices(node)[1].uuid
    out = node.folder / "out"
    gang = await node.run(
        "sh",
        "-c",
        f"echo $CUDA_VISIBLE_DEVICES > {out}; sleep 600",
        devices=[THREE],
        uuids=[uuid],
        gpus={"slice": "3g"},
    )
    await eventually(lambda: out.exists() and out.read_text() == f"{uuid}\n")
    want(node, 2, [7])
    await eventually(lambda: status(node).detail == f"still used by {gang}")
    assert (status(node).state, status(node).sizes) == (PartitionState.PENDING, [4, 3])
    node.plane.named.clear()
    await eventually(lambda: status(node).state is PartitionState.APPLIED)
    assert status(node).sizes == [7]
    assert [each.index for each in devices(node)] == [FOUR]


@pytest.mark.parametrize("is_cut_meanwhile", [False, True])
async def test_a_job_whose_slice_is_gone_is_refused(node: Node, is_cut_meanwhile: bool) -> None:
    await node.start()
    await cut(node, 1, [4, 3])
    uuid = devices(node)[0].uuid
    await cut(node, 2, [7] if is_cut_meanwhile else [])
    gang = await node.run(*SLEEP, devices=[FOUR], uuids=[uuid], gpus={"slice": "4g"})
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.ended_by, rank.detail) == (
        "refused",
        f"Its MIG slice is gone: device {FOUR} is no slice any more, or another one",
    )


async def test_a_gpu_that_is_cut_is_no_device_for_a_job(node: Node) -> None:
    await node.start()
    await cut(node, 1, [4])
    gang = await node.run(*SLEEP, devices=[0])
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.detail == "this node has no device 0, or it is cut into slices"


async def test_the_energy_of_slices_adds_up_to_the_counter(node: Node) -> None:
    await node.start(GPU_AGENT_SIMULATED_GPUS="1")
    await cut(node, 1, [4, 3])
    uuids = {device.index: device.uuid for device in devices(node)}
    gangs: dict[int, str] = {}
    for index, load in ((FOUR, "1.0"), (THREE, "0.5")):
        options = {"devices": [index], "uuids": [uuids[index]], "environment": {"LOAD": load}}
        gangs[index] = await node.run(*LOADED, **options)
    await eventually(
        lambda: sum({*gangs.values()} <= {u.allocation_id for u in i.usages} for i in node.plane.intervals) >= 8
    )
    whole = [i for i in node.plane.intervals if {*gangs.values()} <= {u.allocation_id for u in i.usages}][4:]
    used = {
        index: sum(u.gpu_energy_j for i in whole for u in i.usages if u.allocation_id == gang)
        for index, gang in gangs.items()
    }
    assert {u.source for i in whole for u in i.usages if u.allocation_id} == {EnergySource.ESTIMATED}
    assert sum(used.values()) == pytest.approx(sum(i.metered_gpu_energy_j for i in whole), rel=1e-6)
    idle_w, above_w = 55.0, 345.0 * (4 * 1.0 + 3 * 0.5) / 7
    expected = (idle_w * 4 / 7 + above_w * 4 / 5.5) / (idle_w * 3 / 7 + above_w * 1.5 / 5.5)
    assert used[FOUR] / used[THREE] == pytest.approx(expected, rel=0.03)
    await cut_after(node, 2, [])
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)


async def cut_after(node: Node, revision: int, sizes: list[int]) -> None:
    """End what runs, and have GPU 0 cut."""
    node.plane.named.clear()
    await cut(node, revision, sizes)


async def test_clocks_of_a_slice_are_refused_with_the_reason(node: Node) -> None:
    await node.start()
    await cut(node, 1, [4, 3])
    gang = await node.run(*SLEEP, devices=[FOUR])
    await node.set(gang, 1, mhz=705)

    def reason() -> str | None:
        rank = node.plane.rank(gang)
        return rank.settings.refused.get(ControlKind.CLOCK) if rank and rank.settings else None

    await eventually(reason)
    assert reason() == (f"device {FOUR}: it is a slice: clock, power limit and power are those of GPU 0 as a whole")


async def test_an_agent_killed_in_the_middle_of_a_cut_finishes_it(node: Node) -> None:
    await node.start()
    await cut(node, 1, [4, 3])
    faults = node.state_dir / "simulated_faults.json"
    faults.write_text(json.dumps([{"step": "create", "outcome": "hold", "skip": 1}]))
    want(node, 2, [2, 2, 3])
    await eventually(
        lambda: json.loads((node.state_dir / "simulated.json").read_text())["slices"][0] == [[2, 0], [3, 4]]
    )
    node.kill()
    faults.unlink()
    heard = len(node.plane.heartbeats)
    await node.start()
    await eventually(lambda: len(node.plane.heartbeats) > heard and status(node).state is PartitionState.APPLIED)
    assert (status(node).revision, status(node).sizes) == (2, [2, 2, 3])
    assert [each.sevenths for each in devices(node)] == [2, 2, 3]


async def test_a_driver_that_says_busy_leaves_the_gpu_as_it_was(node: Node) -> None:
    await node.start(GPU_AGENT_PARTITION_RETRY_S="0.2")
    await cut(node, 1, [4, 3])
    faults = node.state_dir / "simulated_faults.json"
    faults.write_text(json.dumps([{"step": "destroy", "outcome": "busy", "skip": 1}]))
    want(node, 2, [7])
    await eventually(lambda: status(node).state is PartitionState.BUSY)
    assert status(node).detail == "In use by another client"
    faults.unlink()
    await eventually(lambda: status(node).state is PartitionState.APPLIED)
    assert status(node).sizes == [7]
