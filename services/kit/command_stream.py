"""A node's commands from Redis: delivered at least once, acknowledged when they are on disk."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from services.contracts.streams import AGENT_GROUP, COMMAND_FIELD, TRACEPARENT_FIELD, command_stream
from services.kit import traces
from services.kit.enrolment import NodeRedis
from services.kit.logging import Log

log = Log(__name__)

CONSUMER = "agent"
_BLOCK_MS = 2_000
_BATCH = 100


class CommandStream:
    """One node's stream of commands; a subclass obeys them."""

    def __init__(self, redis: Redis | NodeRedis, node_id: str, retry_s: float) -> None:
        self._redis: Any = redis  # the library's types do not know that its answers are awaited
        self._stream = command_stream(node_id)
        self._retry_s = retry_s
        self.problem = ""
        """Why commands cannot be read now; empty if they can."""

    def obey(self, text: str) -> None:
        """Carry out one command; what of it has to survive is on disk when this returns.

        Raises:
            OSError: It cannot be stored: it stays unacknowledged and is delivered again.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Carry out commands until cancelled; failures of Redis or the disk are retried."""
        while True:
            try:
                await self._join()
                await self._take_over()
                while True:
                    self.problem = ""
                    answer: Any = await self._redis.xreadgroup(
                        AGENT_GROUP, CONSUMER, {self._stream: ">"}, count=_BATCH, block=_BLOCK_MS
                    )
                    for _, entries in answer or ():
                        await self._carry_out(entries)
            except (RedisError, OSError) as error:
                if not self.problem:
                    log.warning("inbox.interrupted", error=str(error))
                self.problem = str(error) or type(error).__name__
                await asyncio.sleep(self._retry_s)

    async def _join(self) -> None:
        """Create the consumer group, from the stream's first entry on, if Redis has lost it or never had it."""
        try:
            await self._redis.xgroup_create(self._stream, AGENT_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    async def _take_over(self) -> None:
        """Carry out commands that an earlier agent received but did not acknowledge."""
        start = "0-0"
        while True:
            start, entries, *_ = await self._redis.xautoclaim(
                self._stream, AGENT_GROUP, CONSUMER, min_idle_time=0, start_id=start, count=_BATCH
            )
            await self._carry_out(entries)
            if start == "0-0":
                return

    async def _carry_out(self, entries: list[tuple[str, dict[str, str] | None]]) -> None:
        for entry_id, fields in entries:
            if fields is not None:
                with traces.within(fields.get(TRACEPARENT_FIELD)):
                    self.obey(fields.get(COMMAND_FIELD, ""))
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.xack(self._stream, AGENT_GROUP, entry_id)
                pipeline.xdel(self._stream, entry_id)
                await pipeline.execute()
