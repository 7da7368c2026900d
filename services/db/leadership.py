"""One process leads at a time: the holder of a session lock in PostgreSQL, on a connection of its own."""

import logging

import asyncpg

from services.db.database import CONNECTION_ERRORS, Connection, connect, ping
from services.db.locks import try_session_lock

log = logging.getLogger(__name__)


class Leadership:
    """Held by one process at a time, and lost with its connection.

    Whoever lost it without noticing must do no harm: a scheduler's plan commits only on the version it was made from.
    """

    def __init__(self, database_url: str, lock: int, name: str) -> None:
        """Take the lock's number, and the connection's application name."""
        self._database_url, self._lock, self._name = database_url, lock, name
        self._connection: Connection | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process led when it last looked."""
        return self._connection is not None

    async def hold(self) -> bool:
        """Return whether this process leads, after trying to gain or keep it."""
        try:
            if self._connection is None:
                await self._gain()
            else:
                await ping(self._connection)
        except (TimeoutError, asyncpg.PostgresError, *CONNECTION_ERRORS) as error:
            log.warning("%s: leadership lost: %s", self._name, str(error) or type(error).__name__)
            self.release()
        except BaseException:
            self.release()
            raise
        return self.is_held

    async def _gain(self) -> None:
        connection = await connect(self._database_url, application_name=self._name)
        try:
            if await try_session_lock(connection, self._lock):
                log.info("%s: leadership gained", self._name)
                self._connection = connection
        finally:
            if not self.is_held:  # also one whose answer was lost, which may have the lock
                connection.terminate()

    def release(self) -> None:
        """Let another process lead."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()
