"""Leases of nodes, and the clock that they are on: the database's."""

from __future__ import annotations

from services.db.database import Connection

# No heartbeat is later than now, unless the clock was set back after it.
_SHORTEN = """
UPDATE nodes SET lease_until = clock_timestamp() + (lease_until - heartbeat_at), heartbeat_at = clock_timestamp()
 WHERE heartbeat_at > clock_timestamp()
"""

_CLOCK = """
SELECT extract(epoch FROM clock_timestamp())::float8 AS time_s,
       coalesce((SELECT extract(epoch FROM max(lease_until - heartbeat_at)) FROM nodes WHERE state = 'up'), 0)::float8
           AS longest_s
"""


async def end_as_they_would_have(connection: Connection) -> None:
    """Count leases from now that count from a later moment, as the clock was set back since."""
    await connection.execute(_SHORTEN)


async def clock(connection: Connection) -> tuple[float, float]:
    """Return the time, in seconds since 1970, and for how long the longest lease was given, in seconds."""
    (row,) = await connection.fetch(_CLOCK)
    return float(row["time_s"]), float(row["longest_s"])
