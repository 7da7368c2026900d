"""Why a job waits names the nodes that have what it asks for and take no work."""

from __future__ import annotations

import pytest

from tests.scheduler.test_gpu_health import sick
from tests.scheduler.world import World

FULL = "Its disk has 12 MiB left, and 1 GiB are to stay free."


async def why(world: World, job: str) -> tuple[str, str]:
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT reason, detail FROM jobs WHERE id = $1", job)
    return row["reason"], row["detail"]


async def set_node(world: World, name: str, what: str) -> None:
    await world.fetch(f"UPDATE nodes SET {what} WHERE id = $1 RETURNING 1", name)


async def test_a_closed_node_is_named_until_it_takes_work(world: World) -> None:
    await world.node("n1", 2)
    await set_node(world, "n1", f"closed = '{FULL}'")
    job = await world.job(2)
    other = await world.job(1, gpus={"min": 1, "model": "H100"})
    wide = await world.job(5)
    assert await why(world, job) == (
        "node_closed",
        "What it asks for is on nodes that take no work: n1 (Its disk has 12 MiB left, and 1 GiB are to stay free).",
    )
    for cannot in (other, wide):
        assert (await why(world, cannot))[0] == "no_eligible_node"
    await set_node(world, "n1", "closed = 'Its disk is read-only.'")
    await world.node("n2", 1)
    reason, detail = await why(world, job)
    assert (reason, "n1 (Its disk is read-only)" in detail) == ("node_closed", True), "the node that is open is small"
    await set_node(world, "n1", "closed = NULL")
    await world.scheduler.turn()
    assert await world.state(job) == "starting"


async def test_nodes_of_another_zone_would_not_help_a_job_that_fits_only_across_zones(world: World) -> None:
    await world.node("n1", 4, zone="X")
    await world.node("n2", 4, zone="Y")
    await set_node(world, "n2", f"closed = '{FULL}'")
    reason, detail = await why(world, await world.job(6))
    assert reason == "no_eligible_node"
    assert "No grid zone" in detail
    assert (await why(world, await world.job(4, gpus={"min": 4, "zone": "Y"})))[0] == "node_closed"


@pytest.mark.parametrize("hidden", ["drained", "silent", "power", "out of service"])
async def test_whatever_hides_a_node_is_named(world: World, hidden: str) -> None:
    await world.node("n1", 1)
    if hidden == "drained":
        await set_node(world, "n1", "draining = true")
    elif hidden == "silent":
        await set_node(world, "n1", "state = 'lost', lease_until = now() - interval '1 hour'")
    elif hidden == "power":
        await world.fetch("INSERT INTO node_power (node_id, state) VALUES ('n1', 'failed') RETURNING 1")
    else:
        await sick(world, "n1", 0)
    reason, detail = await why(world, await world.job(1))
    assert reason == "node_closed"
    assert "n1 (" in detail
    assert hidden in detail


async def test_a_node_whose_slices_fit_is_named(world: World) -> None:
    await world.node("n1", 1)
    cut = """[{"index": 0, "uuid": "GPU-0", "model": "A100", "memory_gib": 80, "mig_enabled": true},
              {"index": 1024, "uuid": "MIG-1", "parent": 0, "start": 0, "sevenths": 3, "model": "A100",
               "memory_gib": 40}]"""
    await set_node(world, "n1", f"devices = '{cut}', closed = 'Full.'")
    jobs = [await world.job(gpus={"min": 1, "slice": name}) for name in ("3g", "2g")]
    assert [(await why(world, job))[0] for job in jobs] == ["node_closed", "no_such_slice"]
