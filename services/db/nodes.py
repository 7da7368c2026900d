"""Rows of nodes as the scheduler locks and changes them, and the leases in them, on the database's clock.

The rows are telemetry's. A heartbeat renews a lease under the same row lock under which the scheduler gives a node up,
so that it either comes first, or finds that the node has been given up.
"""

from collections.abc import Sequence

from services.db.database import Connection

_SHARE = "SELECT FROM nodes WHERE id = ANY($1::text[]) ORDER BY id FOR SHARE"

_LOCK = "SELECT id FROM nodes WHERE $1::text[] IS NULL OR id = ANY($1) ORDER BY id FOR UPDATE"

_LOCK_EXPIRED = """
SELECT id FROM nodes n WHERE state = 'up' AND lease_until < now() - make_interval(secs => $1) AND engine = 'wattshift'
   AND NOT EXISTS (SELECT FROM node_power p WHERE p.node_id = n.id AND p.state IN ('going_down', 'off', 'waking'))
   FOR UPDATE SKIP LOCKED
"""

_LOSE = "UPDATE nodes SET state = 'lost' WHERE id = ANY($1::text[])"

_LOSE_OF_ENGINES = """
UPDATE nodes SET state = 'lost' WHERE state = 'up' AND engine <> 'wattshift'
   AND lease_until < now() - make_interval(secs => $1)
"""

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


async def share(connection: Connection, node_ids: Sequence[str]) -> None:
    """Keep nodes from being drained or given up until this transaction ends."""
    await connection.execute(_SHARE, node_ids)


async def lock(connection: Connection, node_ids: Sequence[str] | None = None) -> list[str]:
    """Keep others, heartbeats included, from nodes until this transaction ends; None: from all. Return those there are.

    They are locked in the order in which heartbeats lock them.
    """
    return [record[0] for record in await connection.fetch(_LOCK, node_ids)]


async def lock_expired(connection: Connection, margin_s: float) -> list[str]:
    """Lock and return the nodes whose leases are over by a margin.

    Nodes that ought to be silent are not among them: nothing runs there, and changes of their power have time limits
    of their own.
    """
    return [record[0] for record in await connection.fetch(_LOCK_EXPIRED, margin_s)]


async def lose(connection: Connection, node_ids: Sequence[str]) -> None:
    """Note that nodes are given up; their rows are locked."""
    await connection.execute(_LOSE, node_ids)


async def lose_of_engines(connection: Connection, margin_s: float) -> None:
    """Note which nodes of engines are not reported any more; what runs there is their engine's business."""
    await connection.execute(_LOSE_OF_ENGINES, margin_s)


async def shorten_leases(connection: Connection) -> None:
    """Count leases from now that count from a later moment, as the clock was set back since."""
    await connection.execute(_SHORTEN)


async def clock(connection: Connection) -> tuple[float, float]:
    """Return the time, in seconds since 1970, and for how long the longest lease was given, in seconds."""
    (row,) = await connection.fetch(_CLOCK)
    return float(row["time_s"]), float(row["longest_s"])


NODE_POWER = """
SELECT n.id AS node_id, coalesce(p.state, 'on') AS state, p.since, coalesce(p.pinned, false) AS pinned_awake,
       nullif(p.reason, '') AS reason, nullif(p.detail, '') AS detail, coalesce(p.attempts, 0) AS attempts,
       coalesce(t.wakes, 0) AS wakes, coalesce(t.off_s, 0) AS off_s, coalesce(t.waking_s, 0) AS waking_s,
       coalesce(t.energy_j, 0) AS estimated_energy_j
  FROM nodes n
  LEFT JOIN node_power p ON p.node_id = n.id
  LEFT JOIN (
    SELECT d.node_id, count(*) FILTER (WHERE d.state = 'waking') AS wakes,
           sum(d.length_s) FILTER (WHERE d.state = 'off') AS off_s,
           sum(d.length_s) FILTER (WHERE d.state = 'waking') AS waking_s, sum(d.length_s * d.power_w) AS energy_j
      FROM (SELECT node_id, state, power_w, extract(epoch FROM end_at - start_at)::float8 AS length_s
              FROM node_power_periods) d GROUP BY d.node_id
  ) t ON t.node_id = n.id
 WHERE $1::text IS NULL OR n.id = $1
"""
"""One row per node: the fields of ``contracts.nodes.NodePower``, with ``node_id`` before them."""
