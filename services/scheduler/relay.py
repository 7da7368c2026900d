"""Hand committed commands to Redis, at least once."""

import asyncio
import contextlib

from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.contracts.streams import COMMAND_FIELD, TRACEPARENT_FIELD
from services.db.database import CONNECTION_ERRORS, Database, dumps
from services.kit.logging import Log
from services.scheduler.repository import outbox

log = Log(__name__)

BATCH = 200
STREAM_LENGTH = 10_000
"""Commands kept per node. What a dead node never read is trimmed; what still matters then is published again."""


class Relay:
    """Publishes the outbox in order; a row is deleted once Redis has it, so a crash in between publishes it twice."""

    def __init__(self, database: Database, redis: Redis, *, look_every_s: float = 1.0) -> None:
        self._database = database
        self._redis = redis
        self._look_every_s = look_every_s
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Wake the relay, since something was committed."""
        self._wake.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            self._wake.clear()
            try:
                while await self.publish():
                    pass
            except (RedisError, TimeoutError, *CONNECTION_ERRORS) as error:
                log.warning("relay.waiting", error=str(error) or type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._wake.wait()

    async def publish(self) -> int:
        """Publish one batch and return how many commands it held."""
        async with self._database.connection() as connection:
            rows = await outbox.oldest(connection, BATCH)
            if not rows:
                return 0
            async with self._redis.pipeline(transaction=False) as pipeline:
                for row in rows:
                    command = {COMMAND_FIELD: dumps(row.payload)}
                    if row.traceparent is not None:
                        command[TRACEPARENT_FIELD] = row.traceparent
                    pipeline.xadd(row.stream, command, maxlen=STREAM_LENGTH, approximate=True)  # pyright: ignore[reportArgumentType]
                await pipeline.execute()
            await outbox.delete(connection, [row.id for row in rows])
        return len(rows)
