"""Nodes that are powered down and woken."""

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from services.contracts.nodes import NodePower, PowerState
from services.db import nodes
from services.db.database import Connection
from services.db.nodes import NODE_POWER
from services.db.rows import fetch_messages, fetch_row, fetch_rows

FRESH = "since = now(), attempts = 0, acted_at = NULL, done_at = NULL, next_attempt_at = NULL"

GO_DOWN = f"""
INSERT INTO node_power AS p (node_id, state, reason, detail)
SELECT n.id, 'going_down', $2, $3 FROM known_nodes n
 WHERE n.id = ANY($1::text[]) AND n.state = 'up' AND n.heard AND NOT n.measures_only
   AND NOT EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id)
ON CONFLICT (node_id) DO UPDATE SET state = 'going_down', reason = $2, detail = $3, off_at = NULL, {FRESH}
 WHERE p.state = 'on' AND NOT p.pinned
RETURNING node_id
"""

WAKE = f"""
UPDATE node_power SET state = 'waking', reason = $2, detail = $3, {FRESH}
 WHERE node_id = ANY($1::text[]) AND state = ANY($4::text[]) RETURNING node_id
"""

CHANGING = """
SELECT p.node_id, p.state, p.pinned, p.attempts, p.acted_at, p.off_at, n.heartbeat_at, n.registered_at, now() AS at,
       n.heard AS leased, coalesce(n.heard AND n.heartbeat_at > p.since, false) AS heard,
       extract(epoch FROM now() - p.done_at)::float8 AS done_for_s
  FROM node_power p JOIN known_nodes n ON n.id = p.node_id WHERE p.state <> 'on'
"""

DUE = """
SELECT node_id, state, acted_at IS NOT NULL AS begun FROM node_power
 WHERE state IN ('going_down', 'waking') AND done_at IS NULL AND coalesce(next_attempt_at <= now(), true)
   AND coalesce(state = 'going_down' OR off_at + make_interval(secs => $1) <= now(), true)
 ORDER BY since, node_id
"""

BOOTING = "SELECT count(*) FROM node_power WHERE state = 'waking' AND acted_at IS NOT NULL"

# A node goes down only with nothing left to do: no device held, no command that it has not had.
BEGIN = """
UPDATE node_power p SET attempts = p.attempts + 1, acted_at = coalesce(p.acted_at, now()), next_attempt_at = NULL
  FROM known_nodes n
 WHERE n.id = p.node_id AND p.node_id = $1 AND p.state = $2 AND p.done_at IS NULL
   AND (p.state = 'waking' OR (p.acted_at IS NOT NULL OR NOT p.pinned)
        AND NOT EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id)
        AND NOT EXISTS (SELECT FROM outbox o WHERE o.stream = $3))
RETURNING n.address, p.off_at, p.acted_at
"""

# How long a node was `off` or `waking` and what it drew, watts; telemetry turns this into energy.
PERIOD = """
INSERT INTO node_power_periods (node_id, state, start_at, end_at, power_w)
SELECT $1, $2, $3, $4, $5 WHERE $4::timestamptz > $3::timestamptz
"""

OFF = f"UPDATE node_power SET state = 'off', off_at = greatest(done_at, $2), {FRESH} WHERE node_id = $1"
"""Since its hook succeeded or, if that is later, since its last heartbeat, ``$2``."""
ON = f"UPDATE node_power SET state = 'on', reason = '', detail = '', off_at = NULL, {FRESH} WHERE node_id = $1"
STAY_ON = f"""
UPDATE node_power SET state = 'on', detail = $2, stays_on_until = now() + make_interval(secs => $3), {FRESH}
 WHERE node_id = $1
"""
FAILED = f"UPDATE node_power SET state = 'failed', detail = $2, off_at = NULL, {FRESH} WHERE node_id = $1"
STANDBY_OVER = "UPDATE node_power SET off_at = NULL WHERE node_id = $1"
HOOK_DONE = "UPDATE node_power SET done_at = now() WHERE node_id = $1"
HOOK_AGAIN = "UPDATE node_power SET done_at = NULL WHERE node_id = $1"
HOOK_LATER = "UPDATE node_power SET detail = $2, next_attempt_at = now() + make_interval(secs => $3) WHERE node_id = $1"

