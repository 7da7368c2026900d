"""Connections that nobody uses are closed, and opened again for who needs one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.db import database as module
from services.db import engine as of_engine
from services.db.database import Database, connect
from services.db.engine import create_engine

COUNT = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (module, of_engine):
        monkeypatch.setattr(each, "IDLE_S", 0.3)


async def ask(engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        await connection.execute(text("SELECT pg_sleep(0.05)"))


async def count(url: str, name: str, wanted: int) -> None:
    looking = await connect(url, application_name="looks")
    try:
        async with asyncio.timeout(30):
            while await looking.fetchval(COUNT, name) != wanted:  # noqa: ASYNC110, another process ends
                await asyncio.sleep(0.05)
    finally:
        await looking.close()


async def test_sqlalchemy_keeps_none_that_is_idle(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="")
    engine = create_engine(database_url, pool_size=3, application_name="idle-engine")
    try:
        for _ in range(2):
            await asyncio.gather(*(ask(engine) for _ in range(5)))
            await count(database_url, "idle-engine", 3)
            await count(database_url, "idle-engine", 0)
        assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        assert caplog.messages == []
    finally:
        await engine.dispose()


async def test_what_is_used_again_and_again_stays(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=3, application_name="used-engine")
    try:
        await asyncio.gather(*(ask(engine) for _ in range(3)))
        async with engine.connect() as connection:
            first = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        for _ in range(10):
            async with engine.connect() as connection:
                assert (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one() == first
            await asyncio.sleep(0.1)
        await count(database_url, "used-engine", 1)
    finally:
        await engine.dispose()


async def test_asyncpg_keeps_none_that_is_idle(database_url: str) -> None:
    database = await Database.open(database_url, size=3, application_name="idle-database")
    try:
        await asyncio.gather(*(database.ping() for _ in range(3)))
        await count(database_url, "idle-database", 0)
        await database.ping()
    finally:
        await database.close()


async def test_what_the_server_has_closed_is_opened_again_before_it_is_used(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=1, application_name="closed-engine")
    looking = await connect(database_url, application_name="looks")
    try:
        await ask(engine)
        ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'closed-engine'"
        assert await looking.fetchval(ended) == 1
        await count(database_url, "closed-engine", 0)
        await ask(engine)
    finally:
        await looking.close()
        await engine.dispose()


async def test_a_connection_that_is_open_is_used_without_asking_the_server(database_url: str) -> None:
    engine = create_engine(database_url, pool_size=1, application_name="asked-engine")
    seen: list[str] = []
    try:
        async with engine.connect() as connection:
            held = await connection.get_raw_connection()
            assert held.driver_connection is not None
            held.driver_connection.add_query_logger(lambda record: seen.append(record.query))
        seen.clear()
        await ask(engine)
        assert seen == ["BEGIN;", "ROLLBACK;"], "the query itself is prepared"
    finally:
        await engine.dispose()


async def test_who_gives_a_connection_back_does_not_ask_the_server_to_reset_it(database_url: str) -> None:
    database = await Database.open(database_url, size=1, application_name="reset-database")
    seen: list[str] = []
    try:
        async with database.connection() as connection:
            connection.add_query_logger(lambda record: seen.append(record.query))  # type: ignore[attr-defined]
        async with database.transaction() as connection:
            await connection.execute("SELECT 1")
        async with database.connection() as connection:
            await connection.execute("BEGIN")
        async with database.connection() as connection:
            assert not connection.is_in_transaction()  # type: ignore[attr-defined]
        words = [query.split()[0].rstrip(";") for query in seen]
        assert words == ["BEGIN", "SELECT", "COMMIT", "BEGIN", "ROLLBACK"]
    finally:
        await database.close()


class Record:
    """What a pool knows of a connection."""

    is_closed = False

    def invalidate(self) -> None:
        self.is_closed = True


def test_a_connection_whose_time_has_come_is_closed_however_the_clock_is_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    since_s, idle_s, record = 6.01, 10.0, Record()
    now_s = since_s + idle_s
    assert now_s - since_s < idle_s, "as floats have it"
    pool: Any = object.__new__(of_engine._Pool)
    pool._idle_since_s, pool._looks = {record: since_s}, True
    monkeypatch.setattr(of_engine, "IDLE_S", idle_s)
    monkeypatch.setattr(of_engine.time, "monotonic", lambda: now_s)
    pool._close_idle()
    assert record.is_closed, "else it is looked at again and again in the same moment"
