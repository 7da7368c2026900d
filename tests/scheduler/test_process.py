"""The scheduler as a process has it: it leads, decides, sleeps until something may be to do, and stops with its app."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import asyncpg
import pytest

from services.contracts.streams import HINTS_STREAM
from services.core.domain.errors import PolicyConfigError
from services.db.database import plain_url
from services.kit.tasks import end_tasks
from services.scheduler import loop
from services.scheduler.app import create_app
from services.scheduler.repository import outbox
from tests.scheduler.world import World
from tests.support.control_plane import eventually

LEADER = "scheduler-leader"


async def test_an_unknown_policy_is_said_before_anything_is_opened(world: World) -> None:
    with pytest.raises(PolicyConfigError, match="unknown policy 'x'"):
        create_app(world.settings.model_copy(update={"policy": "x"}))


async def test_the_app_starts_what_waits_and_leads_alone(world: World) -> None:
    await world.node("n1", 1)
    job = await world.job()
    app = create_app(world.settings)
    other = create_app(world.settings)

    async with app.router.lifespan_context(app), other.router.lifespan_context(other):

        async def starts() -> bool:
            return await world.state(job) == "starting"

        await eventually(starts)
        await app.state.database.ping()
        (leaders,) = await world.fetch("SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = $1", LEADER)
        assert leaders["n"] >= 1
        (plans,) = await world.fetch("SELECT count(*) AS n FROM plans WHERE starts > 0")
        assert plans["n"] == 1

    connection = await asyncpg.connect(plain_url(world.settings.database_url))
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted") == 0
    finally:
        await connection.close()


async def test_commands_go_out_once_a_full_database_takes_writes_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("n1", 1)
    await world.job()
    await world.scheduler.turn()
    refusals = [asyncpg.PostgresError("no space left on device")]
    delete = outbox.delete

    async def delete_later(connection: Any, ids: Any) -> None:
        if refusals:
            raise refusals.pop()
        await delete(connection, ids)

    monkeypatch.setattr(outbox, "delete", delete_later)
    relaying = asyncio.create_task(loop.Relay(world.database, world.redis, look_every_s=0.01).run())

    async def is_empty() -> bool:
        return await world.fetch("SELECT 1 FROM outbox") == []

    try:
        await eventually(is_empty)
    finally:
        await end_tasks([relaying])


class Asked:
    """Redis as the scheduler's sleep asks it: it notes for how long, and has the hints a test gives it."""

    def __init__(self, *hints: str) -> None:
        self.block_ms: list[int] = []
        self.since: list[str] = []
        self._hints = [(hint, {}) for hint in hints]

    async def xread(self, streams: dict[str, str], block: int) -> list[Any]:
        self.block_ms.append(block)
        self.since += streams.values()
        return [[HINTS_STREAM, self._hints]] if self._hints else []


@pytest.mark.parametrize(
    ("tick_s", "since_round_s", "again_in_s", "least_ms", "most_ms"),
    [
        (1.0, 0.0, math.inf, 1_000, 1_000),  # the next tick
        (60.0, 3_590.0, math.inf, 8_000, 10_000),  # the next active round, an hour after the last
        (60.0, 0.0, 5.0, 4_000, 5_000),  # when the policy asked to be asked again
        (60.0, 9_999.0, math.inf, 10, 10),  # overdue
    ],
)
async def test_it_sleeps_until_something_may_be_to_do(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    tick_s: float,
    since_round_s: float,
    again_in_s: float,
    least_ms: int,
    most_ms: int,
) -> None:
    await world.scheduler.prepare()
    await world.fetch(
        "UPDATE scheduler_state SET last_active_at = now() - make_interval(secs => $1) RETURNING 1", since_round_s
    )
    asked = Asked()
    monkeypatch.setattr(world.scheduler, "_redis", asked)
    monkeypatch.setattr(world.scheduler, "_settings", world.settings.model_copy(update={"tick_s": tick_s}))
    monkeypatch.setattr(world.scheduler, "_look_again_at_s", time.monotonic() + again_in_s)

    await world.scheduler._sleep_until_woken()

    (block_ms,) = asked.block_ms
    assert least_ms <= block_ms <= most_ms


async def test_hints_are_read_once_and_a_swarm_of_them_is_let_arrive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    await world.scheduler.prepare()
    asked = Asked("5-0", "7-0")
    monkeypatch.setattr(world.scheduler, "_redis", asked)
    monkeypatch.setattr(world.scheduler, "_settings", world.settings.model_copy(update={"passive_interval_s": 1_000.0}))
    monkeypatch.setattr(world.scheduler, "_passive_at_s", time.monotonic())
    monkeypatch.setattr(loop.asyncio, "sleep", sleep)

    await world.scheduler._sleep_until_woken()
    await world.scheduler._sleep_until_woken()
    monkeypatch.setattr(world.scheduler, "_passive_at_s", -math.inf)
    await world.scheduler._sleep_until_woken()

    assert asked.since[1:] == ["7-0", "7-0"]
    assert 900 < slept[0] <= 1_000, "a passive round was just held: the next one is due in its interval"
    assert slept[2] == 0.01
