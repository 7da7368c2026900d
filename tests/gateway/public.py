"""A gateway on a socket in this process, before services that do as the test says."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Container
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
_IDS = {f"key_{role}": role for role in Role}


def authorization(role: Role = Role.USER) -> dict[str, str]:
    """Return the header of a caller in that role."""
    return {"authorization": f"Bearer {KEYS[role]}"}


def knows_keys(handler: Handler, limits: TenantLimits, revoked: Container[Role] = ()) -> Handler:
    """Return an admission that knows ``KEYS``, but those revoked by now, and leaves the rest to ``handler``."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path != "/internal/keys/resolve":
            return await handler(request)
        asked = KeyLookup.model_validate_json(await request.read())
        role = _HASHES.get(asked.key_sha256 or "") or _IDS.get(asked.key_id or "")
        if role is None or role in revoked:
            return web.json_response(
                {"type": "x", "title": "x", "status": 404, "detail": "x", "code": "not_found"}, status=404
            )
        identity = Identity(tenant_id=f"of-{role}", role=role, key_id=f"key_{role}")
        return web.Response(body=ResolvedKey(identity=identity, limits=limits).model_dump_json())

    return answer


@asynccontextmanager
async def a_gateway(
    handler: Handler,
    *,
    limits: TenantLimits | None = None,
    telemetry_is_up: bool = True,
    revoked: Container[Role] = (),
    **settings: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a gateway whose admission and telemetry answer by ``handler``; the other services are away."""
    ports = Ports()
    async with AsyncExitStack() as stack:
        away = "http://127.0.0.1:1"  # a port found free might be given to a peer the next moment
        admission = await stack.enter_async_context(a_peer(knows_keys(handler, limits or TenantLimits(), revoked)))
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
