"""What processes that use asyncpg directly need, free of SQLAlchemy, which takes a third of a second to import."""

from typing import Any

import asyncpg
import orjson

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


def dumps(value: Any) -> str:
    """Return ``value`` as JSON text, in the format of every JSON column of the project."""
    return orjson.dumps(value).decode()
