"""Hints that wake the scheduler; one stands for many changes."""

import asyncio

from redis.asyncio import Redis

from services.kit.redis import hint


class JobHints:
    """Tells the scheduler that jobs have changed.

    Nothing waits for it, so an unreachable Redis delays no submission; the scheduler looks every second anyway.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._wanted = asyncio.Event()

    def give(self) -> None:
        """Send a hint soon; hints not yet sent are merged."""
        self._wanted.set()

    async def run(self) -> None:
        """Send hints until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await hint(self._redis, "job")
