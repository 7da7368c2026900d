"""Probes of model servers over HTTP: many at once, each with a short time limit."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Collection
from typing import TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

LARGEST_ANSWER = 4 * 1024 * 1024
"""Most bytes of metrics that are read; a longer answer is not used."""

T = TypeVar("T")


def held_requests(metrics: str, names: Collection[str]) -> float | None:
    """Return the sum of these metrics over all their labels; None if none is there, or one is not a number.

    Args:
        metrics: Prometheus text format, version 0.0.4.
    """
    wanted = tuple(names)
    # The others, of which a server may have megabytes, are not parsed.
    lines = "".join(f"{line}\n" for line in metrics.splitlines() if line.startswith(wanted))
    try:
        families = list(text_string_to_metric_families(lines))
    except ValueError:
        return None
    found = [sample.value for family in families for sample in family.samples if sample.name in names]
    total = sum(found)
    return None if not found or math.isnan(total) else total


class Prober:
    """Probes servers. A failure of any kind counts as no answer."""

    def __init__(self, session: aiohttp.ClientSession, *, timeout_s: float, at_once: int) -> None:
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._turns = asyncio.Semaphore(at_once)

    async def answers(self, url: str) -> bool:
        """Return whether a GET is answered with 2xx; redirections are not followed."""
        return await self._ask(self._answers(url)) or False

    async def held(self, url: str, names: Collection[str]) -> float | None:
        """Return how many requests a server reports to hold; None if it reports none of these metrics."""
        return await self._ask(self._held(url, names))

    async def _ask(self, question: Awaitable[T]) -> T | None:
        async with self._turns:
            try:
                return await question
            except Exception:  # whatever one server answers, the others are probed
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
    """Return a session for a ``Prober``: a connection for each request, no cookies; close it at the end."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
