"""Energy: the split adds up to what the counters show, through owners' changes and the agent's death."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest

from services.contracts.nodes import EnergySource
from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import StandIn
from tests.agent.test_ranks import SLEEP

LOADED = ("sh", "-c", 'echo "{\\"done\\": 1, \\"gpu_load\\": $LOAD}" >> $WATTSHIFT_PROGRESS_FILE; sleep 600')
IDLE_W, PEAK_W = 55.0, 400.0


def split_error(plane: StandIn) -> float:
    """How far the owners' energy is from the counters', as a share, over everything delivered."""
    metered = sum(interval.metered_gpu_energy_j for interval in plane.intervals)
    split = sum(usage.gpu_energy_j for interval in plane.intervals for usage in interval.usages)
    return abs(split - metered) / metered


def assert_gapless(plane: StandIn) -> None:
    """Every interval begins where the one before ended."""
    ordered = sorted(plane.intervals, key=lambda interval: interval.start_at)
    for earlier, later in pairwise(ordered):
        assert later.start_at == earlier.end_at


async def test_a_gangs_energy_follows_its_load_and_the_rest_is_idle(node: Node) -> None:
    await node.start(GPU_AGENT_SIMULATED_GPUS="2", GPU_AGENT_STATIC_W="80")
    gang = await node.run(*LOADED, environment={"LOAD": "0.5"}, devices=[1])
    await eventually(lambda: _intervals_of(node.plane, gang) >= 8)
    whole = [i for i in node.plane.intervals if any(u.allocation_id == gang for u in i.usages)][3:]
    seconds = (whole[-1].end_at - whole[0].start_at).total_seconds()
    usages = [usage for interval in whole for usage in interval.usages]
    of_gang = [usage for usage in usages if usage.allocation_id == gang]
    idle_j = sum(usage.gpu_energy_j for usage in usages if usage.allocation_id is None)
    gang_w = sum(usage.gpu_energy_j for usage in of_gang) / seconds
    assert gang_w == pytest.approx(IDLE_W + 0.5 * (PEAK_W - IDLE_W), rel=0.05)
    assert idle_j / seconds == pytest.approx(IDLE_W, rel=0.05)
    static_w = sum(usage.static_energy_j for usage in of_gang) / seconds
    assert static_w == pytest.approx(40, rel=0.001), "one of two devices"
    told = {(usage.progress_done, usage.source, tuple(usage.devices)) for usage in of_gang}
    assert told == {(1, EnergySource.SIMULATED, (1,))}
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)


async def test_an_interval_never_mixes_owners(node: Node) -> None:
    await node.start(GPU_AGENT_ENERGY_INTERVAL_S="30")
    for _ in range(3):
        gang = await node.run("sh", "-c", "sleep 0.3")
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        node.plane.named.clear()
    await eventually(lambda: not node.plane.heartbeats[-1].ranks)
    owned = [[u.devices for u in i.usages if u.allocation_id] for i in node.plane.intervals]
    assert sum(bool(devices) for devices in owned) == 3
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)


async def test_intervals_without_a_gang_are_longer(node: Node) -> None:
    await node.start(GPU_AGENT_ENERGY_INTERVAL_S="0.2")
    await eventually(lambda: len(node.plane.intervals) >= 6)
    gang = await node.run("sleep", "60")
    await eventually(lambda: _intervals_of(node.plane, gang) >= 5)
    lengths_s = [(each.end_at - each.start_at).total_seconds() for each in node.plane.intervals]
    first = next(at for at, each in enumerate(node.plane.intervals) if each.usages[0].allocation_id)
    idle_s, charged_s = lengths_s[first - 3 : first - 1], lengths_s[first:]
    assert min(idle_s) > 0.8, "the last one ends when the gang takes its GPUs, the first ones as the agent starts"
    assert min(charged_s) < 0.8
    assert_gapless(node.plane)


async def test_no_energy_is_lost_or_doubled_when_the_agent_is_killed(node: Node) -> None:
    await node.start()
    lasting = await node.run(*SLEEP, devices=[0])
    go = node.folder / "go"
    ending = await node.run("sh", "-c", f"while [ ! -e {go} ]; do sleep 0.02; done", devices=[1])
    await eventually(lambda: _intervals_of(node.plane, ending) >= 2)
    for kill in range(3):
        node.kill()
        if kill == 1:
            go.touch()
            await eventually(lambda: (node.rank_dir(ending) / "exited").exists())
        await node.start()
        await eventually(lambda: _intervals_of(node.plane, lasting, node.plane.heartbeats[-1].boot_id) >= 3)
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)
    assert len({interval.boot_id for interval in node.plane.intervals}) == 4
    shared = [i for i in node.plane.intervals if any(u.source is EnergySource.MODELLED for u in i.usages)]
    assert len(shared) == 1, "only the gap in which a rank ended is divided by estimate"
    await node.stop()
    lines = [orjson.loads(line) for line in (node.state_dir / "energy.jsonl").read_bytes().splitlines()]
    first_j, last_j = (
        sum(counter_j for counter_j, *_ in line["state"]["devices"].values()) for line in (lines[0], lines[-1])
    )
    metered_j = sum(line["interval"]["metered_gpu_energy_j"] for line in lines[1:])
    assert metered_j == pytest.approx(last_j - first_j, rel=1e-6)


async def test_energy_waits_on_disk_for_a_control_plane_that_is_away(node: Node) -> None:
    await node.start()
    await eventually(lambda: node.plane.intervals)
    node.plane.is_away = True
    last = node.plane.intervals[-1].sequence
    boot_id = node.plane.intervals[-1].boot_id
    await eventually(lambda: len((node.state_dir / "energy.jsonl").read_bytes().splitlines()) > last + 6)
    node.kill()
    node.plane.is_away = False
    await node.start()
    await eventually(lambda: node.plane.deliveries[boot_id, last + 5])
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)


async def test_an_interval_that_is_refused_does_not_hold_up_the_others(node: Node) -> None:
    node.plane.refused_sequences = {2}
    await node.start()
    await eventually(lambda: {1, 3, 4} <= {interval.sequence for interval in node.plane.intervals})
    assert (node.state_dir / "energy.rejected.jsonl").read_text().count("\n") == 1


def _intervals_of(plane: StandIn, allocation: str, boot_id: str = "") -> int:
    return sum(
        any(usage.allocation_id == allocation for usage in interval.usages)
        for interval in plane.intervals
        if boot_id in ("", interval.boot_id)
    )
