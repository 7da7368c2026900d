"""The engine of one process."""

from __future__ import annotations

from typing import Any

import asyncpg
import orjson
from asyncpg import Connection
from sqlalchemy import text
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from services.db.database import plain_url
from services.db.driver import CONNECTION_ERRORS, dumps


def async_url(database_url: str) -> str:
    """Return the URL with the driver SQLAlchemy needs for asyncpg.

    Raises:
        ValueError: The URL does not name a PostgreSQL server.
    """
    scheme, separator, rest = database_url.partition("://")
    if not separator or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise ValueError("DATABASE_URL must be a postgresql:// URL; no other database is supported")
    return f"postgresql+asyncpg://{rest}"


def create_engine(database_url: str, *, pool_size: int = 5, application_name: str = "wattshift") -> AsyncEngine:
    """Return an engine that notices dead connections and never waits without limit."""
    address, _, query = async_url(database_url).partition("?")
    options: dict[str, Any] = {}
    if "ssl" in query:  # asyncpg reads sslmode, sslrootcert and the like of libpq; SQLAlchemy passes on only its own

        async def connect(*_: Any, **given: Any) -> Connection:
            kept = {name: given[name] for name in ("timeout", "command_timeout", "server_settings")}
            return await asyncpg.connect(plain_url(database_url), **kept)

        options["async_creator_fn"] = connect
        url = address
    else:
        url = async_url(database_url)
    return create_async_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_pre_ping=True,
        pool_timeout=5,
        json_serializer=dumps,
        json_deserializer=orjson.loads,
        connect_args={
            **options,
            "timeout": 5,
            "command_timeout": 30,
            "server_settings": {"application_name": application_name, "timezone": "UTC"},
        },
    )


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
