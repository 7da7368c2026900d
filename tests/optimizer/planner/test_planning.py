"""Pools are planned by a real worker from what routers reported and what the carbon service foretells."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from services.contracts.serving import PoolPlanResult
from tests.optimizer.planner.installation import database_of, installed
from tests.optimizer.planner.pools import a_spec, add_node, add_pool, add_traffic
from tests.support.background import Installation
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database


@pytest.fixture(scope="module")
async def optimizer(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """An installation with one node of eight GPUs, whose database notes every decision on a plan."""
    async with installed(DATABASE_URL=fresh_database(postgres_url), REDIS_URL=redis_url) as installation:
        async with database_of(installation) as connection:
            await add_node(connection, "node-1")
            await connection.execute("""
                CREATE TABLE decisions (id TEXT, outcome TEXT);
                CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN INSERT INTO decisions VALUES (NEW.id, NEW.outcome); RETURN NEW; END $$;
                CREATE TRIGGER decided AFTER UPDATE ON pool_plans FOR EACH ROW
                WHEN (NEW.outcome IS DISTINCT FROM OLD.outcome) EXECUTE FUNCTION note();
            """)
        yield installation


@pytest.fixture
async def database(optimizer: Installation) -> AsyncIterator[Any]:
    async with database_of(optimizer) as connection:
        yield connection


async def plans_of(database: Any, pool: str) -> list[Any]:
    return await database.fetch("SELECT * FROM pool_plans WHERE pool = $1 ORDER BY id", pool)


async def until(database: Any, pool: str, *outcomes: str | None) -> list[Any]:
    """Return the pool's plans once these have become of them, in order."""

    async def reached() -> bool:
        return tuple(plan["outcome"] for plan in await plans_of(database, pool)) == outcomes

    await eventually(reached, within_s=40)
    return await plans_of(database, pool)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Have a process stand still."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def in_force(database: Any, pool: str) -> str | None:
    return await database.fetchval("SELECT plan_id FROM pools WHERE name = $1", pool)


async def test_a_plan_is_made_from_reported_traffic_and_put_in_force(optimizer: Installation, database: Any) -> None:
    await add_traffic(database, "busy", hours=1, per_window=15)
    await add_traffic(database, "busy", hours=1, per_window=10, source="another")
    await add_pool(database, "busy", a_spec())
    (plan,) = await until(database, "busy", "applied")
    result = PoolPlanResult.model_validate(plan["result"])
    assert (plan["trigger"], plan["tenant_id"], plan["attempts"]) == ("clock", "acme", 1)
    assert await in_force(database, "busy") == plan["id"]
    told = result.forecasts.demand["one"]
    assert told.peaks_qps == {"all": [5.0] * 6}
    assert (told.is_assumed, told.method) == (True, "greatest peak so far")
    assert told.history_s == pytest.approx(3_600, abs=10)
    assert result.forecasts.gpus == {"west": {"A100": 8}}
    grid = result.forecasts.intensity["west"]
    assert (grid.zone, grid.signal, grid.provider) == ("US-CAL-CISO", "average_direct", "recorded")
    assert len(grid.gco2_per_kwh) == 6
    # 5.5/s with head-room: a large one (5/s, 550 W) and a small one (2/s, 300 W), not three small ones (900 W).
    assert {(each.mode, each.count) for each in result.plan.instances} == {("large", 1), ("small", 1)}
