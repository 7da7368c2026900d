"""Redis as this project uses it: hints that wake the scheduler, and streams of commands."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.contracts.streams import HINTS_MAX_LENGTH, HINTS_STREAM
from services.kit.logging import Log

log = Log(__name__)


def connect(url: str) -> Redis:
    """Return a client that retries through a restart of the server."""
    return Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
        url,
        decode_responses=True,
        socket_timeout=10,
        socket_connect_timeout=2,
        health_check_interval=15,
        retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), retries=4),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )


async def hint(redis: Redis, kind: str, **fields: Any) -> None:
    """Wake the scheduler. A hint that cannot be sent is dropped: the scheduler looks every second anyway."""
    try:
        await redis.xadd(HINTS_STREAM, {"kind": kind, **fields}, maxlen=HINTS_MAX_LENGTH, approximate=True)
    except RedisError as error:
        log.warning("hint.lost", kind=kind, error=str(error))
