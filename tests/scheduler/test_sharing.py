"""Two jobs on one GPU as rows: claims, commands, and what the database refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from services.contracts.commands import StartGang
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database

pytestmark = pytest.mark.usefixtures("the_lab")

CONSENT = {"may_share_gpu": True, "gpus": {"min": 1, "memory_gib": 10.0}, "work": {"total": 1_000}}


@pytest.fixture
async def packing(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    """A world under Gandiva, with one GPU of 40 GiB; every turn holds an active round."""
    async with a_world(fresh_database(postgres_url), redis_url, policy="gandiva", round_interval_s=1e-6) as world:
        await world.node("n0", 1)
        yield world


async def measured(world: World, *jobs: str) -> None:
    """Let the policy know what these jobs do alone, and how far they are."""
    for job in jobs:
        await world.fetch("INSERT INTO job_progress (job_id, done) VALUES ($1, 10) ON CONFLICT DO NOTHING", job)
    rates = {job: [1e-3, "A100"] for job in jobs}
    await world.fetch(
        "UPDATE scheduler_state SET memory = $1, version = version + 1 RETURNING 1", {"packing": {"rates": rates}}
    )


async def holders(world: World) -> list[tuple[str, int, int, bool]]:
    rows = await world.fetch(
        "SELECT a.job_id, c.device, c.slot, c.packed FROM device_claims c JOIN allocations a ON a.id = c.allocation_id "
        "ORDER BY c.slot"
    )
    return [tuple(row) for row in rows]


async def a_pair(world: World) -> tuple[str, str]:
    host = await world.running(**CONSENT)
    guest = await world.job(**CONSENT)
    await measured(world, host, guest)
    await world.scheduler.turn()
    return host, guest


async def test_a_job_is_packed_onto_a_held_gpu_and_its_command_says_so(packing: World) -> None:
    host, guest = await a_pair(packing)

    assert await holders(packing) == [(host, 0, 0, False), (guest, 0, 1, True)]
    (job,) = await packing.fetch("SELECT state, reason FROM jobs WHERE id = $1", guest)
    assert tuple(job) == ("starting", "packed")
    starts = [each for _, each in await packing.outbox() if isinstance(each, StartGang)]
    assert [(each.job_id, each.devices, each.shares) for each in starts] == [(host, [0], False), (guest, [0], True)]
    assert not any(each.spec.may_share_gpu for each in starts), "agents of the release before know no such field"


async def test_a_lost_start_of_a_packed_job_says_again_that_it_is_packed(packing: World) -> None:
    _, guest = await a_pair(packing)
    await packing.fetch("DELETE FROM outbox RETURNING 1")
    await packing.fetch("UPDATE allocations SET started_at = now() - interval '20 seconds' RETURNING 1")
    await packing.scheduler.turn()

    starts = [each for _, each in await packing.outbox() if isinstance(each, StartGang)]
    assert [(each.job_id, each.shares) for each in starts] == [(guest, True)]


async def test_a_gpu_is_free_again_when_both_are_gone_and_takes_another_guest_before(packing: World) -> None:
    host, guest = await a_pair(packing)
    await packing.report(await packing.allocation(guest), "running")
    await packing.exits(host)
    assert await holders(packing) == [(guest, 0, 1, True)]
    third = await packing.job(**CONSENT)
    await measured(packing, guest, third)
    await packing.scheduler.turn()
    assert await holders(packing) == [(third, 0, 0, True), (guest, 0, 1, True)]
    for job in (guest, third):
        await packing.exits(job)

    assert await packing.claims() == 0


@pytest.mark.parametrize(
    "spec",
    [{}, {**CONSENT, "gpus": {"min": 1, "memory_gib": 31.0}}, {**CONSENT, "preemptible": False}],
    ids=["no consent", "too little memory", "not preemptible"],
)
async def test_a_job_that_may_not_share_gets_no_held_gpu(packing: World, spec: dict[str, Any]) -> None:
    host = await packing.running(**CONSENT)
    other = await packing.job(**spec)
    await measured(packing, host, other)

    await packing.scheduler.turn()

    assert [holder[0] for holder in await holders(packing)] == [host]


async def test_another_policy_stops_the_guest_and_keeps_the_host(packing: World) -> None:
    host, guest = await a_pair(packing)
    await packing.report(await packing.allocation(guest), "running")
    await packing.scheduler.turn()

    await packing.fetch("UPDATE scheduler_state SET policy = 'fifo', parameters = '{}', memory = '{}' RETURNING 1")
    await packing.scheduler.turn()

    assert await packing.state(guest) == "preempting"
    assert await packing.state(host) == "running"


@pytest.mark.parametrize("packed", [False, True])
async def test_the_database_refuses_a_third_holder_and_one_that_is_not_packed(packing: World, packed: bool) -> None:
    host, _ = await a_pair(packing)
    claim = "INSERT INTO device_claims (node_id, device, allocation_id, slot, packed) VALUES ('n0', $1, $2, $3, $4)"

    with pytest.raises(asyncpg.UniqueViolationError, match="device 0 of node n0 has 2 holders"):
        await packing.fetch(claim, 0, await packing.allocation(host), int(packed), packed)
    if packed:
        with pytest.raises(asyncpg.UniqueViolationError, match="has 0 holders"):
            await packing.fetch(claim, 7, await packing.allocation(host), 1, True)
