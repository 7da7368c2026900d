"""Events as a stream of server-sent events."""

from collections.abc import AsyncIterator

from services.admission.changes import OPERATORS_ONLY, Changes
from services.admission.feed import EventFeed
from services.admission.jobs import Jobs
from services.admission.repository.events import BEGINNING, Position, Scope, StoredEvent
from services.contracts.changes import Changed, ChangeKind
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.problems import FieldError
from services.core.domain.jobs import JobState
from services.kit.problems import ProblemError
from services.kit.tasks import merged

FINAL_EVENTS = frozenset(f"job.{state}" for state in JobState if state.is_final)
KEEP_ALIVE = b": keep-alive\n\n"
HELLO = b": events\n\n"


def read_last_event_id(header: str | None) -> Position | None:
    """Return the position after which a client that reconnects wants to continue.

    Raises:
        ProblemError: 422 if the header is not the id of an event.
    """
    if not header:
        return None
    position = Position.parse(header)
    if position is None:
        raise ProblemError(
            422,
            ProblemCode.INVALID_CURSOR,
            "Last-Event-ID is not the id of an event.",
            errors=[FieldError(pointer="#Last-Event-ID", detail="Not the id of an event.")],
        )
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
            return self._follow_all(scope, start)
        hidden = frozenset[ChangeKind]() if scope.tenant_id is None else OPERATORS_ONLY
        return merged(self._follow_all(scope, start), self._follow_changes(frozenset(ChangeKind) - hidden))

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
        return self._follow_job(identity, job_id, start)

    async def _replay(self, scope: Scope, position: Position) -> AsyncIterator[bytes]:
        yield HELLO
        while True:
            before = position
            events, position = await self._feed.read(scope, position)
            for event in events:
                yield as_sse(event)
            if not events or position == before:
                return

    async def _follow_all(self, scope: Scope, start: Position) -> AsyncIterator[bytes]:
        yield HELLO
        async for event in self._feed.follow(scope, start, self._keep_alive_s):
            yield KEEP_ALIVE if event is None else as_sse(event)

    async def _follow_changes(self, kinds: frozenset[ChangeKind]) -> AsyncIterator[bytes]:
        async for found in self._changes.follow(kinds):
            yield b"event: changed\ndata: %b\n\n" % Changed(kinds=sorted(found)).model_dump_json().encode()

    async def _follow_job(self, identity: Identity, job_id: str, start: Position) -> AsyncIterator[bytes]:
        yield HELLO
        async for event in self._feed.follow(Scope(job_id=job_id), start, self._keep_alive_s):
            if event is not None:
                yield as_sse(event)
                if event.type in FINAL_EVENTS:
                    return
            else:
                yield KEEP_ALIVE
                if (await self._jobs.get(identity, job_id)).state.is_final:
                    return
