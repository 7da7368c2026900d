"""A new job of an engine with a queue of its own is planned by an active round, which alone knows greener hours."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from services.contracts.engines import EngineMode
from tests.engines.bridge import Bridge, a_job
from tests.engines.test_savings import HOUR_S, until_green
from tests.scheduler.world import World, a_world
from tests.support.servers import fresh_database


def a_new_job(name: str) -> Any:
    return a_job(name, time_limit_s=3_600, submitted_at=datetime.now(UTC))


@pytest.mark.parametrize("mode", list(EngineMode))
async def test_a_new_job_waits_for_a_greener_hour_from_the_first(world: World, mode: EngineMode) -> None:
    """It is not released in a passive round only to be stopped by the next active one."""
    bridge = Bridge(world, mode)
    await bridge.enrol(nodes=1)
    await until_green(
        world, (time.time() // HOUR_S + 5) * HOUR_S, "joint", slack_s=12 * HOUR_S, slack_share=100.0, hour_wh=0.0
    )
    await bridge.say()
    await bridge.say(a_new_job("1"))
    found = await bridge.decision("1")
    assert found["action"] == "hold", found
    assert (await bridge.job("1"))["reason"] == "greener_hours"


async def test_until_then_nothing_is_decided_of_it(postgres_url: str, redis_url: str) -> None:
    """Active rounds keep their distance; a job that came before the last one is decided on in any round."""
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, engine_new_jobs_s=600) as world:
        bridge = Bridge(world)
        await bridge.enrol(nodes=1)
        await bridge.say()
        await bridge.say(a_new_job("1"))
        assert (await bridge.decision("1"), await bridge.sent()) == ({}, [])
        await world.fetch("UPDATE scheduler_state SET last_active_at = now() - interval '601 s'")
        await bridge.say()
        assert (await bridge.decision("1"))["action"] == "release"
        before = await world.fetch("SELECT last_active_at FROM scheduler_state")
        await bridge.say()
        assert await world.fetch("SELECT last_active_at FROM scheduler_state") == before, "once for each new job"


async def test_an_engine_without_a_queue_starts_at_once(postgres_url: str, redis_url: str) -> None:
    url = fresh_database(postgres_url)
    async with a_world(url, redis_url, engine_new_jobs_s=600) as world:
        bridge = Bridge(world, kind="ray")
        await bridge.enrol(nodes=1)
        await bridge.say()
        await bridge.say(a_new_job("1"))
        assert (await bridge.decision("1"))["action"] == "release"
