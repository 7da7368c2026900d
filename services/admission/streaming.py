"""Events as streams of server-sent events: one reader of the table per process, however many clients follow."""

import asyncio
import bisect
from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.changes import OPERATORS_ONLY, Changes
from services.admission.jobs import Jobs
from services.admission.repository.events import (
    BEGINNING,
    LAST,
    PAGE,
    EventPage,
    Position,
    Scope,
    StoredEvent,
    read_events,
)
from services.contracts.changes import Changed, ChangeKind
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.core.domain.jobs import JobState
from services.db.engine import is_connection_error
from services.kit.logging import Log
from services.kit.problems import invalid
from services.kit.tasks import merged

log = Log(__name__)


class EventFeed:
    """Reads the table while any client follows, and keeps the latest events in memory."""

    def __init__(self, engine: AsyncEngine, *, poll_s: float, buffer: int) -> None:
        self._engine, self._poll_s, self._buffer = engine, poll_s, buffer
        self._events: list[StoredEvent] = []
        self._begins_after = BEGINNING
        self._head = BEGINNING
        self._moved = asyncio.Event()
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    async def now(self) -> Position:
        """Return the position after everything that can be read now."""
        return (await self._read(Scope(), Position(LAST, LAST))).head

    async def read(self, scope: Scope, after: Position) -> tuple[list[StoredEvent], Position]:
        """Return the next events in ``scope`` and the position after them; an empty page means no more for now."""
        if self._task and after >= self._begins_after:
            start = bisect.bisect_right(self._events, after, key=lambda event: event.position)
            page = self._events[start : start + PAGE]
            end = page[-1].position if len(page) == PAGE else max(self._head, after)
            return [event for event in page if event.matches(scope)], end
        found = await self._read(scope, after)
        return found.events, max(found.head, after) if found.is_last else found.events[-1].position

    async def follow(self, scope: Scope, after: Position, keep_alive_s: float) -> AsyncIterator[StoredEvent | None]:
        """Yield events in ``scope`` after ``after``, endlessly; None when there has been none for ``keep_alive_s``."""
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
                    async with asyncio.timeout(max(left_s, 0.001)):
                        await moved.wait()
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
            return [], after  # the database does not answer: the stream waits for it

    def _listen(self) -> None:
        self._listeners += 1
        if self._task is None:
            self._events, self._begins_after = [], Position(LAST, LAST)  # until the tail knows its beginning
            self._task = asyncio.create_task(self._tail(), name="event-tail")

    def _leave(self) -> None:
        self._listeners -= 1
        if not self._listeners and self._task:
            self._task.cancel()
            self._task = None

    async def _tail(self) -> None:
        started = False
        while self._task is asyncio.current_task():  # a cancellation can be lost on its way: see kit.tasks
            try:
                if not started:
                    self._begins_after = self._head = await self.now()
                    started = True
                    self._wake()  # clients at an earlier position continue from the table
                found = await self._read(Scope(), self._head)
            except Exception as error:
                if not is_connection_error(error):
                    log.exception("events.tail_failed")
                await asyncio.sleep(1)
                continue
            self._keep(found.events, found.head if found.is_last else found.events[-1].position)
            if found.is_last:
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

    async def _read(self, scope: Scope, after: Position) -> EventPage:
        async with self._engine.connect() as connection:
            return await read_events(connection, scope, after)


FINAL_EVENTS = frozenset(f"job.{state}" for state in JobState if state.is_final)
KEEP_ALIVE = b": keep-alive\n\n"
HELLO = b": events\n\n"


def read_last_event_id(header: str | None) -> Position | None:
    """Return the position after which a client goes on; ``ProblemError``: 422 if that is no event's id."""
    if not header:
        return None
    if (position := Position.parse(header)) is None:
        raise invalid("#Last-Event-ID", "Last-Event-ID is not the id of an event.", ProblemCode.INVALID_CURSOR)
    return position


def as_sse(event: StoredEvent) -> bytes:
    """Return an event in the server-sent events format."""
    message = event.message()
    return f"id: {message.id}\nevent: {message.type}\ndata: {message.model_dump_json()}\n\n".encode()


class EventStreams:
    """Opens streams of events."""

    def __init__(self, feed: EventFeed, changes: Changes, jobs: Jobs, keep_alive_s: float) -> None:
        self._feed, self._changes, self._jobs, self._keep_alive_s = feed, changes, jobs, keep_alive_s

    async def of_all(
        self, scope: Scope, after: Position | None, *, follow: bool, changes: bool = False
    ) -> AsyncIterator[bytes]:
        """Return the events in ``scope`` after ``after``: endlessly with ``follow``, otherwise those there are so far.

        Without ``after``, they begin now with ``follow``, and otherwise with the first. With ``changes``, those who
        follow also learn what else has changed.
        """
        start = after if after is not None else BEGINNING if not follow else await self._feed.now()
        if not follow:
            return self._replay(scope, start)
        if not changes:
            return self._follow(scope, start)
        hidden = frozenset[ChangeKind]() if scope.tenant_id is None else OPERATORS_ONLY
        return merged(self._follow(scope, start), self._follow_changes(frozenset(ChangeKind) - hidden))

    async def of_job(
        self, identity: Identity, job_id: str, after: Position | None, *, follow: bool
    ) -> AsyncIterator[bytes] | None:
        """Return a job's events from the first, or those after ``after``, until its end.

        None if the job has ended and the client has seen all its events, so that it need not reconnect.
        """
        job = await self._jobs.get(identity, job_id)
        scope, start = Scope(job_id=job_id), after or BEGINNING
        if job.state.is_final and after is not None and not (await self._feed.read(scope, after))[0]:
            return None
        if not follow:
            return self._replay(scope, start)
        return self._follow(scope, start, identity)

    async def _replay(self, scope: Scope, position: Position) -> AsyncIterator[bytes]:
        yield HELLO
        while True:
            before = position
            events, position = await self._feed.read(scope, position)
            for event in events:
                yield as_sse(event)
            if not events or position == before:
                return

    async def _follow(self, scope: Scope, start: Position, identity: Identity | None = None) -> AsyncIterator[bytes]:
        """Yield events in ``scope``: endlessly, or, if it is a job that ``identity`` sees, until that has ended."""
        yield HELLO
        async for event in self._feed.follow(scope, start, self._keep_alive_s):
            yield KEEP_ALIVE if event is None else as_sse(event)
            if scope.job_id is None or identity is None:
                continue
            if event is None and (await self._jobs.get(identity, scope.job_id)).state.is_final:
                return
            if event is not None and event.type in FINAL_EVENTS:
                return

    async def _follow_changes(self, kinds: frozenset[ChangeKind]) -> AsyncIterator[bytes]:
        async for found in self._changes.follow(kinds):
            yield b"event: changed\ndata: %b\n\n" % Changed(kinds=sorted(found)).model_dump_json().encode()
