"""Service instances as rows: started before all jobs, hidden from every policy, and back in the queue when lost."""

from __future__ import annotations

from typing import Any

import pytest

from services.contracts.commands import StartGang
from services.core.cycle.snapshot import Phase
from tests.scheduler.test_api import client
from tests.scheduler.test_device_controls import active_round
from tests.scheduler.test_power_limit import HOST_W, IDLE_W, cluster, limited, seen
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


async def service(world: World, gpus: int = 1, *, zone: str | None = None, **labels: str) -> str:
    """Return a service instance that waits, as admission would have written it."""
    terms: dict[str, Any] = {"node_labels": labels} | ({} if zone is None else {"zone": zone})
    return await world.job(gpus, service=terms)


async def served(world: World, gpus: int = 1) -> str:
    """Return a service instance that runs."""
    job_id = await service(world, gpus)
    await world.scheduler.turn()
    await world.report(await world.allocation(job_id), "running")
    await world.scheduler.turn()
    assert await world.state(job_id) == "running"
    return job_id


async def why(world: World, job_id: str) -> str:
    (row,) = await world.fetch("SELECT reason FROM jobs WHERE id = $1", job_id)
    return row["reason"]


async def placed_on(world: World, job_id: str) -> dict[str, list[int]]:
    (row,) = await world.fetch("SELECT shares FROM allocations WHERE id = $1", await world.allocation(job_id))
    return {share["node_id"]: share["devices"] for share in row["shares"]}


async def test_training_gives_way_and_comes_back_once_the_service_is_cancelled(world: World) -> None:
    await world.node("n1")
    job = await world.running(3)
    standing = await service(world, 2)
    await world.scheduler.turn()
    assert [await why(world, each) for each in (job, standing)] == ["standing_service", "waiting_for_release"]
    await world.job(1)  # a GPU is free for it, which the service waits for
    await world.scheduler.turn()
    assert await world.claims() == 3

    await world.exits(job, ended_by="stop")
    await world.report(await world.allocation(standing), "running")
    await world.scheduler.turn()
    assert await world.state(standing) == "running"
    assert await world.state(job) == "queued"
    async with client(world) as api:
        rounds = (await api.get("/v1/plans")).json()["items"]
    actions = [action for each in rounds for action in each["actions"] if action["reason"] == "standing_service"]
    assert [(each["action"], each["job_id"]) for each in actions] == [("start", standing), ("preempt", job)]

    await world.ask(standing, "cancel")
    await world.exits(standing, ended_by="stop")
    assert await world.state(standing) == "cancelled"
    assert await world.state(job) == "starting"


@pytest.mark.usefixtures("the_lab")
@pytest.mark.parametrize("policy", ["las", "green", "powerflow", "pollux"])
async def test_no_policy_touches_a_running_service(postgres_url: str, redis_url: str, policy: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy=policy) as world:
        await world.node("n1")
        standing = await served(world, 2)
        jobs = [await world.job(1, 4, priority=10) for _ in range(3)]
        for _ in range(3):
            await active_round(world)
        gang = await world.allocation(standing)

        assert await world.state(standing) == "running"
        assert gang == f"{standing}.1"
        assert await world.events(standing) == ["starting", "running"]
        assert await world.claims() == 4
        assert sorted([await world.state(job) for job in jobs])[-1] == "starting"
        snapshot = await seen(world)
        assert snapshot.jobs.ids == tuple(jobs)
        assert (snapshot.nodes.gpus.tolist(), snapshot.services_gpus) == ([2], 2)

        await world.ask(standing, "cancel")
        await active_round(world)  # with a service among the gangs that stop
        await world.exits(standing, ended_by="stop")
        await active_round(world)
        snapshot = await seen(world)
        assert await world.state(standing) == "cancelled"
        assert (snapshot.nodes.gpus.tolist(), snapshot.services_gpus) == ([4], 0)


async def test_a_service_runs_where_its_terms_say(world: World) -> None:
    for name in ("n1", "n2", "n3"):
        await world.node(name)
    await world.fetch(
        """UPDATE nodes SET zone = 'Y', labels = '{"pool": "a", "rack": "1"}' WHERE id <> 'n1' RETURNING 1"""
    )
    await world.fetch("UPDATE nodes SET labels = '{}' WHERE id = 'n3' RETURNING 1")
    waits = [await service(world, 1, zone="X"), await service(world, 1, pool="b"), await service(world, 8)]
    here, there = await service(world, 4, zone="Y", pool="a"), await service(world, 4, zone="Y")
    await world.scheduler.turn()

    assert [list(await placed_on(world, each)) for each in (here, there)] == [["n2"], ["n3"]]
    assert [await why(world, each) for each in waits] == ["no_eligible_node"] * 3
    late = await service(world, 2, zone="Y")
    await world.scheduler.turn()
    assert await why(world, late) == "not_enough_free_gpus", "one service does not stop another"


