"""The grid's orders."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from services.core.domain.orders import RECOVERY_S, STOPS_AHEAD_S
from services.db.database import Connection
from services.db.rows import fetch_row, fetch_rows
from services.scheduler.repository.documents import Json

BEFORE_S = 600.0  #: The baseline is the mean of so long

COLUMNS = """
SELECT id, key_id, source, name, zone, announced_at, start_at, end_at, notice_s, steps, baseline_w, baseline_at,
       withdrawn_at, revision, past, body_sha256, idempotency_key, ratio, now() AS now_at
  FROM grid_orders
"""

LIVE = f"{COLUMNS} WHERE withdrawn_at IS NULL AND end_at + make_interval(secs => $1) > now() ORDER BY id"

# When the draw before an order is looked at: when the cluster may begin to prepare for it.
AHEAD = f"make_interval(secs => greatest(notice_s, {STOPS_AHEAD_S}))"

UNPREPARED = f"""
{COLUMNS} WHERE withdrawn_at IS NULL AND end_at > now() AND baseline_w IS NULL AND start_at - {AHEAD} <= now()
 ORDER BY id
"""

INSERT = """
INSERT INTO grid_orders (id, key_id, source, idempotency_key, body_sha256, name, zone, start_at, end_at, notice_s,
                         steps)
VALUES ($1, $2, $3, $4, $5, $6, $7, coalesce($8, now()), coalesce($8, now()) + make_interval(secs => $9), $10, $11)
ON CONFLICT (key_id, idempotency_key) DO NOTHING RETURNING id
"""

# By which the models of each order's scope are corrected, for the scheduler after this one.
KEEP_RATIOS = """
UPDATE grid_orders o SET ratio = w.ratio FROM unnest($1::text[], $2::float8[]) AS w (id, ratio) WHERE o.id = w.id
"""

KEYED = f"{COLUMNS} WHERE key_id = $1 AND idempotency_key = $2"

OF_KEY = f"""
{COLUMNS} WHERE key_id = $1 AND idempotency_key IS NOT NULL AND end_at > now() - interval '31 days' ORDER BY id
"""

# By the ledger: what each node drew from its first to its last line of the time before.
DRAWN = """
SELECT sum(energy_j / span_s) FROM (
    SELECT sum(l.energy_j) AS energy_j, extract(epoch FROM max(l.end_at) - min(l.start_at))::float8 AS span_s
      FROM energy_lines l JOIN known_nodes n ON n.id = l.node_id
     WHERE l.end_at <= $1 AND l.start_at >= $1::timestamptz - make_interval(secs => $3)
       AND NOT n.measures_only AND ($2::text IS NULL OR l.zone = $2)
     GROUP BY l.node_id) AS drawn
 WHERE span_s > 0
"""

READ = """
SELECT sum((r ->> 'power_w')::float8) FROM usable_nodes n CROSS JOIN jsonb_array_elements(n.readings) r
 WHERE n.power NOT IN ('off', 'waking') AND ($1::text IS NULL OR n.zone = $1)
"""

# The first of the orders to the same GPUs that the cluster still answers to, or recovers from: it draws less for them.
ANSWERED = f"""
SELECT baseline_at, CASE WHEN zone IS NOT DISTINCT FROM $2 THEN baseline_w END FROM grid_orders
 WHERE id <> $1 AND baseline_at IS NOT NULL AND ($2::text IS NULL OR zone IS NULL OR zone = $2)
   AND least(withdrawn_at, end_at) + least(make_interval(secs => {RECOVERY_S}), end_at - start_at) > now()
 ORDER BY baseline_at LIMIT 1
"""

SET_BASELINE = """
UPDATE grid_orders SET baseline_w = $2, baseline_at = $3 WHERE id = $1 AND baseline_w IS NULL AND withdrawn_at IS NULL
"""

# One that was to end before now ends now. What was drawn before is looked at again if the cluster is to prepare later.
AMEND = f"""
UPDATE grid_orders
   SET past = past || jsonb_build_array(jsonb_build_object(
           'until', now(), 'start_at', start_at, 'end_at', end_at, 'steps', steps)),
       start_at = $2, end_at = greatest($3, now()), steps = $4, revision = revision + 1,
       baseline_w = CASE WHEN $2::timestamptz - {AHEAD} <= now() THEN baseline_w END,
       baseline_at = CASE WHEN $2::timestamptz - {AHEAD} <= now() THEN baseline_at END
 WHERE id = $1 AND withdrawn_at IS NULL AND end_at > now() RETURNING id
"""

WITHDRAW = """
UPDATE grid_orders SET withdrawn_at = now(), revision = revision + 1
 WHERE id = $1 AND withdrawn_at IS NULL AND end_at > now() RETURNING id
