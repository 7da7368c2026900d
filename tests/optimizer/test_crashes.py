"""Whatever dies, an accepted solve ends exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.optimizer.installation import installed
from tests.optimizer.problems import a_long_plan, a_plan
from tests.support.background import Installation
from tests.support.servers import wait_until


@pytest.fixture(scope="module")
async def optimizer() -> AsyncIterator[Installation]:
    """An installation with a PostgreSQL and a Valkey of its own to kill."""
    async with installed(DATABASE_URL="", REDIS_URL="") as installation:
        await installation.count_ends()
        yield installation


async def running(optimizer: Installation, seed: int) -> str:
    return await optimizer.running(a_long_plan(seed))


async def test_a_worker_killed_under_a_solve(optimizer: Installation) -> None:
    solve_id = await running(optimizer, seed=1)
    os.kill(optimizer.pid("worker"), signal.SIGKILL)
    solve = await optimizer.ended(solve_id)
    assert (solve["state"], solve["attempts"], solve["outcome"]["status"]) == ("succeeded", 2, "feasible")
    assert await optimizer.ends(solve_id) == ["succeeded"]


async def test_a_service_killed_with_solves_waiting(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=2), *[await optimizer.accepted(a_plan(n)) for n in range(3)]]
    service = optimizer.pid("optimizer")
    os.kill(service, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: optimizer.is_back(service))
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await optimizer.ends(solve_id) == ["succeeded"]


async def test_a_broker_killed_while_solves_are_submitted(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=3)]
    os.kill(optimizer.pid("valkey"), signal.SIGKILL)
    made += [await optimizer.accepted(a_plan(n, 1)) for n in range(3)]
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await optimizer.ends(solve_id) == ["succeeded"]


async def test_a_database_killed_under_a_solve(optimizer: Installation) -> None:
    solve_id = await running(optimizer, seed=6)
    os.kill(optimizer.pid("postgres"), signal.SIGKILL)
    assert (await optimizer.ended(solve_id))["state"] == "succeeded"
    assert await optimizer.ends(solve_id) == ["succeeded"]


async def test_a_broker_that_forgot_everything(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=4), *[await optimizer.accepted(a_plan(n, 2)) for n in range(3)]]
    redis = Redis.from_url(optimizer.stack.environment["REDIS_URL"])
    await redis.flushall()
    await redis.aclose()
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await optimizer.ends(solve_id) == ["succeeded"]


async def test_a_worker_whose_claim_was_taken_does_not_write(optimizer: Installation) -> None:
    # As if it had hung for longer than its lease, and then woken up; the one that took over is lost at once.
    solve_id = await running(optimizer, seed=5)
    async with optimizer.database() as connection:
        await connection.execute("UPDATE solves SET claim = 'another', attempts = 2 WHERE id = $1", solve_id)
    solve = await optimizer.ended(solve_id)
    assert (solve["state"], solve["attempts"]) == ("succeeded", 3)
    assert await optimizer.ends(solve_id) == ["succeeded"]
