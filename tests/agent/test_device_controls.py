"""Settings of gangs on a running agent: set, kept over kills, taken back at every kind of end."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from services.contracts.nodes import MeasuredInterval
from services.contracts.streams import command_stream
from tests.agent.conftest import Node, eventually
from tests.agent.test_ranks import SLEEP


def in_force(node: Node, gang: str) -> tuple[Any, ...] | None:
    """Return (revision, watts, MHz) of a gang's settings in the newest heartbeat."""
    rank = node.plane.rank(gang)
    said = rank.settings if rank else None
    return said and (said.revision, said.power_limit_w, said.clock_mhz)


def limits(node: Node) -> list[float | None]:
    """Return the limit of each device in the newest heartbeat."""
    return [device.power_limit_w for device in node.plane.heartbeats[-1].devices]


def devices(node: Node) -> list[tuple[float, int]]:
    """Return limit and clock of each simulated device, as the driver keeps them."""
    state = json.loads((node.state_dir / "simulated.json").read_text())
    return [(limit_w, clock_mhz) for limit_w, clock_mhz, *_ in state["devices"]]


async def test_a_gang_is_set_while_it_runs_and_its_end_restores_the_defaults(node: Node) -> None:
    await node.start()
    default = devices(node)
    gang = await node.run(*SLEEP, devices=[0])
    await node.set(gang, 1, w=200.0)
    await eventually(lambda: in_force(node, gang) == (1, 200.0, None))
    await eventually(lambda: limits(node)[0] == 200.0)
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.settings is not None
    assert rank.settings.enforced_w == [200.0], "read back from the device"
    assert rank.settings.since is not None
    drawn_w = node.plane.heartbeats[-1].devices[0].power_w
    assert drawn_w <= 200.0
    await node.set(gang, 3, w=150.0)
    await node.set(gang, 2, w=300.0)  # overtaken
    await eventually(lambda: in_force(node, gang) == (3, 150.0, None))
    node.plane.named.discard(gang)
    await eventually(lambda: node.plane.state(gang) in ("exited", None))
    await eventually(lambda: devices(node) == default)
    follower = await node.run(*SLEEP, devices=[0])
    await eventually(lambda: node.plane.state(follower) == "running")
    assert devices(node) == default, "the next gang inherits nothing"
    assert in_force(node, follower) is None


async def test_a_gang_that_starts_with_settings_is_set_before_it_runs(node: Node) -> None:
    await node.start()
    node.plane.is_away = True  # so that it starts only once its settings are there
    gang = node.gang(*SLEEP, devices=[0, 1])
    node.plane.named.add(gang.allocation_id)
    await node.send(gang)
    await node.set(gang.allocation_id, 1, w=200.0)
    await eventually(lambda: (node.rank_dir(gang.allocation_id) / "settings.json").exists())
    node.plane.is_away = False
    await eventually(lambda: node.plane.state(gang.allocation_id) == "running")
    assert in_force(node, gang.allocation_id) == (1, 200.0, None)


async def test_a_setting_the_device_refuses_is_said_and_the_gang_runs_on(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP, devices=[0])
    await node.set(gang, 1, w=5.0)
    await eventually(lambda: in_force(node, gang) == (1, None, None))
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.settings is not None
    assert list(rank.settings.refused) == ["power_limit"]
    await eventually(lambda: node.plane.state(gang) == "running")


async def test_a_killed_agent_leaves_no_setting_to_anybody_else(node: Node) -> None:
    await node.start()
    default = devices(node)
    kept = await node.run(*SLEEP, devices=[0])
    gone = await node.run(*SLEEP, devices=[1])
    for gang in (kept, gone):
        await node.set(gang, 1, w=200.0)
        await eventually(lambda gang=gang: in_force(node, gang) == (1, 200.0, None))
    node.kill()
    (node.rank_dir(gone) / "stop").touch()
    node.kill_ranks(gone)
    await node.start()
    await eventually(lambda: node.plane.state(gone) == "exited")
    await eventually(lambda: devices(node)[1] == default[1])
    await eventually(lambda: in_force(node, kept) == (1, 200.0, None))
    assert devices(node)[0][0] == 200.0


async def test_a_command_that_was_not_acknowledged_is_obeyed_by_the_next_agent(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP, devices=[0])
    await eventually(lambda: node.plane.state(gang) == "running")
    node.kill()
    await node.set(gang, 1, w=200.0)
    await node.set(gang, 1, w=200.0)  # at least once
    await node.start()
    await eventually(lambda: in_force(node, gang) == (1, 200.0, None))
    assert not await node.redis.xlen(command_stream(node.id))


