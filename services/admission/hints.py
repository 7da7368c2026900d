"""Hints that wake the scheduler: many changes, one hint."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from services.kit.redis import hint


class JobHints:
    """Tells the scheduler that jobs changed. Nobody waits for it: a Redis that is away delays no submission, and the
    scheduler looks by itself every second."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._wanted = asyncio.Event()

    def give(self) -> None:
        """Give a hint soon; hints not yet given become one."""
        self._wanted.set()

    async def run(self) -> None:
        """Give hints until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await hint(self._redis, "job")
