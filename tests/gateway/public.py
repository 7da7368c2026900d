"""A gateway on a socket in this process, before services that do as the test says."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from aiohttp import web

from gateway.app import create_app
from gateway.settings import GatewaySettings
from services.contracts.identity import Identity, KeyLookup, ResolvedKey, Role, TenantLimits
from services.kit.access import AccessLog
from services.kit.heads import ServerConfig
from tests.gateway.peer import Handler, a_peer
from tests.support.ports import Ports
from tests.support.services import TOKEN

KEYS = {role: f"ws_{role}{'-' * (43 - len(role))}" for role in Role}
AWAY = "redis://127.0.0.1:1/0"
_HASHES = {hashlib.sha256(key.encode()).hexdigest(): role for role, key in KEYS.items()}


def authorization(role: Role = Role.USER) -> dict[str, str]:
    """Return the header of a caller in that role."""
    return {"authorization": f"Bearer {KEYS[role]}"}


def knows_keys(handler: Handler, limits: TenantLimits) -> Handler:
    """Return an admission that knows ``KEYS`` and leaves the rest to ``handler``."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/internal/keys/resolve":
            return await handler(request)
        asked = KeyLookup.model_validate_json(await request.read())
        role = _HASHES.get(asked.key_sha256 or "")
        if role is None:
            return web.json_response(
                {"type": "x", "title": "x", "status": 404, "detail": "x", "code": "not_found"}, status=404
            )
        identity = Identity(tenant_id=f"of-{role}", role=role, key_id=f"key-{role}")
        return web.Response(body=ResolvedKey(identity=identity, limits=limits).model_dump_json())

    return answer


@asynccontextmanager
async def a_gateway(
    handler: Handler, *, limits: TenantLimits | None = None, telemetry_is_up: bool = True, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a gateway whose admission and telemetry answer by ``handler``; the other services are away."""
    ports = Ports()
    async with AsyncExitStack() as stack:
        away = "http://127.0.0.1:1"  # a port found free might be given to a peer the next moment
        admission = await stack.enter_async_context(a_peer(knows_keys(handler, limits or TenantLimits())))
        telemetry = await stack.enter_async_context(a_peer(handler)) if telemetry_is_up else away
        app = create_app(
            GatewaySettings(
                **{
                    "service_token": TOKEN,
                    "data_dir": Path("/nonexistent"),
                    "admission_url": admission,
                    "redis_url": AWAY,
                }
                | settings,
                telemetry_url=telemetry,
                carbon_url=away,
                scheduler_url=away,
                optimizer_url=away,
                serving_url=away,
                simulator_url=away,
            )
        )
        port = ports.take(28_100)
        server = uvicorn.Server(ServerConfig(AccessLog(app), port=port, timeout_graceful_shutdown=1))
        server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
        serving = asyncio.create_task(server.serve())
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20))
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.wait({serving}, timeout=0.01)
        try:
            yield client
        finally:
            server.should_exit = True
            await serving
            ports.release()
