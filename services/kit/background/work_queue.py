"""What callers can do with background work: submit, read and cancel it."""

import asyncio
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from services.contracts.background import (
    Draft,
    KeyReusedError,
    Submitted,
    TooManyPendingError,
    WorkProblem,
    WorkRecord,
    WorkState,
)
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.kit.background.queue import TaskQueue, WorkStore
from services.kit.background.settings import WorkSettings
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.problems import ProblemError, key_reused, not_found
from services.kit.projects import check_tenant
from services.kit.readable import readable
from services.kit.repeating import repeat
from services.kit.routes import not_a_cursor

log = Log(__name__)

T = TypeVar("T")


def sha256(kind: str, document: Any) -> bytes:
    """Return the hash of a JSON document of some kind; the order of its keys makes no difference."""
    return hashlib.sha256(kind.encode() + b"\0" + orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).digest()


FORGET_EVERY_S = 600.0

MOST_KEPT = 1_000  #: Pieces of a tenant: each may hold megabytes, and what has ended is kept for weeks


class WorkQueue:
    """One kind of work, such as ``solve``, which is also the prefix of its ids.

    A user has access to the work of its tenant, an operator to all work.
    """

    def __init__(self, what: str, store: WorkStore, queue: TaskQueue, max_pending_per_tenant: int) -> None:
        self._what, self._store = what, store
        self._queue, self._max_pending = queue, max_pending_per_tenant
        self._id = re.compile(rf"{what}_[0-9a-z]{{26}}")

    async def submit(
        self, caller: Identity, key: str | None, body_sha256: bytes, resolve: Callable[[], Awaitable[WorkProblem]]
    ) -> tuple[WorkRecord, bool]:
        """Accept work. On return it is in the database, and a message for it has been sent.

        The same idempotency key returns the same work, and so does the same problem unless it failed or was cancelled.

        Args:
            body_sha256: Hash of the body; it must be the same whenever a key is used again.
            resolve: Makes the problem; called only if the key is new.

        Returns:
            The work without its problem and result, and whether it is new.

        Raises:
            ProblemError: 422 for a key that was used with another body, 429 with too much pending, and what
                ``resolve`` raises.
        """
        await self._store.forget_older(caller.tenant_id, keep=MOST_KEPT)
        try:
            submitted = await self._submit(caller, key, body_sha256, resolve)
        except KeyReusedError as error:
            raise key_reused() from error
        except TooManyPendingError as error:
            detail = f"{self._max_pending} {self._what}s of your tenant are queued or running; wait or cancel one."
            raise ProblemError(429, ProblemCode.QUOTA_EXCEEDED, detail, headers={"Retry-After": "5"}) from error
        if submitted.is_new:
            log.info(f"{self._what}.accepted", id=submitted.id, tenant=caller.tenant_id)
            if await self._queue.send(submitted.id):
                await self._store.mark_enqueued(submitted.id)
        return await self._store.summary(submitted.id), submitted.is_new

    async def find(self, work_id: str, caller: Identity) -> WorkRecord:
        """Return work with its problem and result; ``ProblemError``: 404 if the caller may see none."""
        row = await self._store.find(self._checked(work_id), None if caller.is_operator else caller.tenant_id)
        if row is None:
            raise not_found(self._what)
        return row

    async def page(
        self,
        caller: Identity,
        *,
        cursor: str | None,
        limit: int,
        states: Sequence[str],
        tenant: str | None,
        also: Mapping[str, Any] | None = None,
        shown: Callable[[WorkRecord], T],
    ) -> tuple[list[T], str | None]:
        """Return one page of work, newest first, and the next page's cursor.

        Args:
            shown: Returns what the page has of a piece of work.

        Raises:
            ProblemError: 422 for an invalid cursor, 403 for a ``tenant`` that the caller may not see.
        """
        if cursor is not None and not self._id.fullmatch(cursor):
            raise not_a_cursor()
        rows = await self._store.listed(check_tenant(tenant, caller), states, cursor, limit + 1, also)
        items = readable(rows[:limit], lambda row: shown(self._store.record(row)), self._what)
        return items, rows[limit - 1]["id"] if len(rows) > limit else None

    async def cancel(self, work_id: str, caller: Identity) -> WorkRecord:
        """Cancel work, once; return it; ``ProblemError``: 404 if the caller sees none, 409 if it ended otherwise."""
        cancelled = await self._store.cancel(self._checked(work_id), caller)
        row = await self.find(work_id, caller)
        if cancelled:
            log.info(f"{self._what}.cancelled", id=work_id, tenant=row.tenant_id, by=caller.key_id, role=caller.role)
        elif row.state != WorkState.CANCELLED:
            detail = f"The {self._what} has {row.state} already."
            raise ProblemError(409, ProblemCode.INVALID_TRANSITION, detail)
        return row

    async def _submit(
        self, caller: Identity, key: str | None, body_sha256: bytes, resolve: Callable[[], Awaitable[WorkProblem]]
    ) -> Submitted:
        if key is not None:  # before resolving, as what the request refers to may have changed since
            known = await self._store.submitted(caller.tenant_id, key, body_sha256)
            if known is not None:
                return Submitted(known, is_new=False)
        problem = await resolve()
        draft = Draft(new_id(self._what), caller.tenant_id, caller.key_id, problem, key, body_sha256)
        return await self._store.submit(draft, self._max_pending)

    def _checked(self, work_id: str) -> str:
        """Return the id if it has the form of one; PostgreSQL does not accept every text as a parameter."""
        if not self._id.fullmatch(work_id):
            raise not_found(self._what)
        return work_id


