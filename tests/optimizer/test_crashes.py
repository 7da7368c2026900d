"""Whatever dies, an accepted solve ends exactly once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
from redis.asyncio import Redis

from services.standalone.process import http_ready
from tests.optimizer.installation import Installation, installed
from tests.optimizer.problems import a_bound, a_long_bound
from tests.support.servers import wait_until


@pytest.fixture(scope="module")
async def optimizer() -> AsyncIterator[Installation]:
    """An installation with a PostgreSQL and a Valkey of its own to kill."""
    async with installed(DATABASE_URL="", REDIS_URL="") as installation:
        await count_ends(installation)
        yield installation


async def count_ends(installation: Installation) -> None:
    """Have the database itself note every time a solve ends."""
    async with database(installation) as connection:
        await connection.execute("""
            CREATE TABLE ends (id TEXT, state TEXT);
            CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO ends VALUES (NEW.id, NEW.state); RETURN NEW; END $$;
            CREATE TRIGGER ended AFTER UPDATE ON solves FOR EACH ROW
            WHEN (NEW.state IN ('succeeded', 'failed', 'cancelled')) EXECUTE FUNCTION note();
        """)


@asynccontextmanager
async def database(installation: Installation) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(installation.stack.environment["DATABASE_URL"])
    try:
        yield connection
    finally:
        await connection.close()


async def ends(installation: Installation, solve_id: str) -> list[str]:
    async with database(installation) as connection:
        return [row["state"] for row in await connection.fetch("SELECT state FROM ends WHERE id = $1", solve_id)]


async def running(optimizer: Installation, seed: int, hours: int = 900) -> str:
    solve_id = await optimizer.accepted(a_long_bound(hours=hours, seed=seed))
    await optimizer.until(solve_id, lambda solve: solve["state"] == "running")
    return solve_id


async def test_a_worker_killed_under_a_solve(optimizer: Installation) -> None:
    solve_id = await running(optimizer, seed=1)
    os.kill(optimizer.pid("worker"), signal.SIGKILL)
    solve = await optimizer.ended(solve_id)
    assert (solve["state"], solve["attempts"], solve["outcome"]["status"]) == ("succeeded", 2, "optimal")
    assert await ends(optimizer, solve_id) == ["succeeded"]


async def test_a_service_killed_with_solves_waiting(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=2), *[await optimizer.accepted(a_bound(n)) for n in range(3)]]
    service = optimizer.pid("optimizer")
    os.kill(service, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: _is_back(optimizer, service))
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await ends(optimizer, solve_id) == ["succeeded"]


async def test_a_broker_killed_while_solves_are_submitted(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=3)]
    os.kill(optimizer.pid("valkey"), signal.SIGKILL)
    made += [await optimizer.accepted(a_bound(n, 1)) for n in range(3)]
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await ends(optimizer, solve_id) == ["succeeded"]


async def test_a_database_killed_under_a_solve(optimizer: Installation) -> None:
    solve_id = await running(optimizer, seed=6)
    os.kill(optimizer.pid("postgres"), signal.SIGKILL)
    assert (await optimizer.ended(solve_id))["state"] == "succeeded"
    assert await ends(optimizer, solve_id) == ["succeeded"]


async def test_a_broker_that_forgot_everything(optimizer: Installation) -> None:
    made = [await running(optimizer, seed=4), *[await optimizer.accepted(a_bound(n, 2)) for n in range(3)]]
    redis = Redis.from_url(optimizer.stack.environment["REDIS_URL"])
    await redis.flushall()
    await redis.aclose()
    for solve_id in made:
        assert (await optimizer.ended(solve_id))["state"] == "succeeded"
        assert await ends(optimizer, solve_id) == ["succeeded"]


async def test_a_worker_whose_claim_was_taken_does_not_write(optimizer: Installation) -> None:
    # As if it had hung for longer than its lease, and then woken up; the one that took over is lost at once.
    solve_id = await running(optimizer, seed=5)
    async with database(optimizer) as connection:
        await connection.execute("UPDATE solves SET claim = 'another', attempts = 2 WHERE id = $1", solve_id)
    solve = await optimizer.ended(solve_id)
    assert (solve["state"], solve["attempts"]) == ("succeeded", 3)
    assert await ends(optimizer, solve_id) == ["succeeded"]


def _is_back(optimizer: Installation, former: int) -> bool:
    service = next(child for child in optimizer.stack.status().processes if child.name == "optimizer")
    return service.pid not in (None, former) and http_ready(service.port)
