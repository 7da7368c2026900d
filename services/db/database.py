"""Connections by asyncpg itself, for paths where SQLAlchemy's share of the time was measured to be too large.

``jsonb`` columns are written from and read as Python values; a query that wants the text casts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import asyncpg
import orjson
from asyncpg import Connection, Record

__all__ = ["Connection", "Database", "Record", "connect", "ping", "plain_url", "prepare"]

Isolation = Literal["read_committed", "repeatable_read"]
P = ParamSpec("P")
T = TypeVar("T")

COMMAND_TIMEOUT_S = 30.0
IDLE_S = 10.0
"""A connection that nobody has used for so long is closed: each is a process of the server's, of some MB."""
KEEPALIVE = {
    **{"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "3"},
    "tcp_user_timeout": "25000",
}
"""A host that is lost closes no connection: after 25 s PostgreSQL ends its sessions, with all the locks they hold."""


def plain_url(database_url: str) -> str:
    """Return the URL as asyncpg reads it, without SQLAlchemy's driver; ``ValueError`` if it is not PostgreSQL's."""
    scheme, separator, rest = database_url.partition("://")
    if not separator or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise ValueError("DATABASE_URL must be a postgresql:// URL; no other database is supported")
    return f"postgresql://{rest}"


def session_settings(application_name: str) -> dict[str, str]:
    """Return what every session of the project sets on the server."""
    return {"application_name": application_name, "timezone": "UTC", **KEEPALIVE}


async def prepare(connection: Connection) -> None:
    """Set the project's JSON format on a new connection."""
    await connection.set_type_codec("jsonb", encoder=dumps, decoder=orjson.loads, schema="pg_catalog")


async def connect(database_url: str, *, application_name: str, **server_settings: str) -> Connection:
    """Return a separate connection, which the caller closes."""
    connection = await asyncpg.connect(
        plain_url(database_url),
        timeout=5,
        command_timeout=COMMAND_TIMEOUT_S,
        server_settings=session_settings(application_name) | {"jit": "off"} | server_settings,
    )
    try:
        await prepare(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def ping(connection: Connection) -> None:
    """Return once the server has answered a query; otherwise raise."""
    await connection.fetchval("SELECT 1")


class _Shared(Connection):
    """A shared connection: no user leaves any session state behind, so that it never has to be reset."""

    def get_reset_query(self) -> str:
        """Return an empty query, because locks and settings end with their transactions."""
        return ""


class Database:
    """Connections that are opened when first needed, so that a process may start before its database."""

    def __init__(self, connections: asyncpg.Pool) -> None:
        self._connections = connections

    @classmethod
    async def open(cls, database_url: str, *, size: int = 8, application_name: str = "wattshift") -> Database:
        """Return the database, with at most ``size`` connections."""
        connections = await asyncpg.create_pool(
            plain_url(database_url),
            min_size=0,
            max_size=size,
            max_inactive_connection_lifetime=IDLE_S,
            connection_class=_Shared,
            init=prepare,
            timeout=5,
            command_timeout=COMMAND_TIMEOUT_S,
            server_settings=session_settings(application_name) | {"jit": "off"},
        )
        return cls(connections)

    @asynccontextmanager
    async def connection(self, timeout_s: float = 5.0) -> AsyncGenerator[Connection]:
        """Yield a connection whose statements commit one by one; ``TimeoutError`` if there was none in time."""
        async with self._connections.acquire(timeout=timeout_s) as connection:
            yield connection

    @asynccontextmanager
    async def transaction(
        self, isolation: Isolation = "read_committed", *, readonly: bool = False
    ) -> AsyncGenerator[Connection]:
        """Yield a connection in a transaction that commits at the end of the block, or not at all."""
        async with self.connection() as connection, connection.transaction(isolation=isolation, readonly=readonly):
            yield connection

    async def run(
        self, query: Callable[Concatenate[Connection, P], Awaitable[T]], *values: P.args, **named: P.kwargs
    ) -> T:
        """Return what one query of a repository returns; its statements commit one by one."""
        async with self.connection() as connection:
            return await query(connection, *values, **named)

    async def in_transaction(
        self, query: Callable[Concatenate[Connection, P], Awaitable[T]], *values: P.args, **named: P.kwargs
    ) -> T:
        """Return what one query of a repository returns, which commits as a whole."""
        async with self.transaction() as connection:
            return await query(connection, *values, **named)

    async def execute(self, statement: str, *values: object) -> None:
        async with self.connection() as connection:
            await connection.execute(statement, *values)

    def connections_now(self) -> tuple[int, int, int]:
        """Return how many connections are in use, how many are idle, and the maximum."""
        idle = self._connections.get_idle_size()
        return self._connections.get_size() - idle, idle, self._connections.get_max_size()

    async def ping(self) -> None:
        """Return once the database has answered a query; otherwise raise."""
        await self.run(ping)

    async def close(self) -> None:
        """Close every connection; one still in use after three seconds is terminated."""
        try:
            async with asyncio.timeout(3):
                await self._connections.close()
        except TimeoutError:
            self._connections.terminate()


# What a lost or restarting server looks like from here; the next attempt finds it again.
CONNECTION_ERRORS = (
    OSError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver's word for a connection that broke in the middle of an exchange
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)
_REFUSED = (
    *(asyncpg.DataError, asyncpg.IntegrityConstraintViolationError),
    *(asyncpg.CardinalityViolationError, asyncpg.ProgramLimitExceededError),
)


def refuses(error: Exception) -> bool:
    """Return whether this, or what SQLAlchemy made it of, is said of values: a database will say so again."""
    return isinstance(getattr(getattr(error, "orig", None), "__cause__", error), _REFUSED)


def dumps(value: Any) -> str:
    """Return ``value`` as JSON text, in the format of every JSON column of the project."""
    return orjson.dumps(value).decode()
