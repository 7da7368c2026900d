"""What happened, in order, to everybody who asks: one reader of the table per process, however many follow.

Events are read by ``(transaction_id, sequence)`` and only below the oldest transaction still open: whoever has seen a
position never misses an event before it (see the docstring of ``job_events``).
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.jobs import JobEvent
from services.db.engine import is_connection_error
from services.kit.logging import Log

log = Log(__name__)

PAGE = 500
LAST = 2**63 - 1

_READ = """
WITH horizon AS (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xid)
SELECT horizon.xid AS horizon, event.*
FROM horizon LEFT JOIN LATERAL (
    SELECT transaction_id, sequence, job_id, tenant_id, at, type, data FROM job_events
    WHERE (transaction_id, sequence) > (:xid, :sequence) AND transaction_id < horizon.xid {condition}
    ORDER BY transaction_id, sequence LIMIT :page
) AS event ON true
"""
_READ_ALL = text(_READ.format(condition=""))
_READ_TENANT = text(_READ.format(condition="AND tenant_id = :tenant_id"))
_READ_JOB = text(_READ.format(condition="AND job_id = :job_id"))


class Position(NamedTuple):
    """A place in the order of events."""

    transaction_id: int
    sequence: int

    @classmethod
    def parse(cls, event_id: str) -> Position | None:
        """Return the position an event's id names; None if it names none."""
        xid, dash, sequence = event_id.partition("-")
        parts = (xid, sequence)
        if not dash or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
            return None
        return cls(int(xid), int(sequence))


BEGINNING = Position(0, 0)


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose events: one job's, one tenant's, or everybody's."""

    tenant_id: str | None = None
    job_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event and its place."""

    position: Position
    job_id: str
    tenant_id: str
    at: datetime
    type: str
    data: dict[str, Any]

    def matches(self, scope: Scope) -> bool:
        """Return whether the event is in ``scope``."""
        if scope.job_id is not None:
            return self.job_id == scope.job_id
        return scope.tenant_id in (None, self.tenant_id)

    def message(self) -> JobEvent:
        """Return the event as clients see it."""
        event_id = f"{self.position.transaction_id}-{self.position.sequence}"
        return JobEvent(id=event_id, job_id=self.job_id, at=self.at, type=self.type, data=self.data)


class EventFeed:
    """Follows the table while anybody listens, and keeps the last events in memory."""

    def __init__(self, engine: AsyncEngine, *, poll_s: float, buffer: int) -> None:
        self._engine = engine
        self._poll_s = poll_s
        self._buffer = buffer
        self._events: list[StoredEvent] = []
        self._begins_after = BEGINNING
        self._head = BEGINNING
        self._moved = asyncio.Event()
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    async def now(self) -> Position:
        """Return the place after everything that can be read now."""
        _, _, head = await self._read(Scope(), Position(LAST, LAST))
        return head

    async def read(self, scope: Scope, after: Position) -> tuple[list[StoredEvent], Position]:
        """Return the next events in ``scope`` and the place after them; an empty page means there are no more yet."""
        if self._task and after >= self._begins_after:
            start = bisect.bisect_right(self._events, after, key=lambda event: event.position)
            page = self._events[start : start + PAGE]
            end = page[-1].position if len(page) == PAGE else max(self._head, after)
            return [event for event in page if event.matches(scope)], end
        events, complete, head = await self._read(scope, after)
        return events, max(head, after) if complete else events[-1].position

    async def follow(self, scope: Scope, after: Position, keep_alive_s: float) -> AsyncIterator[StoredEvent | None]:
        """Yield events in ``scope`` from ``after`` on, for ever; None when nothing happened for ``keep_alive_s``."""
        self._listen()
        loop = asyncio.get_running_loop()
        silent_since_s = loop.time()
        try:
            while True:
                moved = self._moved
                before = after
                events, after = await self._read_patiently(scope, after)
                for event in events:
                    yield event
                if events:
                    silent_since_s = loop.time()
                if after > before:
                    continue
                left_s = silent_since_s + keep_alive_s - loop.time()
                try:
                    await asyncio.wait_for(moved.wait(), max(left_s, 0.001))
                except TimeoutError:
                    silent_since_s = loop.time()
                    yield None
        finally:
            self._leave()

    async def _read_patiently(self, scope: Scope, after: Position) -> tuple[list[StoredEvent], Position]:
        try:
            return await self.read(scope, after)
        except Exception as error:
            if not is_connection_error(error):
                raise
            return [], after  # the database is away: the stream waits for it

    def _listen(self) -> None:
        self._listeners += 1
        if self._task is None:
            self._events, self._begins_after = [], Position(LAST, LAST)  # until the tail knows where it begins
            self._task = asyncio.create_task(self._tail(), name="event-tail")

    def _leave(self) -> None:
        self._listeners -= 1
        if not self._listeners and self._task:
            self._task.cancel()
            self._task = None

    async def _tail(self) -> None:
        started = False
        while True:
            try:
                if not started:
                    self._begins_after = self._head = await self.now()
                    started = True
                    self._wake()  # whoever read up to a place before this one reads on from the table
                events, complete, head = await self._read(Scope(), self._head)
            except Exception as error:
                if not is_connection_error(error):
                    log.exception("events.tail_failed")
                await asyncio.sleep(1)
                continue
            self._keep(events, head if complete else events[-1].position)
            if complete:
                await asyncio.sleep(self._poll_s)

    def _keep(self, events: list[StoredEvent], head: Position) -> None:
        self._events += events
        if (surplus := len(self._events) - self._buffer) > 0:
            self._begins_after = self._events[surplus - 1].position
            del self._events[:surplus]
        self._head = max(head, self._head)
        if events:
            self._wake()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _read(self, scope: Scope, after: Position) -> tuple[list[StoredEvent], bool, Position]:
        """Return a page, whether it is the last one for now, and the place after all that can be read now."""
        values: dict[str, Any] = {"xid": after.transaction_id, "sequence": after.sequence, "page": PAGE}
        if scope.job_id is not None:
            query, values["job_id"] = _READ_JOB, scope.job_id
        elif scope.tenant_id is not None:
            query, values["tenant_id"] = _READ_TENANT, scope.tenant_id
        else:
            query = _READ_ALL
        async with self._engine.connect() as connection:
            rows = (await connection.execute(query, values)).all()
        events = [
            StoredEvent(Position(r.transaction_id, r.sequence), r.job_id, r.tenant_id, r.at, r.type, r.data)
            for r in rows
            if r.job_id is not None
        ]
        return events, len(events) < PAGE, Position(rows[0].horizon - 1, LAST)
