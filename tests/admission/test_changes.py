"""Streams of events that also tell what else has changed."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing

import asyncpg
import pytest

from services.admission.changes import TABLES, Changes
from services.admission.jobs import Jobs
from services.admission.repository.events import Scope
from services.admission.streaming import EventFeed, EventStreams
from services.contracts.changes import ChangeKind
from services.db.engine import create_engine
from tests.admission.installation import Admission
from tests.support import schema
from tests.support.control_plane import eventually

WRITES = {
    ChangeKind.NODES: "INSERT INTO node_power (node_id) VALUES ($1)",
    ChangeKind.APPS: "INSERT INTO fleets (name, tenant_id, key_id, spec) VALUES ($1, '', '', '{}')",
}


@pytest.fixture
async def streams(admission: Admission, database_url: str) -> AsyncIterator[EventStreams]:
    """Streams that look often."""
    del admission  # which has made the tables
    engine = create_engine(database_url)
    feed, changes = EventFeed(engine, poll_s=0.01, buffer=100), Changes(engine, poll_s=0.05)
    yield EventStreams(feed, changes, Jobs(engine, lambda: None), keep_alive_s=0.2)

    async def is_over() -> bool:
        return changes._task is None

    await eventually(is_over)  # nobody looks any more, and so nothing is read
    await engine.dispose()


async def told(
    streams: EventStreams, scope: Scope, database: asyncpg.Connection, *kinds: ChangeKind
) -> tuple[set[str], list[str]]:
    """Write to tables of ``kinds`` until one that is told is of the last; return what was told, and of which jobs."""
    stream = await streams.of_all(scope, None, follow=True, changes=True)
    found, jobs = set[str](), list[str]()
    async with asyncio.timeout(30), aclosing(stream):  # pyright: ignore[reportArgumentType]
        async for message in stream:
            if message.startswith(b"event: changed"):
                found |= set(json.loads(message.split(b"data: ")[1])["kinds"])
            elif message.startswith(b"id: "):
                jobs.append(json.loads(message.split(b"data: ")[1])["job_id"])
            if kinds[-1] in found and jobs:
                return found, jobs
            await asyncio.sleep(0.05)
            for kind in kinds:
                await database.execute(WRITES[kind], secrets.token_hex(8))
            await database.execute("INSERT INTO job_events (job_id, tenant_id, type) VALUES ('j', 'default', 'job.n')")
    raise AssertionError("the stream ended")


async def test_an_operator_is_told_what_has_changed_beside_jobs_events(
    admission: Admission, streams: EventStreams
) -> None:
    found, jobs = await told(streams, Scope(), admission.database, ChangeKind.NODES, ChangeKind.APPS)

    assert {ChangeKind.NODES, ChangeKind.APPS} <= found
    assert ChangeKind.CARBON not in found
    assert set(jobs) == {"j"}


async def test_a_tenant_is_not_told_of_nodes(admission: Admission, streams: EventStreams) -> None:
    scope = Scope(tenant_id="default")

    assert ChangeKind.NODES not in (await told(streams, scope, admission.database, *WRITES))[0]


def test_each_kind_names_tables_that_there_are() -> None:
    assert {table for tables in TABLES.values() for table in tables} <= schema.TABLES
    assert set(TABLES) == set(ChangeKind)
