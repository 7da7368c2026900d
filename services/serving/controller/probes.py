"""Ask model servers how they do: over HTTP, many at once, none for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import TypeVar

import aiohttp

LARGEST_ANSWER = 4 * 1024 * 1024
"""Bytes of metrics that are read; a server that says more is not understood."""

T = TypeVar("T")


def held_requests(metrics: str, names: Collection[str]) -> float | None:
    """Return the sum of these metrics over all their labels; None if there is none of them, or one is no number.

    Args:
        metrics: Prometheus text format, version 0.0.4.
    """
    found: list[float] = []
    for line in metrics.splitlines():
        name = line.partition("{")[0].partition(" ")[0].partition("\t")[0]
        if name not in names:
            continue
        rest = line[len(name) :].rpartition("}")[2].split()  # a label's value may hold spaces, and braces too
        try:
            found.append(float(rest[0]))
        except (IndexError, ValueError):
            return None
    total = sum(found)
    return total if found and total == total else None  # NaN is no count


class Prober:
    """Asks servers; whatever goes wrong is an answer too."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float, at_once: int) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._turns = asyncio.Semaphore(at_once)

    async def answers(self, url: str) -> bool:
        """Return whether a GET is answered 2xx; a redirection is not followed, and is no such answer."""
        return await self._ask(self._answers(url)) or False

    async def held(self, url: str, names: Collection[str]) -> float | None:
        """Return how many requests a server says it holds; None if it does not say."""
        return await self._ask(self._held(url, names))

    async def _ask(self, question: Awaitable[T]) -> T | None:
        async with self._turns:
            try:
                return await question
            except Exception:  # one server's answer, however odd, must not keep the others from being asked
                return None

    async def _answers(self, url: str) -> bool:
        async with self._session.get(url, allow_redirects=False, timeout=self._timeout) as answer:
            return 200 <= answer.status < 300

    async def _held(self, url: str, names: Collection[str]) -> float | None:
        async with self._session.get(url, allow_redirects=False, timeout=self._timeout) as answer:
            if not 200 <= answer.status < 300:
                return None
            body = bytearray()
            async for chunk in answer.content.iter_chunked(65_536):
                body += chunk
                if len(body) > LARGEST_ANSWER:
                    return None
        return held_requests(body.decode(errors="replace"), names)


def new_probe_session() -> aiohttp.ClientSession:
    """Return a session for a ``Prober``: a connection for each question, no cookies; close it at the end."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
