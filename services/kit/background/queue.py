"""The queue of work: messages that contain an id. A lost or repeated message only costs time."""

import asyncio
from collections.abc import Callable
from typing import cast

from celery import Celery  # pyright: ignore[reportMissingTypeStubs]
from redis.asyncio import Redis

from services.kit.logging import Log
from services.kit.queue_keys import queue_key

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
        """Return how many messages wait for a worker."""
        return int(await self._redis.llen(queue_key(self._queue)))  # type: ignore[misc]  # redis-py has one type for its sync and async clients

    async def ping(self) -> None:
        """Return once the broker has answered."""
        await self._redis.ping()  # type: ignore[misc]
