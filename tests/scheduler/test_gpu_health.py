"""GPUs that are out of service: nothing new runs there, and gangs that hold a lost one end without blame."""

from __future__ import annotations

import pytest

from tests.scheduler.world import World


async def a_node(world: World, name: str, gpus: int) -> None:
    await world.node(name, gpus)
    await world.fetch(
        "UPDATE nodes SET devices = (SELECT jsonb_agg(d || jsonb_build_object('uuid', 'GPU-' || (d ->> 'index')))"
        " FROM jsonb_array_elements(devices) d) WHERE id = $1 RETURNING 1",
        name,
    )


async def sick(world: World, node: str, gpu: int, *, ends_gangs: bool = True) -> None:
    await world.fetch(
        "INSERT INTO gpu_health (node_id, gpu, uuid, fault_id, cause, detail, ends_gangs) "
        "VALUES ($1, $2, 'GPU-' || $2::int, 'f', 'lost', 'It is lost (GPU is lost).', $3) RETURNING 1",
        node,
        gpu,
        ends_gangs,
    )


async def drain(world: World, node: str, gpu: int) -> None:
    await world.fetch(
        "INSERT INTO gpu_health (node_id, gpu, uuid, drained) VALUES ($1, $2, 'GPU-' || $2::int, true) RETURNING 1",
        node,
        gpu,
    )


async def devices(world: World, job: str) -> list[int]:
    (row,) = await world.fetch("SELECT shares FROM allocations WHERE id = $1", await world.allocation(job))
    return [device for share in row["shares"] for device in share["devices"]]


async def test_jobs_run_on_the_seven_that_are_well(world: World) -> None:
    await a_node(world, "n1", 8)
    await sick(world, "n1", 3)
    await world.fetch(
        "INSERT INTO gpu_health (node_id, gpu, uuid, drained) VALUES ('n1', 5, 'GPU-5', true) RETURNING 1"
    )
    seven, six = await world.job(7), await world.job(6)
    await world.scheduler.turn()
    assert (await world.state(seven), await world.state(six)) == ("queued", "starting")
    assert await devices(world, six) == [0, 1, 2, 4, 6, 7]


async def test_a_gang_on_a_lost_gpu_ends_and_waits_again_without_blame(world: World) -> None:
    await a_node(world, "n1", 2)
    await a_node(world, "n2", 2)
    job = await world.running(4, max_restarts=0)
    await sick(world, "n1", 1)
    await world.scheduler.turn()
    assert await world.state(job) == "preempting"
    await world.exits(job, exit_code=1)
    (row,) = await world.fetch("SELECT state, restarts, preemptions FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("queued", 0, 0)
    (row,) = await world.fetch("SELECT end_reason FROM allocations")
    assert row["end_reason"] == "gpu_lost"
    assert await world.claims() == 0


async def test_a_failure_that_is_reported_with_the_fault_is_the_gpus(world: World) -> None:
    await a_node(world, "n1", 2)
    job = await world.running(1)
    (held,) = await devices(world, job)
    await sick(world, "n1", held)
    await world.exits(job, exit_code=1)
    (row,) = await world.fetch("SELECT state, restarts FROM jobs WHERE id = $1", job)
    assert tuple(row) == ("starting", 0), "on the other GPU"
    assert await devices(world, job) == [1 - held]


async def test_a_drained_gpu_and_a_hot_one_keep_what_runs(world: World) -> None:
    await a_node(world, "n1", 2)
    runs = await world.running(2)
    await sick(world, "n1", 0, ends_gangs=False)
    await world.fetch(
        "INSERT INTO gpu_health (node_id, gpu, uuid, drained) VALUES ('n1', 1, 'GPU-1', true) RETURNING 1"
    )
    await world.scheduler.turn()
    assert await world.state(runs) == "running"
    await world.exits(runs)
    waits = await world.job()
    await world.scheduler.turn()
    assert await world.state(waits) == "queued"
    await world.fetch("UPDATE gpu_health SET drained = false RETURNING 1")
    await world.scheduler.turn()
    assert await world.state(waits) == "starting"


@pytest.mark.parametrize("agent_sees_any", [True, False])
async def test_a_gpu_that_a_restarted_agent_no_longer_finds(world: World, agent_sees_any: bool) -> None:
    await a_node(world, "n1", 2)
    job = await world.running(2)
    kept = "devices - 1" if agent_sees_any else "'[]'::jsonb"
    await world.fetch(f"UPDATE nodes SET devices = {kept}, registered_at = now() RETURNING 1")
    await world.scheduler.turn()
    assert await world.state(job) == ("preempting" if agent_sees_any else "running")
