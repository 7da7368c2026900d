"""What the scheduler asks its database: that something changed, how large a job is, what is new to be learned."""

from __future__ import annotations

from services.scheduler.repository import profiles, rounds
from tests.scheduler.world import World

CHANGES = {
    "a job is queued again": "UPDATE jobs SET queued_at = now() + interval '1 s'",
    "a job waits no longer": "UPDATE jobs SET state = 'held'",
    "a node's lease is over": "UPDATE nodes SET lease_until = now() - interval '1 s' WHERE id = 'n1'",
    "a node is given up": "UPDATE nodes SET state = 'lost' WHERE id = 'n2'",
    "a node is drained": "UPDATE nodes SET draining = true WHERE id = 'n3'",
    "a node is in another zone": "UPDATE nodes SET zone = 'Y' WHERE id = 'n3'",
    "a node is pinned awake": "UPDATE node_power SET pinned = true",
    "a node has been on for long enough": "UPDATE node_power SET since = now() - interval '1 h'",
    "another policy is chosen": "UPDATE scheduler_state SET policy = 'las'",
    "a parameter is set": """UPDATE scheduler_state SET parameters = '{"a": 1}'""",
}
HARMLESS = {
    "a heartbeat": "UPDATE nodes SET heartbeat_at = now(), lease_until = now() + interval '60 s' WHERE id = 'n3'",
    "progress": "UPDATE jobs SET name = 'other'",
    "a policy's memory": """UPDATE scheduler_state SET memory = '{"b": 1}'""",
}


async def test_each_change_that_matters_is_seen_and_nothing_else(world: World) -> None:
    await world.scheduler.prepare()
    for name in ("n1", "n2", "n3"):
        await world.node(name)
    await world.job()
    await world.fetch("INSERT INTO node_power (node_id, state, since) VALUES ('n3', 'on', now()) RETURNING 1")

    async def fingerprint() -> tuple[object, ...]:
        async with world.database.connection() as connection:
            return await rounds.fingerprint(connection, 600.0)

    seen = await fingerprint()
    for what, statement in HARMLESS.items():
        await world.fetch(f"{statement} RETURNING 1")
        assert await fingerprint() == seen, what
    for what, statement in CHANGES.items():
        await world.fetch(f"{statement} RETURNING 1")
        before, seen = seen, await fingerprint()
        assert seen != before, what
    await world.job()
    assert await fingerprint() != seen, "a job is submitted"


async def test_a_jobs_size_is_that_of_the_gang_it_has_now_or_else_its_least(world: World) -> None:
    await world.node("n1", 4)
    job = await world.job(2, 4)
    other = await world.job(1)

    async def gpus() -> int:
        async with world.database.connection() as connection:
            found = await profiles.job(connection, job)
        assert found is not None
        return found.gpus

    assert await gpus() == 2
    await world.scheduler.turn()
    gang = await world.allocation(job)
    await world.fetch("UPDATE allocations SET gpus = 4 WHERE id = $1 RETURNING 1", gang)
    assert await gpus() == 4
    await world.fetch("UPDATE allocations SET state = 'ended', ended_at = now() WHERE id = $1 RETURNING 1", gang)
    assert await gpus() == 2, "a gang that has ended is none"
    async with world.database.connection() as connection:
        assert await profiles.job(connection, "job_gone") is None
        assert await profiles.job(connection, other) is not None


async def test_what_is_learned_is_for_the_widest_node_of_its_boards(world: World) -> None:
    for name, gpus, model in (("n1", 2, "A100"), ("n2", 8, "A100"), ("n3", 16, "H100")):
        await world.node(name, gpus, model=model)
    await world.fetch(
        "INSERT INTO setting_points (kind, gpu_model, setting, gpus, nodes, local_batch, value, step_time_s, power_w, "
        "elapsed_s, job_id) VALUES ('default/a', 'A100', 'power_limit', 2, 1, 0, 300, 0.1, 300, 30, 'job_1') "
        "RETURNING 1"
    )
    async with world.database.connection() as connection:
        news = await profiles.news(connection)

    assert news is not None
    assert (news.kind, news.gpu_model, news.control, news.gpus_per_node) == ("default/a", "A100", "power_limit", 8)
