"""Nodes whose agents only measure: nothing of ours goes there."""

from __future__ import annotations

import pytest

from services.scheduler.service import PowerRefusedError, SchedulerService
from tests.scheduler.world import World
from tests.support.control_plane import OPERATOR


async def test_no_job_is_placed_on_a_node_that_only_measures(world: World) -> None:
    await world.node("measured", 8)
    await world.fetch("UPDATE nodes SET measures_only = true, engine_node = 'slurm.measured'")
    job = await world.job(2)
    await world.scheduler.turn()
    assert (await world.state(job), await world.claims()) == ("queued", 0)
    (row,) = await world.fetch("SELECT reason FROM jobs")
    assert row["reason"] == "no_eligible_node", "plans do not see it"
    await world.node("ours", 2)
    await world.scheduler.turn()
    held = await world.fetch("SELECT DISTINCT node_id FROM device_claims")
    assert [row["node_id"] for row in held] == ["ours"]


async def test_one_that_only_measures_from_now_on_gets_nothing_more(world: World) -> None:
    node = await world.node("host", 4)
    first = await world.running(1)
    await world.fetch("UPDATE nodes SET measures_only = true")
    second = await world.job(1)
    await world.scheduler.turn()
    assert (await world.state(first), await world.state(second)) == ("running", "queued")
    assert await world.claims() == 1, f"what {node} held is still its job's until its agent says that it is gone"


async def test_it_is_not_powered_down_either(world: World) -> None:
    await world.node("measured", 8)
    await world.fetch("UPDATE nodes SET measures_only = true")
    with pytest.raises(PowerRefusedError, match="only measures"):
        await SchedulerService(world.database).sleep("measured", OPERATOR)
