"""Batches from end to end: OpenAI's client, a router and serving with its worker, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from openai import AsyncOpenAI
from openai.types import Batch

from services.contracts.identity import NO_KEY_LIMITS, Identity, Role
from services.db.database import connect
from services.serving.app import create_app
from services.serving.settings import ServingSettings
from tests.support.routers import (
    MODEL,
    InThisLoop,
    ModelServer,
    Plane,
    Running,
    a_key,
    a_plane,
    a_router,
    model_servers,
)
from tests.support.tokens import TOKEN, headers_for

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **more}


def written(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@asynccontextmanager
async def serving_at(listening: socket.socket, settings: ServingSettings) -> AsyncIterator[InThisLoop]:
    """Run serving; it ends as a killed process does when ``should_exit`` and ``force_exit`` are set."""
    server = InThisLoop(uvicorn.Config(create_app(settings), log_config=None, timeout_graceful_shutdown=1))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    try:
        yield server
    finally:
        server.should_exit = True
        await running


@dataclass
class BatchWorld:
    """One model server ``one`` at ``clean`` and one at ``dirty``, and clients of two tenants."""

    plane: Plane
    router: Running
    serving_url: str
    settings: ServingSettings
    one: ModelServer
    two: ModelServer
    client: AsyncOpenAI
    stranger: AsyncOpenAI

    async def reset(self) -> None:
        """Have no files and batches, and both model servers as they were."""
        connection = await connect(self.settings.database_url, application_name="test")
        await connection.execute("DELETE FROM batches; DELETE FROM batch_files")
        await connection.close()
        for server, name, location in ((self.one, "one", "clean"), (self.two, "two", "dirty")):
            if server.gate is not None:
                server.gate.set()
            server.status, server.body, server.gate = 200, None, None
            server.seen.clear()
            server.cancelled = 0
            await self.endpoint(name, server, location)
        self.plane.key_limits = NO_KEY_LIMITS
        await self.router.adopted()

    async def endpoint(self, name: str, server: ModelServer, location: str, **more: Any) -> None:
        spec = {"url": server.url, "models": [MODEL], "location": location, "power_w": 400, "capacity": 4, **more}
        operator = Identity(tenant_id="acme", role=Role.OPERATOR, key_id="k")
        async with httpx.AsyncClient() as http:
            headers = headers_for("serving", operator)
            found = await http.put(f"{self.serving_url}/v1/endpoints/{name}", json=spec, headers=headers)
        assert found.status_code < 300, found.text

    async def submit(self, content: bytes, **more: Any) -> Batch:
        file = await self.client.files.create(file=("lines.jsonl", content), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **more
        )

    async def until(self, batch: Batch, is_so: Callable[[Batch], bool] = lambda batch: batch.status in ENDED) -> Batch:
        async with asyncio.timeout(60):
            while not is_so(batch):
                await asyncio.sleep(0.05)
                batch = await self.client.batches.retrieve(batch.id)
        return batch

    async def results(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """Return a file's lines by ``custom_id``, of which there is one each."""
        if file_id is None:
            return {}
        text = (await self.client.files.content(file_id)).text
        found = [json.loads(each) for each in text.splitlines()]
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found)
        return by_id


@asynccontextmanager
async def a_batch_world(database_url: str, redis_url: str, folder: Path, **settings: Any) -> AsyncIterator[BatchWorld]:
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with contextlib.AsyncExitStack() as stack:
        plane, plane_url = await stack.enter_async_context(a_plane())
        one, two = await stack.enter_async_context(model_servers("one", "two"))
        router = await stack.enter_async_context(a_router(plane, plane_url, redis_url, folder, serving_url=url))
        made = ServingSettings.model_validate(
            {
                "service_token": TOKEN,
                "database_url": database_url,
                "router_url": router.url,
                "carbon_url": plane_url,
                "admission_url": plane_url,
                "endpoint_networks": "127.0.0.0/8",
                **settings,
            }
        )
        await stack.enter_async_context(serving_at(listening, made))
        clients = [AsyncOpenAI(base_url=f"{router.url}/v1", api_key=a_key(t), max_retries=0) for t in ("acme", "umbra")]
        for each in clients:
            stack.push_async_callback(each.close)
        world = BatchWorld(plane, router, url, made, one, two, *clients)
        await world.reset()
        yield world
