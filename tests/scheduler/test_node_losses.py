"""A job under which nodes are lost again and again is held; a wide outage is no job's doing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.scheduler.ingest.gangs import LOSSES_FORGOTTEN_S
from services.scheduler.repository import gangs
from services.scheduler.restored import make_fit
from tests.scheduler.test_gpu_health import sick
from tests.scheduler.world import World, a_world

HOUR_S = 3_600.0
MOST_NODE_LOSSES = 3
"""The default of ``SCHEDULER_MAX_NODE_LOSSES``."""


async def told(world: World, job: str) -> tuple[str, str, str, int]:
    """Return a job's state, its reason in a code and in words, and how often it lost a node."""
    (row,) = await world.fetch("SELECT state, reason, detail, node_losses FROM jobs WHERE id = $1", job)
    return tuple(row)


async def losses(world: World, job: str) -> int:
    return (await told(world, job))[3]


async def pass_time(world: World, by_s: float = HOUR_S) -> None:
    """Let everything that has happened have happened so much earlier; nodes that are heard stay heard."""
    for table, columns in (
        ("nodes", ("silent_at", "heartbeat_at", "registered_at")),
        ("allocations", ("started_at", "running_at", "stop_requested_at", "ended_at")),
        ("rank_statuses", ("updated_at",)),
    ):
        moved = ", ".join(f"{name} = {name} - make_interval(secs => $1)" for name in columns)
        await world.fetch(f"UPDATE {table} SET {moved} RETURNING 1", by_s)
    lost = "UPDATE nodes SET lease_until = lease_until - make_interval(secs => $1) WHERE state = 'lost' RETURNING 1"
    await world.fetch(lost, by_s)


async def lose(world: World, *nodes: str) -> None:
    """Let the leases of these nodes be over, and the scheduler see that."""
    for node in nodes:
        await world.lease(node, -world.settings.lease_margin_s - 1)
    await world.scheduler.turn()


async def returns(world: World, *nodes: str) -> None:
    """Let nodes be heard of again, as telemetry notes it."""
    for node in nodes:
        await world.fetch(
            "UPDATE nodes SET state = 'up', silent_at = CASE WHEN lease_until < now() THEN lease_until ELSE silent_at "
            "END, lease_until = now() + interval '60 s' WHERE id = $1 RETURNING 1",
            node,
        )


async def fences(world: World, job: str, ended_by: str) -> None:
    """Let the nodes of a job end it, and say so at once."""
    await world.report(await world.allocation(job), "exited", exit_code=-15, ended_by=ended_by)
    await world.fetch("UPDATE rank_statuses SET updated_at = now() WHERE state = 'exited' RETURNING 1")
    await world.scheduler.turn()


async def runs(world: World, job: str) -> None:
    """Let a job that waits get its GPUs and run."""
    await world.scheduler.turn()
    await world.report(await world.allocation(job), "running")
    await world.scheduler.turn()
    assert await world.state(job) == "running"


async def nodes_of(world: World, job: str) -> list[str]:
    """Return the nodes that a job has GPUs on."""
    query = (
        "SELECT DISTINCT node_id FROM device_claims c JOIN allocations a ON a.id = c.allocation_id WHERE job_id = $1"
    )
    return sorted(row["node_id"] for row in await world.fetch(query, job))


async def a_cluster(world: World, count: int, gpus: int = 1) -> list[str]:
    return [await world.node(f"n{number}", gpus) for number in range(1, count + 1)]


async def test_a_job_that_loses_its_node_three_times_is_held_and_says_why(world: World) -> None:
    await a_cluster(world, 3)
    job = await world.running(max_restarts=0)
    for number in (1, 2):
        (node,) = await nodes_of(world, job)
        await lose(world, node)
        await returns(world, node)
        assert await losses(world, job) == number
        await runs(world, job)
    (node,) = await nodes_of(world, job)
    await lose(world, node)

    state, reason, detail, count = await told(world, job)
    assert (state, reason, count) == ("held", "node_losses", MOST_NODE_LOSSES)
    assert detail.startswith("A node or GPU was lost under it 3 times while most others stayed up")
    (event,) = await world.fetch("SELECT data FROM job_events WHERE job_id = $1 AND type = 'job.held'", job)
    assert (event["data"]["reason"], event["data"]["detail"]) == ("node_losses", detail)
    (row,) = await world.fetch("SELECT restarts, preemptions FROM jobs WHERE id = $1", job)
    assert tuple(row) == (0, 0)
    await returns(world, node)
    await world.scheduler.turn()
    assert await world.state(job) == "held"
    assert await world.claims() == 0


