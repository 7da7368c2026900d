"""A receiver of webhooks on loopback that answers as a test has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web


@dataclass(frozen=True, slots=True)
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        return orjson.loads(self.body)


@dataclass
class Receiver:
    """Answers with the next of ``answers``, then with 204; requests to /slow wait until ``released`` is set."""

    url: str = ""
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.received.append(Received(request.path, headers, await request.read()))
        self.arrived.set()
        if request.path == "/slow":
            await self.released.wait()
        status, extra = self.answers.pop(0) if self.answers else (204, {})
        return web.Response(status=status, headers=extra)

    async def has(self, path: str, times: int = 1) -> None:
        """Wait until requests to ``path`` have come this often."""
        async with asyncio.timeout(60):
            while [each.path for each in self.received].count(path) < times:
                self.arrived.clear()
                await self.arrived.wait()


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Yield a receiver that listens on 127.0.0.1."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{path:.*}", receiver.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield receiver
    receiver.released.set()
    await runner.cleanup()
