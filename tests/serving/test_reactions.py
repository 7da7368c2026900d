"""Between half hours real workers plan around lost nodes and freed GPUs, and take turns over the GPUs they share."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from services.contracts.serving import PoolPlanResult, PoolSpec
from tests.serving.installation import database_of, installed
from tests.serving.pools import a_spec, add_node, add_pool
from tests.support.background import Installation
from tests.support.control_plane import eventually
from tests.support.servers import fresh_database

PLACES = [{"name": "west", "zone": "US-CAL-CISO"}, {"name": "east", "zone": "DE"}]


@pytest.fixture(scope="module")
async def serving(postgres_url: str, redis_url: str) -> AsyncIterator[Installation]:
    """An installation with two planners, whose claims outlast whatever else a busy machine does."""
    settings = {
        "SERVING_LEASE_S": "20",
        "CARBON_ZONES": "US-CAL-CISO,DE",
        "SERVING_PLAN_WORKERS": "2",
        "SERVING_PLAN_SETTLE_S": "0",
        "SERVING_PLAN_EVENT_GAP_S": "1",
    }
    async with installed(DATABASE_URL=fresh_database(postgres_url), REDIS_URL=redis_url, **settings) as installation:
        yield installation


@pytest.fixture
async def database(serving: Installation) -> AsyncIterator[Any]:
    async with database_of(serving) as connection:
        await connection.execute("TRUNCATE pools, pool_plans, nodes, device_claims, allocations, jobs CASCADE")
        # A planner that is still at a plan of the test before would wait for a solver that this one stops.
        await eventually(lambda: nobody_plans(connection), within_s=60)
        yield connection


async def nobody_plans(database: Any) -> bool:
    return await locks(database, granted=True) == await locks(database, granted=False) == 0


def wants(instances_of_two: int, **changes: Any) -> PoolSpec:
    """Return a pool that needs so many instances of two GPUs, or four of one: 4.5 of 5 requests/s each."""
    only = a_spec().partitions[0].model_dump()
    return a_spec(partitions=[{**only, "assumed_qps": {"all": 4.5 * instances_of_two}}], **changes)


async def newest(database: Any, pool: str, outcome: str = "applied", **wanted: Any) -> tuple[Any, PoolPlanResult]:
    """Return the newest plan of a pool once this has become of it."""

    async def found() -> Any:
        plan = await database.fetchrow("SELECT * FROM pool_plans WHERE pool = $1 ORDER BY id DESC LIMIT 1", pool)
        is_it = plan is not None and plan["outcome"] == outcome
        return plan if is_it and all(plan[name] == value for name, value in wanted.items()) else None

    plan = await eventually(found, within_s=60)
    return plan, PoolPlanResult.model_validate(plan["result"])


def gpus_of(result: PoolPlanResult, place: str | None = None) -> int:
    takes = {"small": 1, "large": 2}
    return sum(takes[each.mode] * each.count for each in result.plan.instances if place in (None, each.location))


async def test_a_lost_zone_is_planned_into_the_other_one_at_once(serving: Installation, database: Any) -> None:
    for node, zone in (("node-w", "US-CAL-CISO"), ("node-e", "DE")):
        await add_node(database, node, gpus=4, zone=zone)
    await add_pool(database, "chat", wants(2, places=PLACES))
    _, before = await newest(database, "chat")
    assert gpus_of(before) == 4
    home = "west" if gpus_of(before, "west") else "east"
    lost = {"west": "node-w", "east": "node-e"}[home]
    await database.execute("UPDATE nodes SET state = 'lost' WHERE id = $1", lost)
    plan, after = await newest(database, "chat", trigger="node_lost")
    assert (gpus_of(after, home), gpus_of(after)) == (0, 4)
    assert after.plan.shortfall == []
    assert await database.fetchval("SELECT plan_id FROM pools WHERE name = 'chat'") == plan["id"]


async def test_a_pool_made_while_its_gpus_were_taken_is_planned_once_they_are_free(
    serving: Installation, database: Any
) -> None:
    await add_node(database, "node-w", gpus=4)
    await database.execute(
        "INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state) "
        "VALUES ('job', 'acme', 'a', 'p', '{}', $1, 'running')",
        {"preemptible": False},
    )
    await database.execute(
        "INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port) "
        "VALUES ('job.1', 'job', 1, 'running', 4, $1, 0)",
        [{"node_id": "node-w", "devices": [0, 1, 2, 3]}],
    )
    await database.execute("INSERT INTO device_claims SELECT 'node-w', i, 'job.1' FROM generate_series(0, 3) i")
    await add_pool(database, "early", wants(2))
    _, before = await newest(database, "early")
    assert (before.plan.instances, len(before.plan.shortfall)) == ([], 1)
    await database.execute("DELETE FROM device_claims")
    _, after = await newest(database, "early", trigger="gpus_freed")
    assert (gpus_of(after), after.plan.shortfall) == (4, [])


async def asked(database: Any) -> list[str]:
    """Return the pools whose plans a worker has asked the optimizer for, and waits."""
    rows = await database.fetch("SELECT pool FROM pool_plans WHERE state = 'running' AND problem ? 'asked'")
    return [row["pool"] for row in rows]


async def two_at_work(serving: Installation, database: Any, head_room: float) -> str:
    """Have both planners at work on pools that each want all GPUs; return the pool whose turn it is.

    A head-room of its own makes each problem one that the optimizer has not solved before.
    """
    await add_node(database, "node-w", gpus=4)
    for pool in ("first", "second"):
        await add_pool(database, pool, wants(2, head_room=head_room if pool == "first" else head_room - 0.01))

    async def both() -> Any:
        running = await database.fetchval("SELECT count(*) FROM pool_plans WHERE state = 'running'")
        turn = await asked(database)
        return turn[0] if running == 2 and turn else None

    return await eventually(both, within_s=60)


async def test_two_planners_never_plan_the_same_gpus(serving: Installation, database: Any) -> None:
    solver = serving.pid("plan-solver")
    os.kill(solver, signal.SIGSTOP)
    try:
        turn = await two_at_work(serving, database, 1.1)
        waiting = await eventually(lambda: locks(database, granted=False))
        assert (await asked(database), waiting) == ([turn], 1), "the other one waits"
    finally:
        os.kill(solver, signal.SIGCONT)
    other = {"first": "second", "second": "first"}[turn]
    assert gpus_of((await newest(database, turn))[1]) == 4
    _, empty = await newest(database, other)
    assert (gpus_of(empty), empty.forecasts.gpus) == (0, {"west": {"A100": 0}})


async def locks(database: Any, *, granted: bool) -> int:
    return await database.fetchval(
        "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' "
        "AND a.application_name = 'serving-turn' AND a.datname = current_database() AND l.granted = $1",
        granted,
    )


async def test_a_planner_killed_in_its_turn_leaves_it_to_the_other(serving: Installation, database: Any) -> None:
    solver = serving.pid("plan-solver")
    os.kill(solver, signal.SIGSTOP)
    try:
        turn = await two_at_work(serving, database, 1.08)
        other = {"first": "second", "second": "first"}[turn]
        holder = await database.fetchval(
            "SELECT a.client_port FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' "
            "AND a.application_name = 'serving-turn' AND a.datname = current_database() AND l.granted"
        )
        (planner,) = [
            process
            for process in psutil.Process(serving.pid("serving")).children()
            if any(each.laddr.port == holder for each in process.net_connections() if each.laddr)
        ]
        planner.kill()
        await database.execute("UPDATE pool_plans SET lease_until = now() WHERE pool = $1 AND state = 'running'", turn)

        async def taken_over() -> bool:
            return other in await asked(database)

        await eventually(taken_over, within_s=60)
    finally:
        os.kill(solver, signal.SIGCONT)
    plans = [await newest(database, pool) for pool in ("first", "second")]
    assert sorted(gpus_of(result) for _, result in plans) == [0, 4], "the second to be applied no longer fitted"
    assert await database.fetchval("SELECT attempts FROM pool_plans WHERE pool = $1 ORDER BY id LIMIT 1", turn) == 2
