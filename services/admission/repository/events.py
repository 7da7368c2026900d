"""The table of events, read in order.

Events are read by ``(transaction_id, sequence)`` and only below the oldest transaction still open: a reader that has
read up to a position never misses an event before it (see the docstring of ``job_events``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.jobs import JobEvent
from services.db.job_rows import TRACEPARENTS
from services.kit import traces

PAGE = 500
LAST = 2**63 - 1

_READ = """
WITH horizon AS (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xid)
SELECT horizon.xid AS horizon, event.*
FROM horizon LEFT JOIN LATERAL (
    SELECT transaction_id, sequence, job_id, tenant_id, at, type, data,
           (SELECT project FROM jobs WHERE id = job_id) AS project
    FROM job_events
    WHERE (transaction_id, sequence) > (:xid, :sequence) AND transaction_id < horizon.xid {condition}
    ORDER BY transaction_id, sequence LIMIT :page
) AS event ON true
"""
_CONDITIONS = {
    "job_id": "AND job_id = :job_id",
    "tenant_id": "AND tenant_id = :tenant_id",
    "project": "AND (SELECT project FROM jobs WHERE id = job_id) = :project",
}
"""What each field of a scope asks of an event, if it is given."""


class Position(NamedTuple):
    """A position in the order of events."""

    transaction_id: int
    sequence: int

    @classmethod
    def parse(cls, event_id: str) -> Position | None:
        """Return the position that an event's id stands for; None if it is not the id of an event."""
        xid, dash, sequence = event_id.partition("-")
        parts = (xid, sequence)
        if not dash or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
            return None
        return cls(int(xid), int(sequence))


BEGINNING = Position(0, 0)


class Scope(NamedTuple):
    """Whose events: those of one job, of one tenant or one of its projects, or all."""

    tenant_id: str | None = None
    project: str | None = None
    job_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event and its position."""

    position: Position
    job_id: str
    tenant_id: str
    project: str | None
    at: datetime
    type: str
    data: dict[str, Any]

    def matches(self, scope: Scope) -> bool:
        if scope.job_id is not None:
            return self.job_id == scope.job_id
        return scope.tenant_id in (None, self.tenant_id) and scope.project in (None, self.project)

    def message(self) -> JobEvent:
        """Return the event as clients see it."""
        event_id = f"{self.position.transaction_id}-{self.position.sequence}"
        return JobEvent(id=event_id, job_id=self.job_id, at=self.at, type=self.type, data=self.data)


class EventPage(NamedTuple):
    """Some events in order."""

    events: list[StoredEvent]
    is_last: bool  #: Whether there are no more for now
    head: Position  #: The position after everything that can be read now


async def read_events(connection: AsyncConnection, scope: Scope, after: Position) -> EventPage:
    """Return the page of events in ``scope`` that follows ``after``."""
    values: dict[str, Any] = {"xid": after.transaction_id, "sequence": after.sequence, "page": PAGE}
    asked = {name: value for name, value in scope._asdict().items() if value is not None}
    query = text(_READ.format(condition=" ".join(_CONDITIONS[name] for name in asked)))
    rows = (await connection.execute(query, values | asked)).all()
    events = [
        StoredEvent(Position(r.transaction_id, r.sequence), r.job_id, r.tenant_id, r.project, r.at, r.type, r.data)
        for r in rows
        if r.job_id is not None
    ]
    if events and traces.is_on():
        await _name_traces(connection, events)
    return EventPage(events, len(events) < PAGE, Position(rows[0].horizon - 1, LAST))


async def _name_traces(connection: AsyncConnection, events: Iterable[StoredEvent]) -> None:
    """Add to job events the trace of the job's submission, where it is known."""
    ids = list({event.job_id for event in events})
    rows = (await connection.exec_driver_sql(TRACEPARENTS, (ids,))).all()
    known = {row.job_id: traces.id_of(row.traceparent) for row in rows}
    for event in events:
        if (trace_id := known.get(event.job_id)) is not None:
            event.data["trace_id"] = trace_id


# A transaction's writes are counted a moment after its end: within a second where its session has more to do.
_WRITES = text("""
SELECT c.relname AS name,
       sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)
           + pg_stat_get_tuples_deleted(c.oid))::bigint AS writes
FROM pg_class c WHERE c.relkind = 'r' AND c.relname = ANY(:tables) GROUP BY c.relname
""")


async def read_writes(connection: AsyncConnection, tables: Sequence[str]) -> dict[str, int]:
    """Return how many rows have ever been written or deleted, by table."""
    rows = await connection.execute(_WRITES, {"tables": list(tables)})
    return {str(name): int(writes) for name, writes in rows}
