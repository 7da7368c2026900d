"""Sessions that were ended before they expired: no gateway of the installation opens their cookies again."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.dashboard.sessions import Link, Session
from services.contracts.streams import ended_session
from services.kit.logging import Log

log = Log(__name__)

ANSWERS_S = 0.5  #: A Redis that is silent for so long does not answer
AWAY_S = 2.0  #: One that did not answer is not asked for so long: pages must not wait for it each time

TELL_S = 1.0  #: How often the other gateways are told of what they could not be told of before


class EndedSessions:
    """Keeps them as entries in Redis, which last as long as the cookies would have.

    While Redis does not answer, only this gateway knows of sessions that were ended here; the others are told as soon
    as it answers again.
    """

    redis: Redis

    def __init__(self, valid_s: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take how long cookies are valid; ``redis`` is set once the process has started."""
        self._valid_s = valid_s
        self._clock_s = clock_s
        self._unshared: dict[str, float] = {}
        self._is_away = False
        self._away_until_s = 0.0

    async def end(self, session: Session) -> None:
        """End a session, at once here and, if Redis answers, at all gateways."""
        self._unshared[session.id] = self._clock_s() + self._valid_s
        await self.tell()

    async def take(self, link: Link, valid_s: int) -> bool:
        """Return whether a link is used for the first time at any gateway; False if Redis does not answer."""
        return bool(await self._ask(self.redis.set(ended_session(link.id), "", ex=valid_s, nx=True)))

    async def tell(self) -> None:
        """Tell the other gateways what they may not know yet."""
        for session_id, until_s in list(self._unshared.items()):
            left_s = int(until_s - self._clock_s())
            if left_s > 0 and await self._ask(self.redis.set(ended_session(session_id), "", ex=left_s)) is None:
                return
            self._unshared.pop(session_id, None)

    async def has_ended(self, session: Session) -> bool:
        """Return whether it is known that a session has ended."""
        if session.id in self._unshared:
            return True
        if self._clock_s() < self._away_until_s:
            return False
        return bool(await self._ask(self.redis.exists(ended_session(session.id))))

    async def _ask(self, command: Awaitable[object]) -> object | None:
        """Return the answer of Redis; None, logged once, if it does not answer."""
        try:
            async with asyncio.timeout(ANSWERS_S):
                found = await command
        except (RedisError, TimeoutError, OSError) as error:
            if not self._is_away:
                log.warning("sessions.not_shared", error=str(error) or type(error).__name__)
            self._is_away = True
            self._away_until_s = self._clock_s() + AWAY_S
            return None
        self._is_away = False
        return found
