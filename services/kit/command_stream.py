"""A node's commands from its stream: delivered at least once, and removed when they are on disk.

What is on the stream has not been carried out, so it is always read from its beginning. That covers an agent that
starts, a Valkey that was replaced and an answer that was lost.
"""

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.streams import COMMAND_FIELD, FIRST_ENTRY, TRACEPARENT_FIELD, command_stream
from services.kit import traces
from services.kit.enrolment import NodeRedis
from services.kit.logging import Log
from services.kit.relayed import RelayedRedis

log = Log(__name__)

BLOCK_MS = 2_000
BATCH = 100

StreamSource = Redis | NodeRedis | RelayedRedis
"""Where a node's streams are read: of a Valkey or Redis that it reaches, or as telemetry relays them."""


class CommandStream:
    """One node's stream of commands; a subclass obeys them."""

    def __init__(self, redis: StreamSource, node_id: str, retry_s: float) -> None:
        self._redis: Any = redis  # the library's types do not know that its answers are awaited
        self._stream = command_stream(node_id)
        self._retry_s = retry_s
        self.problem = ""
        """Why commands cannot be read now; empty if they can."""

    def obey(self, text: str) -> None:
        """Carry out one command; whatever has to survive is on disk when this returns.

        Raises:
            OSError: It cannot be stored: it stays on the stream and is delivered again.
        """
        raise NotImplementedError

    async def run(self) -> None:
        """Carry out commands until cancelled; failures of Redis or the disk are retried."""
        while True:
            try:
                answer: Any = await self._redis.xread({self._stream: FIRST_ENTRY}, count=BATCH, block=BLOCK_MS)
                for _, entries in answer or ():
                    for entry_id, fields in entries:
                        with traces.within(fields.get(TRACEPARENT_FIELD)):
                            self.obey(fields.get(COMMAND_FIELD, ""))
                        await self._redis.xdel(self._stream, entry_id)
                self.problem = ""
            except (RedisError, OSError) as error:
                if not self.problem:
                    log.warning("inbox.interrupted", error=str(error))
                self.problem = str(error) or type(error).__name__
                await asyncio.sleep(self._retry_s)
