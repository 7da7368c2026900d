"""Commands from Redis: delivered at least once, acknowledged when they are on disk."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from gpu_agent.enrolment import NodeRedis
from gpu_agent.gangs import Gangs
from services.contracts.commands import SetDevices, StopGang, UnknownFieldsError, read_command
from services.contracts.nodes import EndedBy
from services.contracts.streams import AGENT_GROUP, COMMAND_FIELD, command_stream
from services.kit.logging import Log
from services.kit.release import RELEASE

log = Log(__name__)

CONSUMER = "agent"
_BLOCK_MS = 2_000
_BATCH = 100
_UNREADABLE_CODE = 126


class Inbox:
    """This node's command stream."""

    def __init__(self, redis: Redis | NodeRedis, node_id: str, gangs: Gangs, retry_s: float) -> None:
        self._redis: Any = redis  # the library's types do not know that its answers are awaited
        self._stream = command_stream(node_id)
        self._gangs = gangs
        self._retry_s = retry_s
        self.problem = ""
        """Why commands cannot be read now; empty if they can."""

    async def run(self) -> None:
        """Carry out commands until cancelled; failures of Redis or the disk are retried."""
        while True:
            try:
                await self._join()
                await self._take_over()
                while True:
                    self.problem = ""
                    answer = await self._redis.xreadgroup(
                        AGENT_GROUP, CONSUMER, {self._stream: ">"}, count=_BATCH, block=_BLOCK_MS
                    )
                    for _, entries in answer or []:
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
                self._obey(fields.get(COMMAND_FIELD, ""))
            async with self._redis.pipeline(transaction=True) as pipeline:
                pipeline.xack(self._stream, AGENT_GROUP, entry_id)
                pipeline.xdel(self._stream, entry_id)
                await pipeline.execute()

    def _obey(self, text: str) -> None:
        """Carry out one command; it is on disk when this returns.

        Raises:
            OSError: It cannot be stored: it stays unacknowledged and is delivered again.
        """
        try:
            document: Any = orjson.loads(text)
            command = read_command(document)
        except UnknownFieldsError as error:
            log.error("command.unknown_fields", allocation_id=error.allocation_id, fields=error.fields)
            what = f"the job needs {', '.join(error.fields)}, which the agent of this node does not know"
            self._refuse(error.allocation_id, f"{what} (release {RELEASE}): upgrade the agent")
            return
        except (orjson.JSONDecodeError, ValidationError) as error:
            self._refuse_unreadable(text, error)
            return
        if isinstance(command, StopGang):
            self._gangs.stop(command)
        elif isinstance(command, SetDevices):
            self._gangs.set(command)
        else:
            self._gangs.accept(command)

    def _refuse_unreadable(self, text: str, error: Exception) -> None:
        """Report a gang whose start this agent cannot read, if it is named; commands of unknown types are ignored."""
        log.error("command.unreadable", error=str(error), command=text[:500])
        try:
            document: Any = orjson.loads(text)
            allocation_id, kind = str(document["allocation_id"]), document["type"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return
        if kind == "start_gang":
            self._refuse(allocation_id, f"this agent cannot read the command: {error}")

    def _refuse(self, allocation_id: str, detail: str) -> None:
        self._gangs.refuse(allocation_id, EndedBy.REFUSED, _UNREADABLE_CODE, detail)
