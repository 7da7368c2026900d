"""Probes of model servers over HTTP: many at once, each with a short time limit."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from enum import StrEnum
from typing import ParamSpec, TypeVar

import aiohttp

from services.kit.scraping import metric_sum

LARGEST_ANSWER = 4 * 1024 * 1024  #: Most bytes of metrics that are read; a longer answer is not used

REFUSALS = frozenset({401, 403})
KEYED_PATH = "/v1/models"  #: A path that servers protect by their key; most answer their health to anybody

P = ParamSpec("P")
T = TypeVar("T")


class KeyCheck(StrEnum):
    """How a server treats the key that its instance was given."""

    CHECKED = "checked"  #: It answers with it, and refuses without
    UNCHECKED = "unchecked"  #: It answers whoever asks
    REFUSED = "refused"  #: It does not answer with it


class Prober:
    """Probes servers. A failure of any kind counts as no answer."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float, at_once: int) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._turns = asyncio.Semaphore(at_once)

    async def answers(self, url: str) -> bool:
        """Return whether a GET is answered with 2xx; redirections are not followed."""
        return (await self._ask(self._status, url) or 0) // 100 == 2

    async def held(self, url: str, names: Collection[str]) -> float | None:
        """Return how many requests a server says it holds, by these metrics; None if it reports none of them."""
        return await self._ask(self._held, url, names)

    async def key_check(self, url: str, key: str) -> KeyCheck:
        """Return how a server treats a key at a path that needs it; one without such a path asks for none."""
        told = await self._ask(self._status, url, key)
        if told is None or told in REFUSALS or told >= 500:
            return KeyCheck.REFUSED
        return KeyCheck.CHECKED if await self._ask(self._status, url) in REFUSALS else KeyCheck.UNCHECKED

    async def _status(self, url: str, key: str | None = None) -> int:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with self._session.get(url, headers=headers, allow_redirects=False, timeout=self._timeout) as answer:
            return answer.status

    async def _ask(self, question: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T | None:
        async with self._turns:
            try:
                return await question(*args, **named)
            except Exception:  # whatever one server answers, the others are probed
                return None

    async def _held(self, url: str, names: Collection[str]) -> float | None:
        async with self._session.get(url, allow_redirects=False, timeout=self._timeout) as answer:
            if not 200 <= answer.status < 300:
                return None
            body = bytearray()
            async for chunk in answer.content.iter_chunked(65_536):
                body += chunk
                if len(body) > LARGEST_ANSWER:
                    return None
        return metric_sum(body.decode(errors="replace"), names)


def new_probe_session() -> aiohttp.ClientSession:
    """Return a session for a ``Prober``: one connection per request, no cookies; close it at the end."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
