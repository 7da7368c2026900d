"""Serving at rest: its loops wait while there is no pool, fleet or application."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import text

from services.db.engine import create_engine
from services.kit import presence
from services.kit.presence import Presence
from services.kit.tasks import end_tasks
from services.serving.controller.controller import Controller
from services.serving.fleets.planner import FleetPlanner
from services.serving.planning.planner import Planner, PlanWorkers
from services.serving.repository import ServingRepository
from tests.support.control_plane import eventually


class Asked:
    """A database that is asked whether there is anything."""

    def __init__(self) -> None:
        self.times = 0
        self.answer = False

    async def __call__(self) -> bool:
        self.times += 1
        return self.answer


@pytest.fixture
def asked() -> Asked:
    return Asked()


async def test_loops_wait_together_and_one_question_answers_all(asked: Asked) -> None:
    there = Presence(asked)

    waiting = [asyncio.create_task(there.wait()) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (asked.times, any(each.done() for each in waiting)) == (1, False)

    asked.answer = True
    there.written.set()
    await asyncio.gather(*waiting)
    assert asked.times == 2
    await there.wait()
    assert asked.times == 2


async def test_what_another_process_writes_is_found(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LOOK_S", 0.01)
    there = Presence(asked)
    waiting = asyncio.create_task(there.wait())
    await asyncio.sleep(0)
    asked.answer = True

    await waiting


async def test_they_wait_again_once_nothing_is_left(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "LOOK_S", 0.0)
    asked.answer = True
    there = Presence(asked)
    await there.wait()
    asked.answer = False
    monkeypatch.setattr(presence, "LOOK_S", 60.0)

    waiting = asyncio.create_task(there.wait())
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert not waiting.done()
    waiting.cancel()


async def test_a_first_application_wakes_the_process_that_took_it(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=2)
    repository = ServingRepository(engine)
    try:
        waiting = asyncio.create_task(repository.presence.wait())
        await asyncio.sleep(0)
        async with repository.writing() as queries:
            await queries.connection.execute(
                text("INSERT INTO fleets (name, tenant_id, key_id, spec) VALUES ('f', 't', 'k', '{}')")
            )

        async with asyncio.timeout(presence.LOOK_S):
            await waiting
    finally:
        await engine.dispose()


async def test_no_loop_looks_while_there_is_nothing(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: set[str] = set()
    repository: Any = SimpleNamespace(presence=Presence(asked))
    rest, when = cast("Any", None), repository.presence.wait
    settings: Any = SimpleNamespace(instance_look_s=0.01)
    loops = (
        Planner(rest, rest, 0.01, when),
        PlanWorkers(rest, at_once=1, look_s=0.01, when=when),
        FleetPlanner(repository, rest, rest, rest, settings),
        Controller(repository, rest, rest, settings),
    )

    async def all_have_looked() -> bool:
        return len(looked) == len(loops)

    for loop in loops:

        async def look(self: object) -> None:
            looked.add(type(self).__name__)

        monkeypatch.setattr(type(loop), "look", look)
    running = [asyncio.create_task(loop.run()) for loop in loops]
    for _ in range(20):
        await asyncio.sleep(0)
    assert looked == set()

    asked.answer = True
    repository.presence.written.set()
    await eventually(all_have_looked)
    await end_tasks(running)
