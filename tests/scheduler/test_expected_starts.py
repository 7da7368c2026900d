"""When a waiting job is expected to start, as users read it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from services.core.cycle.snapshot import Trigger
from services.core.domain.carbon import CarbonOutlook, Signal
from services.scheduler.planning.snapshot import load
from tests.scheduler.world import World, a_world
from tests.support.builders import hourly_curve
from tests.support.servers import fresh_database

pytestmark = pytest.mark.usefixtures("the_lab")


@pytest.fixture
async def dirty(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    """A world under ``gaia`` with a free node, in the first of five dirty hours before four green ones."""
    async with a_world(fresh_database(postgres_url), redis_url, policy="gaia") as world:
        hour_s = time.time() // 3_600 * 3_600
        curve = hourly_curve([400] * 5 + [50] * 4 + [400] * 15, start_s=hour_s)
        world.scheduler._carbon._known["Z"] = CarbonOutlook("Z", Signal.AVERAGE_DIRECT, curve)
        await world.node("n1")
        yield world


async def start_of(world: World, job: str) -> tuple[str, datetime | None, str]:
    """Return the reason and the expected start of a job, and what changes when its row is written."""
    (row,) = await world.fetch("SELECT reason, expected_start_at, xmin::text FROM jobs WHERE id = $1", job)
    return tuple(row)


async def test_a_job_shows_its_planned_start_until_it_starts(dirty: World) -> None:
    job = await dirty.job()
    await dirty.scheduler.turn()
    (state,) = await dirty.fetch("SELECT memory FROM scheduler_state")
    planned_at = datetime.fromtimestamp(state["memory"]["start_s"][job], UTC)

    assert planned_at > datetime.now(UTC)
    assert (await start_of(dirty, job))[:2] == ("greener_hours", planned_at)

    await dirty.fetch(
        "UPDATE scheduler_state SET memory = $1, version = version + 1 RETURNING 1", {"start_s": {job: time.time() - 1}}
    )
    await dirty.scheduler.hold(Trigger.PASSIVE)
    assert await dirty.state(job) == "starting"
    assert (await start_of(dirty, job))[1] is None


async def test_a_round_that_expects_the_same_writes_no_job(dirty: World) -> None:
    job = await dirty.job()
    await dirty.scheduler.turn()
    before = await start_of(dirty, job)
    assert before[0] == "greener_hours"

    for trigger in Trigger:
        await dirty.scheduler.hold(trigger)

    assert await start_of(dirty, job) == before


async def test_a_job_that_outranks_others_shows_the_next_active_round(postgres_url: str, redis_url: str) -> None:
    async with a_world(fresh_database(postgres_url), redis_url, policy="srtf") as world:
        await world.node("n1", 1)
        await world.running(1)
        job = await world.job(1, priority=9)
        await world.scheduler.turn()
        reason, due_at, written = await start_of(world, job)
        (state,) = await world.fetch("SELECT last_active_at FROM scheduler_state")
        due_s = state["last_active_at"].timestamp() + world.settings.round_interval_s + world.settings.tick_s

        assert reason == "waiting_for_round"
        assert due_at is not None
        assert abs(due_at.timestamp() - due_s) <= 0.5
        await world.scheduler.hold(Trigger.PASSIVE)
        assert await start_of(world, job) == (reason, due_at, written)


async def test_passive_rounds_know_when_the_next_active_one_is_due(world: World) -> None:
    async def next_active_s(trigger: Trigger) -> tuple[float, float]:
        outlooks = await world.scheduler._carbon.outlooks([], time.time())
        snapshot = (await load(world.database, trigger, outlooks, world.settings)).snapshot
        return snapshot.next_active_s, snapshot.now_s

    interval_s, tick_s = world.settings.round_interval_s, world.settings.tick_s
    await world.scheduler.prepare()
    due_s, now_s = await next_active_s(Trigger.PASSIVE)
    assert due_s == now_s + tick_s, "none was held yet"

    for ago_s, in_s in ((600.0, interval_s - 600.0), (interval_s + 9.0, 0.0)):
        await world.fetch(
            "UPDATE scheduler_state SET last_active_at = now() - make_interval(secs => $1) RETURNING 1", ago_s
        )
        due_s, now_s = await next_active_s(Trigger.PASSIVE)
        assert due_s == pytest.approx(now_s + in_s + tick_s, abs=30.0)
        assert due_s >= now_s + tick_s
        due_s, now_s = await next_active_s(Trigger.ACTIVE)
        assert due_s == now_s + interval_s + tick_s
