"""Rows written while the database's clock was ahead, once it has been set back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import DateTime

from services.db.metadata import metadata
from services.serving.rectifier import Rectifier
from services.serving.repository import ServingRepository
from services.serving.repository.set_back import PAST
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
    assert await Rectifier(ServingRepository(world.engine)).look() == 0


@pytest.mark.parametrize("table", PAST)
def test_each_time_of_a_table_is_of_the_past_or_planned(table: str) -> None:
    times = {column.name for column in metadata.tables[table].columns if isinstance(column.type, DateTime)}
    assert times - PLANNED == set(PAST[table])


async def test_a_pool_made_while_the_clock_was_ahead_is_planned_once_and_run(world: World) -> None:
    await world.planned("pool")
    await shift(world, "pools")
    await shift(world, "pool_plans")
    for _ in range(3):
        await world.look()
    waiting = [plan["id"] for plan in await world.of("pool") if plan["state"] == "queued"]
    for plan_id in waiting:
        await world.answer(plan_id)
    await world.look()
    assert len(await world.of("pool")) <= 2
    assert await world.in_force("pool") == (await world.of("pool"))[-1]["id"]
    assert await world.database.fetchval("SELECT created_at < now() AND updated_at < now() FROM pools")