async def test_a_gang_that_outlives_its_agent_keeps_its_limit_for_the_next_one(node: Node) -> None:
    """Or stopping an agent would have its node draw more while an order of the grid stands."""
    await node.start()
    default = devices(node)
    gang = await node.run(*SLEEP, devices=[0])
    await node.set(gang, 1, w=200.0)
    await eventually(lambda: in_force(node, gang) == (1, 200.0, None))
    await node.stop()
    assert devices(node) == [(200.0, default[0][1]), *default[1:]]
    await node.start()
    await eventually(lambda: in_force(node, gang) == (1, 200.0, None))


async def test_without_a_control_plane_limits_stay_until_the_gang_is_gone(node: Node) -> None:
    """A node that is cut off does not draw more than it may: here its gang outlives the lease, as its shim stands."""
    await node.start()
    default = devices(node)
    gang = await node.run(*SLEEP, devices=[0])
    await node.set(gang, 1, w=200.0)
    await eventually(lambda: in_force(node, gang) == (1, 200.0, None))
    for process in node.processes("shim"):
        process.send_signal(signal.SIGSTOP)
    node.plane.lease_ttl_s = 0.1
    heard = len(node.plane.heartbeats)
    await eventually(lambda: len(node.plane.heartbeats) > heard + 1)
    node.plane.is_away = True
    while json.loads((await node.get("/v1/state"))[2])["lease_left_s"] > 0:
        pass
    await node.set(gang, 2, w=150.0)  # by which the agent shows that it has looked since
    await eventually(lambda: devices(node)[0][0] == 150.0)
    assert devices(node)[1:] == default[1:]
    for process in node.processes("shim"):
        process.send_signal(signal.SIGCONT)
    await eventually(lambda: devices(node) == default)


WORKING = """
import itertools, json, os, time
with open(os.environ["WATTSHIFT_PROGRESS_FILE"], "a") as file:
    for done in itertools.count():
        print(json.dumps({"done": done, "local_batch": 32}), file=file, flush=True)
        time.sleep(0.05)
"""


def slice_of(node: Node, gang: str) -> MeasuredInterval | None:
    """Return what the newest heartbeat says of a gang that is measured."""
    rank = node.plane.rank(gang)
    return rank.settings.interval if rank and rank.settings else None


async def until_over(node: Node, gang: str) -> MeasuredInterval:
    await eventually(lambda: (seen := slice_of(node, gang)) is not None and seen.over)
    found = slice_of(node, gang)
    assert found is not None
    return found


async def test_a_gang_that_is_measured_is_counted_from_report_to_report(node: Node) -> None:
    await node.start()
    gang = await node.run(sys.executable, "-c", WORKING, devices=[0])
    await node.set(gang, 1, w=200.0, interval_s=1.0)

    found = await until_over(node, gang)
    assert found.local_batch == 32
    assert found.work >= found.marks - 1 >= 1
    assert found.elapsed_s >= 1.0
    assert 0 < found.gpu_energy_j / found.elapsed_s < 220.0, "the limit's draw, and not the default's"
    heard = len(node.plane.heartbeats)
    await eventually(lambda: len(node.plane.heartbeats) > heard + 1)
    assert slice_of(node, gang) == found, "it stays as it is"
    await node.set(gang, 2)
    await eventually(lambda: in_force(node, gang) == (2, None, None))
    assert slice_of(node, gang) is None, "nobody asks any more"


async def test_an_agent_killed_within_a_slice_begins_it_anew_and_harms_no_job(node: Node) -> None:
    await node.start()
    default = devices(node)
    gang = await node.run(sys.executable, "-c", WORKING, devices=[0])
    await node.set(gang, 1, w=200.0, interval_s=600.0)
    await eventually(lambda: (seen := slice_of(node, gang)) is not None and seen.marks >= 8)
    workers = {process.pid for process in node.processes()}
    node.kill()
    assert devices(node)[0][0] == 200.0, "nobody was there to take it back"
    heard = len(node.plane.heartbeats)
    await node.start()
    await eventually(lambda: slice_of(node, gang) is not None and len(node.plane.heartbeats) > heard + 1)
    of_gang = [rank for beat in node.plane.heartbeats[heard:] for rank in beat.ranks if rank.settings]
    first = next(rank.settings.interval for rank in of_gang if rank.settings and rank.settings.interval)
    assert first.marks < 8, "of the interval before nothing is left"
    assert {process.pid for process in node.processes()} == workers, "the same processes, no twin"
    await node.set(gang, 2)  # the measurement goes on or ends: either way there is a next revision
    await eventually(lambda: devices(node) == default)
    assert node.plane.state(gang) == "running"
