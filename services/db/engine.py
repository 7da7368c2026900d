"""The SQLAlchemy engine of one process."""

import asyncio
import logging
import time
from typing import Any

import asyncpg
import orjson
from asyncpg import Connection
from sqlalchemy import text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool, ConnectionPoolEntry

from services.db.database import CONNECTION_ERRORS, IDLE_S, dumps, plain_url, session_settings


def create_engine(database_url: str, *, pool_size: int = 5, application_name: str = "wattshift") -> AsyncEngine:
    """Return an engine that notices dead connections and waits within limits; ``ValueError``: not PostgreSQL's URL."""
    url = plain_url(database_url)

    async def connect(*_: Any, **given: Any) -> Connection:
        # By asyncpg itself, which reads several hosts, sslmode and the like of libpq; SQLAlchemy reads its own only.
        kept = {name: given[name] for name in ("timeout", "command_timeout", "server_settings")}
        return await asyncpg.connect(url, **kept)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        poolclass=_Pool,
        pool_use_lifo=True,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_pre_ping=True,
        pool_timeout=5,
        json_serializer=dumps,
        json_deserializer=orjson.loads,
        connect_args={
            "async_creator_fn": connect,
            "timeout": 5,
            "command_timeout": 30,
            "server_settings": session_settings(application_name),
        },
    )
    # SQLAlchemy asks the server in a transaction of its own, which doubles the round trips of most of ours. asyncio has
    # already told what the server closed, and the pool closes what was idle for long.
    engine.dialect.do_ping = _is_open
    return engine


def _is_open(dbapi_connection: DBAPIConnection) -> bool:
    return not dbapi_connection.driver_connection.is_closed()


class _Pool(AsyncAdaptedQueuePool):
    """Closes connections unused for ``IDLE_S``, as asyncpg's own does; they are opened again when needed."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._idle_since_s: dict[ConnectionPoolEntry, float] = {}
        self._looks = False

    def _do_get(self) -> ConnectionPoolEntry:
        record = super()._do_get()
        self._idle_since_s.pop(record, None)
        return record

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        super()._do_return_conn(record)
        if record.dbapi_connection is not None:  # it is kept
            self._idle_since_s[record] = time.monotonic()
            self._look_in(IDLE_S)

    def _look_in(self, pause_s: float) -> None:
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(pause_s, self._close_idle)

    def _close_idle(self) -> None:
        self._looks, now_s = False, time.monotonic()
        for record in [each for each, since_s in self._idle_since_s.items() if now_s >= since_s + IDLE_S]:
            del self._idle_since_s[record]
            record.invalidate()
        if self._idle_since_s:
            self._look_in(min(self._idle_since_s.values()) + IDLE_S - now_s)


logging.getLogger(f"{__name__}.{_Pool.__name__}").setLevel(logging.WARNING)  # as SQLAlchemy's own pools are logged


async def ping(engine: AsyncEngine) -> None:
    """Return once the database has answered a query; otherwise raise."""
    async with engine.connect() as connection:
        await connection.execute(text("SELECT 1"))


def is_connection_error(error: BaseException) -> bool:
    """Return whether ``error`` says that the database could not be reached."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (*CONNECTION_ERRORS, PoolTimeoutError)) or getattr(seen, "connection_invalidated", False):
            return True
        seen = getattr(seen, "orig", None) or seen.__cause__
    return False