class Sweeper:
    """Repairs what a crash left behind, and deletes what is old.

    This is a loop in the service, not Celery beat: it must work when the broker has lost all messages, it needs no
    schedule file and no process of its own, and any number of services can run it, because each step is one guarded
    statement.
    """

    def __init__(self, what: str, store: WorkStore, queue: TaskQueue | None, settings: WorkSettings) -> None:
        """Create a sweeper for a kind of work, its table, and its queue if workers get messages."""
        self._what, self._store, self._queue, self._settings = what, store, queue, settings
        self._forget_at_s = -math.inf

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that fails (the database or the broker is unreachable) is left to the next."""
        await repeat(self.sweep, self._settings.sweep_s, failed="sweep.failed")

    async def sweep(self) -> None:
        """Requeue abandoned work, resend lost messages, now and then delete old work."""
        queued, running, _ = await self._store.live()
        if queued or running:
            for row in await self._store.release_abandoned(self._settings.max_attempts, self._settings.lease_s):
                event = "requeued" if row.state == WorkState.QUEUED else "given_up"
                log.warning(f"{self._what}.{event}", id=row.id, attempts=row.attempts)
            if self._queue is not None:
                await self._send_lost(self._queue)
        if (now_s := asyncio.get_running_loop().time()) >= self._forget_at_s:
            if forgotten := await self._store.forget_ended(self._settings.keep_days):
                log.info(f"{self._what}.forgotten", count=forgotten)
            self._forget_at_s = now_s + FORGET_EVERY_S

    async def _send_lost(self, queue: TaskQueue) -> None:
        """Send as many messages as the queue has fewer than there is queued work.

        The broker cannot tell which ones were lost, but messages are taken in order, so it is those that have waited
        longest. Sending all of them each time would fill the queue while the workers are busy.
        """
        queued = await self._store.queued(self._settings.resend_s)
        missing = len(queued) - await queue.waiting() if queued else 0
        for work_id in queued[: max(missing, 0)]:
            if not await queue.send(work_id):
                return
            await self._store.mark_enqueued(work_id)
            log.info(f"{self._what}.sent_again", id=work_id)
