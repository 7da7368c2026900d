"""One scheduler decides, whatever happens between it and the database."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest

from services.core.cycle.snapshot import Trigger
from services.db import leadership, locks
from services.db.database import Database
from services.db.leadership import Leadership
from services.db.locks import LEADERSHIP
from services.scheduler import loop
from services.scheduler.loop import Scheduler
from services.scheduler.planning.apply import StalePlanError
from tests.chaos.links import Link
from tests.scheduler.world import World
from tests.support.control_plane import eventually

leading = partial(Leadership, lock=LEADERSHIP, name="scheduler-leader")

ENDED = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'scheduler-leader'"


async def test_a_plan_of_a_leader_that_lost_its_lock_while_it_decided_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.node("n1", 1)
    job = await world.job()
    old = leading(world.settings.database_url)
    new = leading(world.settings.database_url)
    decided, may_apply, refused = asyncio.Event(), asyncio.Event(), list[str]()
    apply: Any = loop.apply

    async def late(database: Database, *arguments: Any, **options: Any) -> Any:
        decided.set()
        await may_apply.wait()
        try:
            return await apply(database, *arguments, **options)
        except StalePlanError as error:
            refused.append(str(error))
            raise

    assert await old.hold()
    await world.scheduler.prepare()
    monkeypatch.setattr(loop, "apply", late)
    of_old = asyncio.create_task(world.scheduler.hold(Trigger.PASSIVE))
    await asyncio.wait([of_old, asyncio.ensure_future(decided.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert decided.is_set()
    monkeypatch.setattr(loop, "apply", apply)

    await world.fetch(ENDED)
    assert not await old.hold()
    await eventually(new.hold)
    assert not await old.hold()
    scheduler = Scheduler(world.settings, world.database, world.redis, world.scheduler._carbon)
    round_of_new = await scheduler.hold(Trigger.PASSIVE)
    assert round_of_new
    assert round_of_new.applied.starts == 1
    may_apply.set()
    await of_old
    assert refused == ["another plan or another policy came first"]
    assert await world.state(job) == "starting"
    (found,) = await world.fetch("SELECT count(*) AS n FROM allocations")
    assert found["n"] == 1
    new.release()


async def test_a_lock_whose_answer_is_lost_is_given_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    connections = list[Any]()

    async def lost(connection: Any, number: int) -> bool:
        connections.append(connection)
        assert await locks.try_session_lock(connection, number)
        raise TimeoutError

    first, second = leading(world.settings.database_url), leading(world.settings.database_url)
    monkeypatch.setattr(leadership, "try_session_lock", lost)
    assert not await first.hold()
    monkeypatch.undo()
    await eventually(second.hold)
    second.release()


async def test_a_leader_that_is_cut_off_leads_no_more_and_another_does(world: World) -> None:
    address = urlsplit(world.settings.database_url)
    assert address.hostname
    assert address.port
    async with Link(address.hostname, address.port) as link:
        url = world.settings.database_url.replace(f":{address.port}/", f":{link.port}/")
        behind, beside = leading(url), leading(world.settings.database_url)
        for _ in range(3):
            await eventually(behind.hold)
            assert not await beside.hold()
            link.begin("cut")
            assert not await behind.hold()
            await eventually(beside.hold)
            link.end("cut")
            assert not await behind.hold(), "the other one leads"
            beside.release()
        behind.release()


async def test_sessions_of_a_host_that_is_lost_end_with_their_locks(world: World) -> None:
    (found,) = await world.fetch(
        "SELECT current_setting('tcp_keepalives_idle')::int + current_setting('tcp_keepalives_interval')::int "
        "* current_setting('tcp_keepalives_count')::int AS silence_s"
    )
    assert found["silence_s"] <= 25
