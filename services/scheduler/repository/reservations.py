"""Reservations and maintenance."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_row, fetch_rows
from services.scheduler.repository.documents import Json

COLUMNS = """
SELECT id, name, tenant_id, made_at, start_at, end_at, cancelled_at, gpu_model, gpus, slots, stays, body_sha256,
       now() AS now_at
  FROM reservations
"""

LIVE = f"{COLUMNS} WHERE cancelled_at IS NULL AND end_at > now() ORDER BY start_at, id"

INSERT = """
INSERT INTO reservations (id, key_id, idempotency_key, body_sha256, name, tenant_id, start_at, end_at, gpu_model, gpus,
                          slots, stays)
VALUES ($1, $2, $3, $4, $5, $6, $7, $7::timestamptz + make_interval(secs => $8), $9, $10, $11, $12)
ON CONFLICT (key_id, idempotency_key) DO NOTHING RETURNING id
"""

CANCEL = """
UPDATE reservations SET cancelled_at = now() WHERE id = $1 AND cancelled_at IS NULL AND end_at > now() RETURNING id
"""

ENDINGS = """
SELECT j.id, (j.spec ->> 'time_limit_s')::float8 AS limit_s, coalesce((j.spec ->> 'grace_s')::float8, 120) AS grace_s,
       extract(epoch FROM a.running_at)::float8 AS running_s
  FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
   AND (j.spec ->> 'time_limit_s' IS NOT NULL OR (j.spec ->> 'grace_s')::float8 <> 120)
"""


class ReservationRow(NamedTuple):
    """A reservation, and the database's time."""

    id: str
    name: str
    tenant_id: str | None
    made_at: datetime
    start_at: datetime
    end_at: datetime
    cancelled_at: datetime | None
    gpu_model: str | None
    gpus: dict[str, int]
    slots: list[Json]
    stays: list[str]
    body_sha256: bytes
    now_at: datetime


class NewReservation(NamedTuple):
    """A reservation to be stored."""

    id: str
    key_id: str
    idempotency_key: str | None
    body_sha256: bytes
    name: str
    tenant_id: str | None
    start_at: datetime
    duration_s: float
    gpu_model: str | None
    gpus: dict[str, int]
    slots: Sequence[Json]
    stays: Sequence[str]


class EndingRow(NamedTuple):
    """How the gangs of a live job end, where that is not as usual: without limit, and with the usual grace period."""

    id: str
    limit_s: float | None
    grace_s: float
    running_s: float | None  #: Since when it runs, UTC seconds


async def live(connection: Connection) -> list[ReservationRow]:
    """Return the reservations that are ahead or in force."""
    return await fetch_rows(connection, ReservationRow, LIVE)


async def insert(connection: Connection, made: NewReservation) -> bool:
    """Store a reservation; return False if its key is in use."""
    return await connection.fetchval(INSERT, *made) is not None


async def keyed(connection: Connection, key_id: str, key: str) -> ReservationRow | None:
    """Return the reservation that was stored with an idempotency key."""
    query = f"{COLUMNS} WHERE key_id = $1 AND idempotency_key = $2"
    return await fetch_row(connection, ReservationRow, query, key_id, key)


async def find(connection: Connection, reservation_id: str) -> ReservationRow | None:
    """Return a reservation."""
    return await fetch_row(connection, ReservationRow, f"{COLUMNS} WHERE id = $1", reservation_id)


async def page(connection: Connection, before: str | None, limit: int, tenant_id: str | None) -> list[ReservationRow]:
    """Return those made before one, the newest first; for a tenant, its own and maintenance."""
    query = f"""
    {COLUMNS} WHERE ($1::text IS NULL OR id < $1) AND ($3::text IS NULL OR tenant_id IS NULL OR tenant_id = $3)
     ORDER BY id DESC LIMIT $2
    """
    return await fetch_rows(connection, ReservationRow, query, before, limit, tenant_id)


async def cancel(connection: Connection, reservation_id: str) -> bool:
    """Cancel a reservation that has not ended; return whether there was one."""
    return await connection.fetchval(CANCEL, reservation_id) is not None
