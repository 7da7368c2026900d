"""A service as the gateway sees one: an HTTP server in this process that does as the test says."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from tests.support.ports import Ports

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def a_peer(handler: Handler) -> AsyncIterator[str]:
    """Yield the address of a server that answers every request by ``handler``."""
    ports = Ports()
    app = web.Application(client_max_size=64 * 1024 * 1024)

    async def answer(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    port = ports.take(27_500)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
        ports.release()