"""


LINES = """
SELECT l.job_id, extract(epoch FROM l.start_at)::float8 AS start_s, extract(epoch FROM l.end_at)::float8 AS end_s,
       l.energy_j, l.node_id
  FROM energy_lines l JOIN known_nodes n ON n.id = l.node_id
 WHERE l.end_at > $1 AND l.start_at < $2 AND NOT n.measures_only AND ($3::text IS NULL OR l.zone = $3)
"""


class LineRow(NamedTuple):
    """A line of the ledger; times are UTC seconds."""

    job_id: str | None
    start_s: float
    end_s: float
    energy_j: float
    node_id: str


class OrderRow(NamedTuple):
    """An order, and the database's time."""

    id: str
    key_id: str
    source: str
    name: str
    zone: str | None
    announced_at: datetime
    start_at: datetime
    end_at: datetime
    notice_s: float
    steps: list[Json]
    baseline_w: float | None
    baseline_at: datetime | None
    withdrawn_at: datetime | None
    revision: int
    past: list[Json]  #: What amendments replaced, oldest first
    body_sha256: bytes
    idempotency_key: str | None
    ratio: float  #: Measured over modelled draw of its scope, by the last round in which both were known
    now_at: datetime


class NewOrder(NamedTuple):
    """An order to be stored; ``start_at`` None is now."""

    id: str
    key_id: str
    source: str
    idempotency_key: str | None
    body_sha256: bytes
    name: str
    zone: str | None
    start_at: datetime | None
    duration_s: float
    notice_s: float
    steps: Sequence[Json]


async def live(connection: Connection) -> list[OrderRow]:
    """Return the orders that are announced or in force, or whose rebound is still to be kept small."""
    return await fetch_rows(connection, OrderRow, LIVE, RECOVERY_S)


async def unprepared(connection: Connection) -> list[OrderRow]:
    """Return the orders for which the cluster may prepare, and whose baseline is not known yet."""
    return await fetch_rows(connection, OrderRow, UNPREPARED)


async def insert(connection: Connection, order: NewOrder) -> bool:
    """Store an order; return False if its key is in use."""
    return await connection.fetchval(INSERT, *order) is not None


async def keyed(connection: Connection, key_id: str, key: str) -> OrderRow | None:
    """Return the order that was stored with an idempotency key."""
    return await fetch_row(connection, OrderRow, KEYED, key_id, key)


async def find(connection: Connection, order_id: str) -> OrderRow | None:
    """Return an order."""
    return await fetch_row(connection, OrderRow, f"{COLUMNS} WHERE id = $1", order_id)


async def of_key(connection: Connection, key_id: str) -> list[OrderRow]:
    """Return the orders of the last month that a key gave with idempotency keys."""
    return await fetch_rows(connection, OrderRow, OF_KEY, key_id)


async def page(connection: Connection, before: str | None, limit: int, key_id: str | None) -> list[OrderRow]:
    """Return the orders that were made before one, the newest first; of one key, if one is given."""
    query = f"""
    {COLUMNS} WHERE ($1::text IS NULL OR id < $1) AND ($3::text IS NULL OR key_id = $3) ORDER BY id DESC LIMIT $2
    """
    return await fetch_rows(connection, OrderRow, query, before, limit, key_id)


async def drawn_w(connection: Connection, until: datetime, zone: str | None, over_s: float) -> float | None:
    """Return the mean draw in the ``over_s`` before a time by the ledger, watts; None if it has no line of it."""
    return await connection.fetchval(DRAWN, until, zone, over_s)


async def baseline(connection: Connection, order: OrderRow) -> tuple[float | None, datetime]:
    """Return the mean draw in the ten minutes before the cluster may prepare for an order, watts, and that time.

    None: nothing was read. By the ledger; a cluster that is younger than its first line has what its GPUs draw now.
    While it answers to earlier orders, or recovers from them, the time is that before the first of them: what is drawn
    for one order is not what would have been drawn without the next.
    """
    earlier = await connection.fetchrow(ANSWERED, order.id, order.zone)
    at, watts = (order.now_at, None) if earlier is None else earlier
    if watts is None:
        watts = await drawn_w(connection, at, order.zone, BEFORE_S)
    return await connection.fetchval(READ, order.zone) if watts is None else watts, at


async def lines(connection: Connection, since: datetime, until: datetime, zone: str | None) -> list[LineRow]:
    """Return the ledger's lines of a time."""
    return await fetch_rows(connection, LineRow, LINES, since, until, zone)


async def amend(
    connection: Connection, order_id: str, start_at: datetime, end_at: datetime, steps: Sequence[Json]
) -> bool:
    """Change an order that has not ended, and keep what it was; return whether there was one."""
    return await connection.fetchval(AMEND, order_id, start_at, end_at, [*steps]) is not None


async def withdraw(connection: Connection, order_id: str) -> bool:
    """Withdraw an order that has not ended; return whether there was one."""
    return await connection.fetchval(WITHDRAW, order_id) is not None
