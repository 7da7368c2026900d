"""Whatever dies, an accepted what-if run ends exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.simulator.service.installation import a_long_run, a_run, installed
from tests.support.background import Installation
from tests.support.servers import wait_until


@pytest.fixture(scope="module")
async def simulator() -> AsyncIterator[Installation]:
    """An installation with a PostgreSQL and a Valkey of its own to kill."""
    async with installed(DATABASE_URL="", REDIS_URL="") as installation:
        await installation.count_ends()
        yield installation


async def all_succeed_once(simulator: Installation, made: list[str]) -> None:
    for simulation_id in made:
        assert (await simulator.ended(simulation_id))["status"] == "succeeded"
        assert await simulator.ends(simulation_id) == ["succeeded"]


async def test_a_worker_killed_under_a_run(simulator: Installation) -> None:
    made = await simulator.running(a_long_run(seed=1))
    os.kill(simulator.pid("simulator-worker"), signal.SIGKILL)
    await all_succeed_once(simulator, [made])
    assert (await simulator.read(made))["attempts"] == 2


async def test_a_service_killed_with_runs_waiting(simulator: Installation) -> None:
    made = [await simulator.running(a_long_run(seed=2)), *[await simulator.accepted(a_run(seed=n)) for n in range(3)]]
    service = simulator.pid("simulator")
    os.kill(service, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: simulator.is_back(service))
    await all_succeed_once(simulator, made)


async def test_a_broker_killed_and_a_broker_that_forgot_everything(simulator: Installation) -> None:
    made = [await simulator.running(a_long_run(seed=3))]
    os.kill(simulator.pid("valkey"), signal.SIGKILL)
    made += [await simulator.accepted(a_run(seed=10 + n)) for n in range(2)]
    await all_succeed_once(simulator, made)
    made = [await simulator.running(a_long_run(seed=4)), await simulator.accepted(a_run(seed=20))]
    async with Redis.from_url(simulator.stack.environment["REDIS_URL"]) as redis:
        await redis.flushall()
    await all_succeed_once(simulator, made)


async def test_a_database_killed_under_a_run(simulator: Installation) -> None:
    made = await simulator.running(a_long_run(seed=5))
    os.kill(simulator.pid("postgres"), signal.SIGKILL)
    await all_succeed_once(simulator, [made])


async def test_a_worker_whose_claim_was_taken_does_not_write(simulator: Installation) -> None:
    made = await simulator.running(a_long_run(seed=6))
    async with simulator.database() as connection:
        await connection.execute("UPDATE simulations SET claim = 'another', attempts = 2 WHERE id = $1", made)
    await all_succeed_once(simulator, [made])
    assert (await simulator.read(made))["attempts"] == 3