async def test_on_the_only_node_each_loss_counts(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    for _ in range(MOST_NODE_LOSSES - 1):
        await lose(world, "n1")
        await returns(world, "n1")
        await runs(world, job)
    await lose(world, "n1")
    assert (await told(world, job))[:2] == ("held", "node_losses")


@pytest.mark.parametrize(("count", "lost", "counts"), [(2, 1, True), (2, 2, False), (5, 2, True), (5, 3, False)])
async def test_a_loss_counts_while_most_other_nodes_stay_up(world: World, count: int, lost: int, counts: bool) -> None:
    names = await a_cluster(world, count)
    job = await world.running()
    await pass_time(world)
    (own,) = await nodes_of(world, job)
    await lose(world, own, *[name for name in names if name != own][: lost - 1])

    assert await losses(world, job) == counts


async def test_a_control_plane_that_was_silent_is_no_jobs_doing(world: World) -> None:
    names = await a_cluster(world, 4)
    job = await world.running()
    for _ in range(2 * MOST_NODE_LOSSES):  # all leases run out, and all nodes are back before any is given up
        await pass_time(world)
        for name in names:
            await world.lease(name, -1)
        await returns(world, *names)
        await fences(world, job, "lease")
        await runs(world, job)
    assert await losses(world, job) == 0


async def test_nodes_that_got_no_answers_though_they_were_heard_were_silent(world: World) -> None:
    await a_cluster(world, 3)
    jobs = [await world.running() for _ in range(3)]
    for job in jobs:
        await world.report(await world.allocation(job), "exited", exit_code=-15, ended_by="lease")
    await world.fetch("UPDATE rank_statuses SET updated_at = now() RETURNING 1")
    await world.scheduler.turn()
    assert [await losses(world, job) for job in jobs] == [0, 0, 0]


async def test_a_job_that_goes_from_node_to_node_does_not_look_like_an_outage(world: World) -> None:
    await a_cluster(world, 2)
    job = await world.running()
    for _ in range(MOST_NODE_LOSSES - 1):  # the node before is still away, or just back, and says what it ended
        (node,) = await nodes_of(world, job)
        before = await world.allocation(job)
        await lose(world, node)
        await runs(world, job)
        await returns(world, node)
        await world.report(before, "exited", exit_code=-15, ended_by="lease")
        await world.fetch("UPDATE rank_statuses SET updated_at = now() WHERE ended_by = 'lease' RETURNING 1")
    await lose(world, *await nodes_of(world, job))
    assert (await told(world, job))[:2] == ("held", "node_losses")


@pytest.mark.parametrize(("apart_s", "state", "count"), [(0, "held", 3), (LOSSES_FORGOTTEN_S, "queued", 1)])
async def test_losses_a_day_apart_are_no_sign(world: World, apart_s: float, state: str, count: int) -> None:
    await world.node("n1")
    job = await world.running()
    for _ in range(MOST_NODE_LOSSES):
        await pass_time(world, apart_s + 1)
        await runs(world, job)
        await lose(world, "n1")
        await returns(world, "n1")
    assert (await world.state(job), await losses(world, job)) == (state, count)


async def test_the_operator_says_how_many_losses(database_url: str, redis_url: str) -> None:
    async with a_world(database_url, redis_url, max_node_losses=1) as world:
        await a_cluster(world, 3)
        job = await world.running()
        await lose(world, *await nodes_of(world, job))
        assert (await told(world, job))[:2] == ("held", "node_losses")


async def test_a_job_that_is_not_to_run_again_has_failed_with_its_node(world: World) -> None:
    await a_cluster(world, 2)
    job, other = [await world.running(restart_after_node_loss=again) for again in (False, True)]
    await lose(world, *await nodes_of(world, job), *await nodes_of(world, other))  # all nodes: it counts against none
    state, reason, detail, count = await told(world, job)
    assert (state, reason, count) == ("failed", "node_lost", 0)
    assert detail == "A node it ran on was lost, after which it is not to run again."
    assert await world.state(other) == "queued"
    await world.node("n3")
    stopped = await world.job(restart_after_node_loss=False, priority=100)
    await runs(world, stopped)
    await fences(world, stopped, "agent")
    assert (await told(world, stopped))[1] != "node_lost", "a stopped installation ends nobody's job"


@pytest.mark.parametrize("what", ["gpu", "slice"])
async def test_a_job_that_loses_its_gpu_or_slice_again_and_again_is_held(world: World, what: str) -> None:
    await world.node("n1", 1)
    job = await world.running()
    for number in range(1, MOST_NODE_LOSSES + 1):
        if what == "gpu":
            await sick(world, "n1", 0)
        else:
            parent = "UPDATE device_claims SET parent = 0, uuid = 'MIG-1' WHERE node_id = 'n1' RETURNING 1"
            await world.fetch(parent)
        await world.exits(job, exit_code=1)
        assert await losses(world, job) == number
        await world.fetch("WITH d AS (DELETE FROM gpu_health) SELECT 1")
        if number < MOST_NODE_LOSSES:
            await runs(world, job)
    state, reason, detail, _ = await told(world, job)
    assert (state, reason) == ("held", "node_losses")
    assert detail.startswith("A node or GPU was lost under it 3 times")


@pytest.mark.parametrize(
    ("ended_by", "reason", "counted"),
    [("agent", "installation_stopped", 0), ("lease", "node_lost", 1), ("host", "node_lost", 1)],
)
async def test_a_stopped_installation_is_not_a_lost_node(
    world: World, ended_by: str, reason: str, counted: int
) -> None:
    await a_cluster(world, 3)
    job = await world.running()
    await fences(world, job, ended_by)

    (event,) = await world.fetch("SELECT data FROM job_events WHERE job_id = $1 AND type = 'job.queued'", job)
    assert event["data"]["reason"] == reason
    if ended_by == "agent":
        assert event["data"]["detail"].startswith("The installation was stopped; ")
    assert await losses(world, job) == counted


async def test_a_drained_node_that_goes_away_is_not_a_lost_one(world: World) -> None:
    await a_cluster(world, 2)
    job = await world.running()
    (node,) = await nodes_of(world, job)
    await world.fetch("UPDATE nodes SET draining = true WHERE id = $1 RETURNING 1", node)
    await lose(world, node)

    (event,) = await world.fetch("SELECT data FROM job_events WHERE job_id = $1 AND type = 'job.queued'", job)
    assert event["data"]["reason"] == "node_drained"
    assert await losses(world, job) == 0


@pytest.mark.parametrize("ended_by", ["not_woken", "stopped"])
async def test_a_node_that_does_not_wake_is_not_a_lost_one(world: World, ended_by: str) -> None:
    await a_cluster(world, 2)
    job = await world.running()
    async with world.database.transaction() as connection:
        await gangs.lose_nodes(connection, await nodes_of(world, job), ended_by)
    await world.scheduler.turn()

    (row,) = await world.fetch("SELECT end_reason FROM allocations WHERE job_id = $1 AND state = 'ended'", job)
    assert row["end_reason"] == {"not_woken": "node_not_woken", "stopped": "installation_stopped"}[ended_by]
    assert await losses(world, job) == 0


async def test_a_restore_is_not_the_loss_of_a_node(world: World) -> None:
    await world.node("n1")
    job = await world.running()
    moved = await world.running(cells=["any"], may_move=True, checkpoint_dir="/c")
    await make_fit(world.database)
    await world.scheduler.turn()
    assert await losses(world, job) == 0
    (row,) = await world.fetch("SELECT state, cell FROM jobs WHERE id = $1", moved)
    assert (row["state"], row["cell"]) == ("queued", ""), "a cell may have it"


@pytest.mark.parametrize("seed", range(3))
async def test_of_jobs_that_lose_nodes_at_random_only_the_one_that_is_always_there_is_held(
    world: World, seed: int
) -> None:
    chance: Any = random.Random(seed)
    await a_cluster(world, 6)
    poison, *others = [await world.running() for _ in range(4)]
    lost: dict[str, int] = dict.fromkeys(others, 0)
    rounds = 0
    while await world.state(poison) != "held":
        rounds += 1
        assert rounds < 12
        (under,) = await nodes_of(world, poison)
        innocent = [job for job in others if lost[job] < MOST_NODE_LOSSES - 1]
        (also,) = await nodes_of(world, chance.choice(innocent)) if innocent else (under,)
        taken = [under] if rounds % 2 else [also]  # every other time, the node of another
        for job in others:
            lost[job] += bool(set(await nodes_of(world, job)) & set(taken))
        await lose(world, *taken)
        await returns(world, *taken)
        for job in (poison, *others):
            if await world.state(job) == "queued":
                await world.scheduler.turn()
            if await world.state(job) == "starting":
                await runs(world, job)
        await pass_time(world)
    assert (await told(world, poison))[3] == MOST_NODE_LOSSES
    assert rounds == 2 * MOST_NODE_LOSSES - 1
    assert [await world.state(job) for job in others] == ["running"] * 3
    assert [await losses(world, job) for job in others] == list(lost.values())
