"""Events: in one order for everybody, none missed, resumable."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text

from services.admission.repository import events
from services.admission.repository.events import BEGINNING, Position, Scope, StoredEvent
from services.admission.streaming import EventFeed
from services.db.engine import create_engine
from tests.admission.installation import Admission


@asynccontextmanager
async def a_feed(database_url: str, buffer: int = 1_000) -> AsyncIterator[EventFeed]:
    engine = create_engine(database_url)
    try:
        yield EventFeed(engine, poll_s=0.01, buffer=buffer)
    finally:
        await engine.dispose()


async def _take(feed: EventFeed, scope: Scope, after: Position, count: int) -> list[StoredEvent]:
    found: list[StoredEvent] = []
    async with asyncio.timeout(20), aclosing(feed.follow(scope, after, keep_alive_s=5)) as events:
        async for event in events:
            if event is not None:
                found.append(event)
            if len(found) == count:
                break
    return found


def _sse(text: str) -> list[dict[str, str]]:
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def _tell(connection: asyncpg.Connection, job_id: str, kind: str) -> None:
    await connection.execute(
        "INSERT INTO job_events (job_id, tenant_id, type) VALUES ($1, 'default', $2)", job_id, kind
    )


async def test_a_tenants_events_are_found_without_reading_those_of_all(admission: Admission) -> None:
    crowd = "INSERT INTO job_events (job_id, tenant_id, type) SELECT 'j', 'crowd', 't' FROM generate_series(1, 20000)"
    await admission.database.execute(crowd)
    await admission.database.execute("ANALYZE job_events")
    engine = create_engine(admission.database_url)
    query = text("EXPLAIN " + events._READ.format(condition=events._CONDITIONS["tenant_id"]))
    async with engine.connect() as connection:
        values = {"xid": 0, "sequence": 0, "page": events.PAGE, "tenant_id": "small"}
        plan = "\n".join((await connection.execute(query, values)).scalars())
    await engine.dispose()
    await admission.database.execute("DELETE FROM job_events WHERE tenant_id = 'crowd'")
    assert "job_events_by_tenant" in plan, plan


async def test_a_jobs_stream_tells_its_story_and_ends(admission: Admission) -> None:
    job_id = await admission.submit()
    await admission.ask("POST", f"/v1/jobs/{job_id}/hold")
    await admission.ask("POST", f"/v1/jobs/{job_id}/cancel")
    answer = await admission.ask("GET", f"/v1/jobs/{job_id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = _sse(answer.text)
    assert [event["event"] for event in events] == ["job.submitted", "job.held", "job.cancelled"]
    assert all(json.loads(event["data"])["id"] == event["id"] for event in events)

    rest = await admission.ask("GET", f"/v1/jobs/{job_id}/events", headers={"last-event-id": events[0]["id"]})
    assert _sse(rest.text) == events[1:]
    over = await admission.ask("GET", f"/v1/jobs/{job_id}/events", headers={"last-event-id": events[-1]["id"]})
    assert (over.status_code, over.text) == (204, "")


async def test_a_stream_waits_for_the_end(admission: Admission) -> None:
    job_id = await admission.submit()
    reading = asyncio.create_task(admission.ask("GET", f"/v1/jobs/{job_id}/events"))
    await admission.start(job_id)
    assert not (await asyncio.wait({reading}, timeout=0.3))[0]
    await admission.end(job_id)
    assert [event["event"] for event in _sse((await reading).text)] == ["job.submitted", "job.succeeded"]


async def test_events_without_following(admission: Admission) -> None:
    job_id = await admission.submit()
    mine = await admission.ask("GET", f"/v1/jobs/{job_id}/events", params={"follow": "false"})
    assert [event["event"] for event in _sse(mine.text)] == ["job.submitted"]
    everything = await admission.ask("GET", "/v1/events", params={"follow": "false"})
    assert _sse(everything.text)[-1] == _sse(mine.text)[0]
    other = await admission.make_tenant("sees-nothing")
    assert _sse((await admission.ask("GET", "/v1/events", tenant=other, params={"follow": "false"})).text) == []


@pytest.mark.parametrize("bad", ["x", "1", "1-", "-1", "1-1-1", "1-x", "²-1".encode("latin-1"), f"{10**18}-1"])
async def test_a_bad_last_event_id_is_pointed_out(admission: Admission, bad: str | bytes) -> None:
    job_id = await admission.submit()
    for path in (f"/v1/jobs/{job_id}/events", "/v1/events"):
        answer = await admission.ask("GET", path, headers={"last-event-id": bad})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_cursor")
        assert answer.json()["errors"][0]["pointer"] == "#Last-Event-ID"


async def test_an_event_of_a_slow_transaction_is_not_passed_over(admission: Admission, database_url: str) -> None:
    slow = await asyncpg.connect(database_url)
    async with a_feed(database_url) as feed:
        begin = await feed.now()
        transaction = slow.transaction()
        await transaction.start()
        await _tell(slow, "slow", "job.slow")  # has the lower number, and commits last
        await _tell(admission.database, "fast", "job.fast")
        reading = asyncio.create_task(_take(feed, Scope(), begin, 2))
        assert not (await asyncio.wait({reading}, timeout=0.3))[0]  # nothing is told before the slow one is known
        await transaction.commit()
        assert [event.type for event in await reading] == ["job.slow", "job.fast"]
    await slow.close()


@pytest.mark.parametrize("buffer", [1, 7, 1_000])
async def test_every_follower_sees_every_event_once(admission: Admission, database_url: str, buffer: int) -> None:
    tenants = ["default", "followed"]
    async with a_feed(database_url, buffer) as feed:
        begin = await feed.now()
        scopes = [Scope(), Scope("followed"), Scope(job_id="f-7"), Scope("default")]
        counts = [60, 30, 1, 30]
        readers = [asyncio.create_task(_take(feed, scope, begin, n)) for scope, n in zip(scopes, counts, strict=True)]
        for i in range(60):
            await admission.database.execute(
                "INSERT INTO job_events (job_id, tenant_id, type) VALUES ($1, $2, 'job.n')", f"f-{i}", tenants[i % 2]
            )
        late = asyncio.create_task(_take(feed, Scope(), begin, 60))
        found = [[event.job_id for event in await reader] for reader in (*readers, late)]
    expected = [f"f-{i}" for i in range(60)]
    assert found == [expected, expected[1::2], ["f-7"], expected[::2], expected]


async def test_a_follower_goes_on_where_it_was(admission: Admission, database_url: str) -> None:
    async with a_feed(database_url) as feed:
        begin = await feed.now()
        for i in range(10):
            await _tell(admission.database, f"resume-{i}", "job.n")
        first = await _take(feed, Scope(), begin, 4)
        for i in range(10, 12):
            await _tell(admission.database, f"resume-{i}", "job.n")
        rest = await _take(feed, Scope(), first[-1].position, 8)
    assert [event.job_id for event in first + rest] == [f"resume-{i}" for i in range(12)]


async def test_silence_is_broken_by_keep_alives(database_url: str) -> None:
    async with a_feed(database_url) as feed:
        async with asyncio.timeout(10), aclosing(feed.follow(Scope(job_id="none"), BEGINNING, 0.05)) as events:
            assert [await anext(events) for _ in range(3)] == [None, None, None]
        assert feed._task is None  # nobody listens, nobody reads


async def test_a_feed_rides_out_a_lost_database(admission: Admission, database_url: str) -> None:
    async with a_feed(database_url) as feed:
        begin = await feed.now()
        reading = asyncio.create_task(_take(feed, Scope(job_id="after"), begin, 1))
        await asyncio.wait({reading}, timeout=0.1)
        await admission.database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'wattshift'"
            " AND datname = current_database()"
        )
        await _tell(admission.database, "after", "job.n")
        assert [event.job_id for event in await reading] == ["after"]


async def test_the_reader_ends_with_its_last_client_even_if_a_cancellation_is_lost(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_feed(database_url) as feed:
        begin = await feed.now()
        tail: list[asyncio.Task[Any]] = []
        is_read, read = asyncio.Event(), feed._read

        async def swallowing(scope: Scope, after: Position) -> Any:
            """Return what was read although the reader was cancelled meanwhile."""
            task = asyncio.current_task()
            if not tail and task is not None and task.get_name() == "event-tail":
                tail.append(task)
                is_read.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
            return await read(scope, after)

        monkeypatch.setattr(feed, "_read", swallowing)
        following = feed.follow(Scope(), begin, keep_alive_s=0.001)
        async with asyncio.timeout(20):
            assert await anext(following) is None
            await is_read.wait()
            await following.aclose()
            await asyncio.wait(tail)
    assert len(tail) == 1