async def test_a_service_has_a_port_of_its_own(world: World) -> None:
    await world.node("n1")
    for _ in range(3):
        await service(world)
    await world.scheduler.turn()
    starts = [command for _, command in await world.outbox() if isinstance(command, StartGang)]

    assert len({start.master_port for start in starts}) == 3
    assert all(start.spec.service is not None for start in starts)


async def test_a_service_whose_node_is_lost_is_placed_on_another(world: World) -> None:
    await world.node("n1", lease_s=60)
    standing = await served(world, 2)
    await world.node("n2")
    await world.lease("n1", -3_600)
    await world.scheduler.turn()
    await world.scheduler.turn()

    assert await world.events(standing) == ["starting", "running", "queued", "starting"]
    assert await placed_on(world, standing) == {"n2": [0, 1]}


async def test_what_was_decided_is_found_again_by_the_next_scheduler(postgres_url: str, redis_url: str) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url) as world:
        await world.node("n1")
        job = await world.running(4)
        standing = await service(world, 2)
        await world.scheduler.turn()
        assert await world.state(job) == "preempting"
    async with a_world(url, redis_url) as world:
        await world.scheduler.turn()
        assert await world.events(job) == ["starting", "running", "preempting"], "it is not stopped twice"
        await world.exits(job, ended_by="stop")
        assert await placed_on(world, standing) == {"n1": [0, 1]}
    async with a_world(url, redis_url) as world:
        await world.scheduler.turn()
        assert await world.allocation(standing) == f"{standing}.1"
        assert await world.claims() == 2


async def test_a_service_that_stops_is_waited_for_and_nobody_gives_way(world: World) -> None:
    await world.node("n1", 3)
    old, job = await served(world, 2), await world.running(1)
    await world.ask(old, "cancel")
    new = await service(world, 2)
    await world.scheduler.turn()

    assert [await why(world, new), await world.state(job)] == ["waiting_for_release", "running"]
    snapshot = await seen(world)
    stopping = snapshot.jobs.index[old]  # type: ignore[index]
    assert snapshot.jobs.phase[stopping] == Phase.PREEMPTING
    assert not snapshot.jobs.eligible[stopping].any(), "it claims nothing of what it releases"
    await world.exits(old, ended_by="stop")
    assert await world.state(new) == "starting"


async def test_services_count_in_their_tenants_quota(world: World) -> None:
    await world.fetch("""INSERT INTO tenants (id, limits) VALUES ('default', '{"max_gpus": 3}') RETURNING 1""")
    await world.node("n1")
    await served(world, 2)
    fits, waits, over = await world.job(1), await world.job(1), await service(world, 2)
    await world.scheduler.turn()

    assert [await why(world, each) for each in (waits, over)] == ["tenant_quota"] * 2
    assert await world.state(fits) == "starting"


async def test_what_services_draw_is_taken_off_the_limit_and_not_blamed_on_jobs(world: World) -> None:
    await world.scheduler.turn()
    await cluster(world, HOST_W)
    await limited(world, power_limit_w=10_000)
    await served(world, 3)
    await world.fetch(
        "UPDATE nodes SET readings = $1 RETURNING 1",
        [{"index": index, "power_w": 300.0 if index < 3 else IDLE_W, "utilization": 0.0} for index in range(4)],
    )
    snapshot = await seen(world)

    assert snapshot.services_w == pytest.approx(3 * 300 + 3 * HOST_W / 4)
    assert snapshot.measured_w == pytest.approx(IDLE_W + HOST_W / 4)
    assert snapshot.idle_w == pytest.approx([IDLE_W + HOST_W / 4])


async def test_a_node_that_comes_to_suit_is_found_at_once(world: World) -> None:
    await world.node("n1")
    standing = await service(world, 1, pool="a")
    await world.scheduler.turn()
    assert await why(world, standing) == "no_eligible_node"
    await world.fetch("""UPDATE nodes SET labels = '{"pool": "a"}' RETURNING 1""")
    await world.scheduler.turn()
    assert await world.state(standing) == "starting"
