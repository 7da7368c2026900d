"""One scheduler decides at a time: the holder of a session lock in PostgreSQL, on a connection of its own."""

import asyncpg

from services.db import locks
from services.db.database import CONNECTION_ERRORS, Connection, connect, ping
from services.kit.logging import Log

log = Log(__name__)


class Leadership:
    """Held by one scheduler at a time, and lost with its connection.

    A scheduler that lost it without noticing can still do no harm: a plan commits only on the version it was made from.
    """

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._connection: Connection | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process led when it last looked."""
        return self._connection is not None

    async def hold(self) -> bool:
        """Return whether this process leads, after trying to gain or keep it."""
        try:
            if self._connection is None:
                self._connection = await self._gain()
            else:
                await ping(self._connection)
        except (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS) as error:
            log.warning("leadership.lost", error=str(error) or type(error).__name__)
            await self.release()
        return self._connection is not None

    async def _gain(self) -> Connection | None:
        connection = await connect(self._database_url, application_name="scheduler-leader")
        if await locks.try_session_lock(connection, locks.LEADERSHIP):
            log.info("leadership.gained")
            return connection
        await connection.close()
        return None

    async def release(self) -> None:
        """Let another scheduler lead."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.terminate()
