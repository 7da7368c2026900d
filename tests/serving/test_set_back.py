"""Rows written while the database's clock was ahead, once it has been set back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import DateTime

from services.contracts.serving import PlanTrigger, PoolPlanQuery
from services.db import tables
from services.serving.repository import ServingRepository
from services.serving.repository.set_back import PAST, set_right
from services.serving.upkeep import rectify
from tests.serving.fleets import ACME, OPERATOR, a_fleet, a_fleet_world, an_app
from tests.serving.pools import a_spec, add_pool
from tests.serving.world import World, a_world

AHEAD = timedelta(hours=1)
PLANNED = {"slot_at", "from_at", "deadline_at", "lease_until", "retry_at"}
"""Columns of times that may be yet to come."""


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with a_world(database_url) as found:
        yield found


async def shift(world: Any, table: str) -> None:
    """Have a table be written by a clock that was ahead."""
    changes = ", ".join(f"{column} = {column} + $1" for column in PAST[table])
    await world.database.execute(f"UPDATE {table} SET {changes}", AHEAD)


async def test_nothing_is_changed_while_the_clock_is_right(world: World) -> None:
    await world.planned("right")
    assert await rectify(ServingRepository(world.engine)) == 0


@pytest.mark.parametrize("table", PAST)
async def test_what_is_written_after_the_look_began_is_not_ahead(database_url: str, table: str) -> None:
    """A transaction's ``now()`` is its beginning, and what others commit meanwhile is later than that."""
    async with a_fleet_world(database_url) as world:
        await world.fleets.put("edge", a_fleet(), OPERATOR)
        await world.apps.put("photos", an_app(), ACME)
        await world.settle()
        await add_pool(world.database, "chat", a_spec())
        plan = "INSERT INTO pool_plans (id, tenant_id, key_id, pool, revision, trigger, slot_at, from_at, deadline_at, "
        values = "VALUES ('p', 'a', 'k', 'chat', 1, 'clock', now(), now(), now(), 'queued', '{}', '')"
        await world.database.execute(f"{plan} state, problem, problem_sha256) {values}")
        async with world.repository.writing() as queries:
            await queries.now()
            written = ", ".join(f"{column} = now()" for column in PAST[table])
            assert await world.database.execute(f"UPDATE {table} SET {written}") != "UPDATE 0"
            assert await set_right(queries.connection) == 0


@pytest.mark.parametrize("table", PAST)
def test_each_time_of_a_table_is_of_the_past_or_planned(table: str) -> None:
    times = {column.name for column in getattr(tables, table).c if isinstance(column.type, DateTime)}
    assert times - PLANNED == set(PAST[table])


async def test_a_fleet_planned_while_the_clock_was_ahead_is_planned_anew(database_url: str) -> None:
    async with a_fleet_world(database_url) as world:
        await world.fleets.put("edge", a_fleet(), OPERATOR)
        await world.apps.put("photos", an_app(), ACME)
        ahead = (await world.settle())["id"]
        await shift(world, "fleet_plans")
        later = await world.database.fetchval("UPDATE fleet_plans SET id = 'plan_z' RETURNING id")  # ids tell time too
        await world.database.execute("UPDATE apps SET plan_id = $2 WHERE plan_id = $1", ahead, later)
        await world.apps.put("photos", an_app(requests_per_s=10), ACME)
        world.grid.gco2_per_kwh["GB"] = 400
        await rectify(world.repository)
        await world.turn()
        await world.database.execute("UPDATE fleet_plans SET made_at = now() WHERE id = 'plan_z'")  # had it looked late
        applied = "SELECT count(*) FROM fleet_plans WHERE trigger = 'parameter' AND state = 'applied'"
        for _ in range(60):
            await world.turn()
            if await world.database.fetchval(applied):
                break
        made = await world.database.fetch("SELECT trigger, state FROM fleet_plans ORDER BY id DESC")
        assert [tuple(row) for row in made] == [("first", "applied"), ("parameter", "applied")]


async def test_a_wait_begun_while_the_clock_was_ahead_is_over_once_it_is_set_back(database_url: str) -> None:
    async with a_fleet_world(database_url) as world:
        await world.fleets.put("edge", a_fleet(), OPERATOR)
        await world.apps.put("photos", an_app(), ACME)
        await world.settle()
        world.grid.gco2_per_kwh["GB"] = 400
        await world.later(10)
        world.fails = "The optimizer is full."
        await world.settle("failed")
        world.fails = None
        await shift(world, "fleet_plans")
        await world.database.execute("UPDATE fleets SET retry_at = retry_at + $1", AHEAD)
        await rectify(world.repository)
        await world.turn()
        assert (await world.plan())["state"] == "solving", "again"


async def test_a_pool_made_while_the_clock_was_ahead_is_planned_once_and_run(world: World) -> None:
    await world.planned("pool")
    await shift(world, "pools")
    await shift(world, "pool_plans")
    await world.database.execute("UPDATE pool_plans SET id = 'plan_z'")
    await world.database.execute("UPDATE pools SET plan_id = 'plan_z'")
    await world.look()
    asked = await world.plans.submit("pool", PlanTrigger.REQUEST, OPERATOR)
    await world.answer(asked)
    for _ in range(3):
        await world.look()
    assert [plan["id"] for plan in await world.of("pool")] == [asked, "plan_z"]
    assert await world.in_force("pool") == asked
    async with ServingRepository(world.engine).reading() as queries:
        assert [plan_id for _, plan_id, _ in await queries.plans.standing()] == [asked]
    assert await world.database.fetchval("SELECT created_at < now() AND updated_at < now() FROM pools")


@pytest.mark.parametrize("owner", ["pools", "apps"])
async def test_no_row_is_older_than_its_owner_once_the_clock_is_set_back(world: World, owner: str) -> None:
    key = "chat"
    if owner == "pools":
        await world.planned("chat")
        await shift(world, "pool_plans")
    else:
        key = "app:chat"
        await world.database.execute(
            "INSERT INTO apps (name, tenant_id, key_id, fleet, spec) VALUES ('chat', 'acme', 'key', 'edge', '{}')"
        )
    await world.database.execute(
        "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state)"
        " VALUES ('instance_' || $1, $1, 'acme', 'here', 'one', '{}', 'wanted')",
        key,
    )
    await shift(world, "pool_instances")
    assert await rectify(ServingRepository(world.engine))
    made_at = await world.database.fetchval(f"SELECT created_at FROM {owner} WHERE name = 'chat'")
    instance = "SELECT created_at FROM pool_instances WHERE pool = $1"
    assert await world.database.fetchval(instance, key) == made_at
    if owner == "pools":
        assert await world.database.fetchval("SELECT submitted_at FROM pool_plans") == made_at
        assert len((await world.plans.page("chat", PoolPlanQuery())).items) == 1
