"""Jobs whose checkpoint is on a node alone: what binds them to it, what they wait for there, and what lets them go."""

from __future__ import annotations

import pytest

from services.scheduler.repository.snapshots import BOUND
from tests.scheduler.world import World


async def two_nodes(world: World, mode: str = "local") -> None:
    for name in ("n0", "n1"):
        await world.node(name)
    await world.fetch("UPDATE nodes SET checkpoints = $1 RETURNING 1", mode)


async def stopped(world: World, job: str, *, began: bool = True, holds: bool | None = True) -> str:
    """Let a job run and be stopped; return the node it ran on."""
    await world.scheduler.turn()
    gang = await world.allocation(job)
    await world.report(gang, "running" if began else "starting")
    if began:
        await world.fetch("UPDATE rank_statuses SET started_at = now() WHERE allocation_id = $1 RETURNING 1", gang)
    await world.fetch(
        "UPDATE allocations SET state = 'stopping', stop_reason = 'preempted' WHERE id = $1 RETURNING 1", gang
    )
    await world.fetch("UPDATE jobs SET state = 'preempting', hold_requested = true WHERE id = $1 RETURNING 1", job)
    await world.report(gang, "exited", exit_code=-15, ended_by="stop")
    await world.fetch(
        "UPDATE rank_statuses SET holds_checkpoint = $2 WHERE allocation_id = $1 RETURNING 1", gang, holds
    )
    await world.scheduler.turn()
    (row,) = await world.fetch(
        "SELECT j.state, a.shares FROM jobs j JOIN allocations a ON a.id = $1 WHERE j.id = $2", gang, job
    )
    assert row["state"] == "held"
    return row["shares"][0]["node_id"]


async def bound_to(world: World, job: str) -> list[str] | None:
    (row,) = await world.fetch("SELECT bound_to FROM jobs WHERE id = $1", job)
    return row["bound_to"]


async def released(world: World, job: str) -> tuple[str, str | None, str | None]:
    """Let a held job go on; return how it stands after a round."""
    await world.fetch("UPDATE jobs SET state = 'queued', reason = NULL WHERE id = $1 RETURNING 1", job)
    await world.scheduler.turn()
    (row,) = await world.fetch("SELECT state, reason, detail FROM jobs WHERE id = $1", job)
    return row["state"], row["reason"], row["detail"]


@pytest.mark.parametrize("holds", [True, None])
async def test_a_job_that_ran_goes_back_to_the_node_that_alone_has_its_checkpoint(world: World, holds: bool) -> None:
    await two_nodes(world)
    job = await world.job(2)
    on = await stopped(world, job, holds=holds)
    assert await bound_to(world, job) == [on]
    rival = await world.job(4)
    await world.fetch("UPDATE nodes SET draining = id <> $1 RETURNING 1", on)
    await world.scheduler.turn()  # the rival takes the whole node
    assert await world.state(rival) == "starting"
    await world.fetch("UPDATE nodes SET draining = false RETURNING 1")

    state, reason, detail = await released(world, job)

    assert (state, reason) == ("queued", "checkpoint_node_busy")
    assert f"It waits for {on};" in (detail or "")


@pytest.mark.parametrize(
    ("mode", "began", "holds"),
    [("local", False, None), ("local", True, False), ("store", True, None), (None, True, None)],
)
async def test_a_job_without_a_checkpoint_on_one_node_alone_is_free(
    world: World, mode: str, began: bool, holds: bool | None
) -> None:
    await two_nodes(world, mode)
    job = await world.job(2)
    on = await stopped(world, job, began=began, holds=holds)

    assert await bound_to(world, job) is None
    await world.fetch("UPDATE nodes SET draining = true WHERE id = $1 RETURNING 1", on)
    assert (await released(world, job))[0] == "starting"


async def test_a_job_that_names_its_folder_is_free(world: World) -> None:
    await two_nodes(world)
    job = await world.job(2, checkpoint_dir="/nfs/a")
    await stopped(world, job)

    assert await bound_to(world, job) is None


async def test_a_gang_that_never_began_leaves_its_job_bound(world: World) -> None:
    await two_nodes(world)
    job = await world.job(2)
    on = await stopped(world, job)
    await world.fetch("UPDATE jobs SET state = 'queued' WHERE id = $1 RETURNING 1", job)
    assert await stopped(world, job, began=False, holds=None) == on

    assert await bound_to(world, job) == [on]


@pytest.mark.parametrize(
    ("change", "reason"), [("draining = true", "checkpoint_node_closed"), ("state = 'lost'", "checkpoint_node_away")]
)
async def test_a_job_waits_for_its_node_until_its_checkpoint_is_forgotten(
    world: World, change: str, reason: str
) -> None:
    await two_nodes(world)
    job = await world.job(2)
    on = await stopped(world, job)
    await world.fetch(f"UPDATE nodes SET {change} WHERE id = $1 RETURNING 1", on)

    state, said, detail = await released(world, job)

    assert (state, said) == ("queued", reason)
    assert f"It waits for {on}; `wattshift forget-checkpoint` lets it begin anew elsewhere." in (detail or "")
    await world.fetch("UPDATE jobs SET bound_to = NULL WHERE id = $1 RETURNING 1", job)
    assert (await released(world, job))[0] == "starting"


async def test_a_gang_that_runs_on_such_a_node_is_bound_to_it_in_the_snapshot(world: World) -> None:
    await two_nodes(world)
    job = await world.running(2, checkpoint_dir=None)
    other = await world.running(1, checkpoint_dir="/nfs/a")
    bound = {row["job_id"]: row["nodes"] for row in await world.fetch(BOUND)}

    assert [*bound] == [job]
    assert len(bound[job]) == 1
    assert other not in bound
