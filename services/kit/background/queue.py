"""The queue of work: messages that contain an id. A lost or repeated message only costs time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from redis.asyncio import Redis

from services.contracts.background import Draft, Submitted, WorkFailure, WorkRecord
from services.contracts.identity import Identity
from services.kit.logging import Log
from services.kit.queue_keys import queue_key


class WorkStore(Protocol):
    """Queries on one table of work; ``services.db.background`` documents each."""

    async def submitted(self, tenant_id: str, key: str, body_sha256: bytes) -> str | None: ...
    async def submit(self, draft: Draft, max_pending: int) -> Submitted: ...
    async def find(self, work_id: str, tenant_id: str | None) -> WorkRecord | None: ...
    async def summary(self, work_id: str) -> WorkRecord: ...
    async def listed(
        self,
        tenant_id: str | None,
        states: Sequence[str],
        before_id: str | None,
        limit: int,
        also: Mapping[str, Any] | None = None,
    ) -> Sequence[Any]: ...
    def record(self, listed: Any, /) -> WorkRecord: ...
    async def cancel(self, work_id: str, caller: Identity) -> bool: ...
    async def mark_enqueued(self, work_id: str) -> None: ...
    async def fairest(self, work_id: str) -> str: ...
    async def claim(self, work_id: str, claim: str, lease_s: float) -> WorkRecord | None: ...
    async def renew(self, work_id: str, claim: str, lease_s: float, **columns: Any) -> bool: ...
    async def succeed(self, work_id: str, claim: str, result: Any, **columns: Any) -> bool: ...
    async def fail(self, work_id: str, claim: str, failure: WorkFailure, **columns: Any) -> bool: ...
    async def live(self) -> tuple[int, int, float]: ...
    async def release_abandoned(self, max_attempts: int, lease_s: float) -> Sequence[WorkRecord]: ...
    async def queued(self, enqueued_before_s: float) -> Sequence[str]: ...
    async def forget_older(self, tenant_id: str, *, keep: int) -> None: ...
    async def forget_ended(self, keep_days: float) -> int: ...


log = Log(__name__)

PUBLISH_WITHIN_S = 3.0


class TaskQueue:
    """The service's end of a queue."""

    def __init__(self, celery: Celery, redis: Redis, queue: str, task: str) -> None:
        self._publish = cast("Callable[..., object]", celery.send_task)  # pyright: ignore[reportUnknownMemberType]
        self._redis, self._queue, self._task = redis, queue, task

    async def send(self, work_id: str) -> bool:
        """Send a message for work that has been committed, and return whether the broker took it.

        It never raises: the row is stored, and the sweeper sends messages that were not sent.
        """
        try:
            # Celery publishes synchronously.
            async with asyncio.timeout(PUBLISH_WITHIN_S):
                await asyncio.to_thread(self._publish, self._task, args=[work_id])
        except Exception as error:
            log.warning("work.not_enqueued", id=work_id, error=str(error) or type(error).__name__)
            return False
        return True

    async def waiting(self) -> int:
        return int(await self._redis.llen(queue_key(self._queue)))  # type: ignore[misc]  # redis-py has one type for its sync and async clients
