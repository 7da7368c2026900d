"""Redis as this project uses it: hints that wake the scheduler, and streams of commands."""

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.contracts.streams import HINTS_MAX_LENGTH, HINTS_STREAM
from services.kit import sentinel
from services.kit.logging import Log
from services.kit.redis_users import with_user
from services.kit.settings import SharedSettings

_of_the_library = asyncio.wait_for  # noqa: TID251


async def wait_for(fut: Awaitable[Any], timeout: float | None) -> Any:
    """Return what is awaited, as ``asyncio.wait_for``, which redis-py calls for each command.

    Python 3.11's loses a cancellation that comes in the turn in which what it awaits is done: a task cancelled just
    then went on, and a stop that waited for it never ended. Python 3.12 has no such fault; this is its way.

    Raises:
        TimeoutError: It took longer than ``timeout`` seconds, and was cancelled.
    """
    if timeout is not None and timeout <= 0:
        return await _of_the_library(fut, timeout)
    async with asyncio.timeout(timeout):
        return await fut


def keep_cancellations() -> None:
    """Have libraries that wait by ``asyncio.wait_for`` keep them; nothing to do from Python 3.12 on."""
    if sys.version_info < (3, 12):
        asyncio.wait_for = wait_for  # noqa: TID251


log = Log(__name__)
keep_cancellations()

HINT_WITHIN_S = 1.0


class _Followed(Redis):
    """A client of the server that Sentinels name; it also closes its connections to the Sentinels."""

    asked: Sequence[Redis] = ()

    async def aclose(self, *arguments: Any, **options: Any) -> None:
        await super().aclose(*arguments, **options)
        for each in self.asked:
            await each.aclose()


def connect(url: str, settings: SharedSettings | None = None, user: tuple[str, str] | None = None) -> Redis:
    """Return a client that retries through a restart of the server.

    Args:
        url: Of the server, or of Sentinels that know it (see ``sentinel``); ``rediss`` is over TLS, with the
            certificates in ``settings``.
        user: Name and password, in place of those in ``url``.
    """
    if user is not None:
        url = with_user(url, *user)
    tls: dict[str, Any] = {} if settings is None else settings.tls.redis(url)
    options: dict[str, Any] = {
        "decode_responses": True,
        "socket_timeout": 10,
        "socket_connect_timeout": 2,
        "health_check_interval": 15,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=4),
        "retry_on_error": [RedisConnectionError, RedisTimeoutError],
    }
    if (found := sentinel.watched(url)) is not None:
        sentinels = Sentinel(found.sentinels, sentinel_kwargs=found.sentinel_options(tls))
        client: Any = sentinels.master_for(  # pyright: ignore[reportUnknownMemberType]
            found.master, redis_class=_Followed, **found.user, **found.tls_options(tls), **options
        )
        client.asked = sentinels.sentinels
        return client
    return Redis.from_url(url, **tls, **options)  # pyright: ignore[reportUnknownMemberType]


async def check_answers(redis: Redis) -> None:
    """Return if the server answers; ``RuntimeError`` if it does not answer within two seconds."""
    try:
        async with asyncio.timeout(2):
            await redis.ping()  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
    except (TimeoutError, RedisError, OSError) as error:
        raise RuntimeError(f"Valkey does not answer: {str(error) or type(error).__name__}") from error


async def hint(redis: Redis, kind: str, **fields: Any) -> None:
    """Wake the scheduler. A hint that cannot be sent soon is dropped: the scheduler looks every second anyway."""
    try:
        async with asyncio.timeout(HINT_WITHIN_S):
            await redis.xadd(HINTS_STREAM, {"kind": kind, **fields}, maxlen=HINTS_MAX_LENGTH, approximate=True)
    except Exception as error:  # whatever the server says, or does not say, is no matter of who gives the hint
        log.warning("hint.lost", kind=kind, error=str(error) or type(error).__name__)


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
