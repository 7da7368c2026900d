"""A node's commands from its stream: delivered at least once, and removed when they are on disk.

What is on the stream has not been carried out, so it is always read from its beginning. That covers an agent that
starts, a Valkey that was replaced and an answer that was lost.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from services.contracts.streams import (
    COMMAND_FIELD,
    FIRST_ENTRY,
    TRACEPARENT_FIELD,
    NodeStream,
    StreamEntries,
    StreamRead,
    command_stream,
)
from services.kit import traces
from services.kit.control_plane import ControlPlane
from services.kit.enrolment import NodeRedis
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

BLOCK_MS = 2_000
BATCH = 100
_WITHIN_S = 10.0  #: Longer than a read waits for entries


class RelayedRedis:
    """The Redis client commands that read a node's streams, as requests to telemetry with the node's own token.

    A node uses them that cannot reach the installation's Valkey or Redis. They raise ``RedisConnectionError`` if
    telemetry does not answer, or refuses.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def xread(self, streams: Mapping[str, str], **_: int) -> list[tuple[str, list[Any]]]:
        """Return the entries after the one named; telemetry waits while there are none, and decides how many."""
        ((name, after),) = streams.items()
        found = await self._ask(StreamRead(stream=NodeStream.of(name), after=after))
        return [(name, [(each.id, each.fields) for each in found.entries])] if found.entries else []

    async def xdel(self, name: str, entry_id: str) -> None:
        await self._ask(StreamRead(stream=NodeStream.of(name), done=entry_id))

    async def _ask(self, read: StreamRead) -> StreamEntries:
        try:
            return await self._plane.call("stream", read, StreamEntries, _WITHIN_S)
        except ProblemError as error:
            raise RedisConnectionError(f"telemetry relays no commands: {error.detail}") from error


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
