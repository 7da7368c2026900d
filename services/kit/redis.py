"""Redis as this project uses it: hints that wake the scheduler, and streams of commands."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.contracts.streams import HINTS_MAX_LENGTH, HINTS_STREAM
from services.kit.logging import Log
from services.kit.redis_users import with_user
from services.kit.settings import SharedSettings

log = Log(__name__)


def connect(url: str, settings: SharedSettings | None = None, user: tuple[str, str] | None = None) -> Redis:
    """Return a client that retries through a restart of the server.

    Args:
        url: Of the server; ``rediss://`` is over TLS, by the certificates in ``settings``.
        settings: Of the process.
        user: Name and password, in the place of those in ``url``.
    """
    if user is not None:
        url = with_user(url, *user)
    tls: dict[str, Any] = {} if settings is None else settings.tls.redis(url)
    return Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
        url,
        **tls,
        decode_responses=True,
        socket_timeout=10,
        socket_connect_timeout=2,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=4),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )


async def check_answers(redis: Redis) -> None:
    """Return if the server answers.

    Raises:
        RuntimeError: It does not, within two seconds.
    """
    try:
        async with asyncio.timeout(2):
            await redis.ping()  # pyright: ignore[reportGeneralTypeIssues, reportUnknownMemberType]
    except (TimeoutError, RedisError, OSError) as error:
        raise RuntimeError(f"Valkey does not answer: {str(error) or type(error).__name__}") from error


async def hint(redis: Redis, kind: str, **fields: Any) -> None:
    """Wake the scheduler. A hint that cannot be sent is dropped: the scheduler looks every second anyway."""
    try:
        await redis.xadd(HINTS_STREAM, {"kind": kind, **fields}, maxlen=HINTS_MAX_LENGTH, approximate=True)
    except RedisError as error:
        log.warning("hint.lost", kind=kind, error=str(error))
