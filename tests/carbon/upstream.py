"""A provider's server to be: it answers on loopback as a test sets it up, and remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
from aiohttp import web

from carbon_service.providers.entry import ProviderContext, ProviderEntry
from carbon_service.providers.http import Pacing
from carbon_service.replay import Replay


@dataclass
class Answer:
    """One answer; ``hangs`` never comes, and a body that is a function is made of what is asked."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    hangs: bool = False


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]


class Upstream:
    """Answers a path with its answers in turn; the last one is given again and again."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Asked] = []
        self.answers: dict[str, list[Answer]] = {}
        self.closing = asyncio.Event()

    def answer(self, path: str, *answers: Answer | Any) -> None:
        """Say what to answer on ``path``; anything but an ``Answer`` is the JSON of a 200."""
        self.answers[path] = [one if isinstance(one, Answer) else Answer(one) for one in answers]

    def paths(self) -> list[str]:
        """Return what was asked, in order."""
        return [one.path for one in self.asked]

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request; 404 where the test said nothing."""
        self.asked.append(Asked(request.path, dict(request.query), {k.lower(): v for k, v in request.headers.items()}))
        known = self.answers.get(request.path)
        if not known:
            return web.Response(status=404, text="nothing here")
        answer = known.pop(0) if len(known) > 1 else known[0]
        if answer.hangs:
            await self.closing.wait()
        body = answer.body(dict(request.query)) if callable(answer.body) else answer.body
        raw = body if isinstance(body, bytes) else answer.raw
        content = orjson.dumps(body) if raw is None else raw
        return web.Response(status=answer.status, body=content, headers=answer.headers)


@asynccontextmanager
async def serving() -> AsyncIterator[Upstream]:
    """Yield a server that runs."""
    upstream = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    upstream.url = f"http://{host}:{port}"
    try:
        yield upstream
    finally:
        upstream.closing.set()
        await runner.cleanup()


@dataclass
class Watch:
    """A clock that only waiting moves, so that no test sleeps."""

    now_s: float = 1000.0
    waits_s: list[float] = field(default_factory=list)

    def monotonic_s(self) -> float:
        """Return the time."""
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        """Let the time pass."""
        self.waits_s.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)

    def pacing(self, **changes: Any) -> Pacing:
        """Return a pacing by this clock."""
        return Pacing(**{"monotonic_s": self.monotonic_s, "sleep": self.sleep, **changes})


def built(
    entry: ProviderEntry[Any], http: httpx.AsyncClient, now_s: Callable[[], float], pacing: Pacing, **settings: Any
) -> Any:
    """Return a provider with these settings, as the service builds it."""
    return entry.build(entry.read_settings(**settings), ProviderContext(http, now_s, pacing, Replay(0.0, 0.0, 1.0)))