POWERED = """
SELECT n.state = 'up' AND n.heard AS heard, coalesce(p.state, 'on') AS state,
       coalesce(p.pinned, false) AS pinned, EXISTS (SELECT FROM device_claims c WHERE c.node_id = n.id) AS busy,
       n.measures_only
  FROM known_nodes n LEFT JOIN node_power p ON p.node_id = n.id WHERE n.id = $1
"""

KNOWN = "INSERT INTO node_power (node_id) VALUES ($1) ON CONFLICT DO NOTHING"

PIN = "UPDATE node_power SET pinned = $2 WHERE node_id = $1 AND pinned <> $2 RETURNING node_id"


class ChangingNode(NamedTuple):
    """A node that is not simply on.

    Attributes:
        attempts, acted_at: How often its hook has been run for the present change, and when first.
        heartbeat_at, registered_at: When it last sent a heartbeat, and when its agent last registered.
    """

    node_id: str
    state: str
    pinned: bool  #: Whether an operator keeps it awake
    attempts: int
    acted_at: datetime | None
    off_at: datetime | None  #: Since when it has drawn nothing but its standby power
    heartbeat_at: datetime | None
    registered_at: datetime
    at: datetime
    leased: bool
    heard: bool  #: Whether it has sent a heartbeat since its state last changed
    done_for_s: float | None  #: Seconds since its hook succeeded; None if it has not


class DueNode(NamedTuple):
    """A node whose hook is to be run; ``begun``: it has been run before."""

    node_id: str
    state: str
    begun: bool


class BegunNode(NamedTuple):
    """A node whose hook is about to run."""

    address: str
    off_at: datetime | None
    acted_at: datetime


class PoweredNode(NamedTuple):
    """A node, with what operators' requests are checked against."""

    heard: bool
    state: str
    pinned: bool
    busy: bool
    measures_only: bool


async def power_down(connection: Connection, node_ids: Collection[str], reason: str, detail: str) -> list[str]:
    """Take nodes out of the plans, to be powered down; return those that were on, idle, leased and not pinned."""
    if not node_ids:
        return []
    return [record[0] for record in await connection.fetch(GO_DOWN, sorted(node_ids), reason, detail)]


async def wake(
    connection: Connection,
    node_ids: Collection[str],
    reason: str,
    detail: str,
    sources: Collection[PowerState] = (PowerState.OFF,),
) -> list[str]:
    """Have nodes woken; return those that were in one of ``sources``."""
    if not node_ids:
        return []
    states = [state.value for state in sources]
    return [record[0] for record in await connection.fetch(WAKE, sorted(node_ids), reason, detail, states)]


async def changing(connection: Connection) -> list[ChangingNode]:
    """Return the nodes that are not simply on."""
    return await fetch_rows(connection, ChangingNode, CHANGING)


async def lock_changing(connection: Connection, node_id: str) -> ChangingNode | None:
    """Lock and return a node, None if it is simply on."""
    await nodes.lock(connection, [node_id])
    return await fetch_row(connection, ChangingNode, f"{CHANGING} AND p.node_id = $1 FOR UPDATE OF p", node_id)


async def due(connection: Connection, min_off_s: float) -> list[DueNode]:
    """Return the nodes whose hooks are to be run, in the order in which their states changed."""
    return await fetch_rows(connection, DueNode, DUE, min_off_s)


async def begin(connection: Connection, node_id: str, state: PowerState, stream: str) -> BegunNode | None:
    """Count an attempt to power a node; None if it is no longer needed. ``stream``: of the node's commands."""
    return await fetch_row(connection, BegunNode, BEGIN, node_id, state.value, stream)


async def powered(connection: Connection, node_id: str) -> PoweredNode | None:
    """Return a node, with what operators' requests are checked against."""
    return await fetch_row(connection, PoweredNode, POWERED, node_id)


async def node_power(connection: Connection, node_id: str) -> list[NodePower]:
    """Return a node's power and its totals so far, if there is such a node."""
    return await fetch_messages(connection, NodePower, NODE_POWER, node_id)
