"""The client of every live provider: timeouts, retries that honour Retry-After, rate limits and a small cache."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import orjson

from carbon_service.providers.protocol import ProviderError

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
CACHED_ANSWERS = 64

Sleep = Callable[[float], Awaitable[None]]


@dataclass(frozen=True)
class Pacing:
    """How a client waits."""

    timeout_s: float = 10.0  #: The time limit for each of connecting, sending and every read
    attempts: int = 4  #: The number of attempts in all, including the first
    backoff_s: float = 0.5
    """The wait before the second attempt; it doubles with each further one, and a random half is left out."""
    longest_wait_s: float = 30.0  #: The longest single wait; if a provider asks for more, the next poll tries again
    monotonic_s: Callable[[], float] = time.monotonic  #: The clock of rate limits and the cache
    sleep: Sleep = asyncio.sleep  #: How to wait


@dataclass
class RateLimit:
    """At most ``requests`` in any ``window_s`` seconds; a request that comes too early waits."""

    requests: int
    window_s: float
    _sent: deque[float] = field(default_factory=deque[float])
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def wait(self, pacing: Pacing) -> None:
        """Wait until one more request may be sent, and count it."""
        async with self._turn:
            while True:
                now = pacing.monotonic_s()
                while self._sent and now - self._sent[0] >= self.window_s:
                    self._sent.popleft()
                if len(self._sent) < self.requests:
                    self._sent.append(now)
                    return
                await pacing.sleep(self._sent[0] + self.window_s - now)


class ProviderClient:
    """Requests JSON from one provider. Only safe requests: every one of them may be retried."""

    def __init__(
        self, http: httpx.AsyncClient, base_url: str, pacing: Pacing, limit: RateLimit, headers: Mapping[str, str] = {}
    ) -> None:
        self._http, self._pacing, self._limit = http, pacing, limit
        self._base_url, self._headers = base_url.rstrip("/"), dict(headers)
        self._cache: dict[str, tuple[float, Any]] = {}

    async def get(
        self,
        path: str,
        params: Mapping[str, str | int | float] = {},
        *,
        headers: Mapping[str, str] = {},
        auth: httpx.BasicAuth | None = None,
        cache_s: float = 0.0,
        limit: RateLimit | None = None,
        read: Callable[[bytes], Any] = orjson.loads,
    ) -> Any:
        """Return the JSON of a 200 response, or what ``read`` makes of it, kept for ``cache_s``.

        Raises:
            ProviderError: Every attempt failed, or the response is an error that retrying cannot fix.
        """
        key = str(httpx.URL(self._base_url + path, params=dict(params)))
        known = self._cache.get(key)
        if known and self._pacing.monotonic_s() < known[0]:
            return known[1]
        failure = ProviderError("no attempt was made")
        for attempt in range(self._pacing.attempts):
            if attempt and not await self._pause(attempt, failure):
                break
            await (limit or self._limit).wait(self._pacing)
            try:
                answer = await self._http.get(
                    key, headers={**self._headers, **headers}, auth=auth, timeout=self._pacing.timeout_s
                )
                if answer.status_code == 200:
                    content = read(answer.content)
                    if cache_s:
                        self._remember(key, content, cache_s)
                    return content
                failure = _refusal(path, answer)
                if answer.status_code not in RETRIED_STATUS:
                    break
            except httpx.HTTPError as error:
                failure = ProviderError(f"{path}: {type(error).__name__} {error}".rstrip())
            except orjson.JSONDecodeError:
                failure = ProviderError(f"{path}: the answer is not JSON")
            except ValueError as error:
                failure = ProviderError(f"{path}: {error}")
        raise failure

    async def _pause(self, attempt: int, failure: ProviderError) -> bool:
        """Wait before another attempt; return False at once if the provider asks for a longer wait than is allowed."""
        if failure.retry_after_s > self._pacing.longest_wait_s:
            return False
        backoff_s = self._pacing.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1)
        await self._pacing.sleep(min(max(backoff_s, failure.retry_after_s), self._pacing.longest_wait_s))
        return True

    def _remember(self, key: str, content: Any, cache_s: float) -> None:
        now = self._pacing.monotonic_s()
        self._cache = {each: known for each, known in self._cache.items() if known[0] > now}
        if len(self._cache) >= CACHED_ANSWERS:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = (now + cache_s, content)


def _refusal(path: str, answer: httpx.Response) -> ProviderError:
    retry_after_s = 0.0
    wanted = answer.headers.get("retry-after", "").strip()
    if wanted.isascii() and wanted.isdigit():
        retry_after_s = float(wanted)
    elif wanted:
        with suppress(ValueError, TypeError, OverflowError):
            retry_after_s = max(0.0, (parsedate_to_datetime(wanted) - datetime.now(UTC)).total_seconds())
    status = answer.status_code
    return ProviderError(f"{path}: answered {status}", status=status, retry_after_s=retry_after_s)
