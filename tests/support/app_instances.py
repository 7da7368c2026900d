"""Instances of applications that do as the test says, and their rows of the routing table."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from services.contracts.routing import RoutedApp, RoutedAppServer
from tests.gateway.peer import a_peer

APP = "images"
INFER = f"/v2/models/{APP}/infer"


async def until(is_so: Callable[[], bool], within_s: float = 10.0) -> None:
    """Return once something holds."""
    async with asyncio.timeout(within_s):
        while not is_so():  # noqa: ASYNC110 - of what a test waits for, there is no event
            await asyncio.sleep(0.002)


def an_inference(number: int = 0) -> dict[str, Any]:
    return {"id": str(number), "inputs": [{"name": "image", "shape": [1], "datatype": "FP32", "data": [float(number)]}]}


@dataclass
class InstanceServer:
    """An instance.

    Attributes:
        seen: Method, path with query, and body of each request, in order.
        gate: While set and not released, answers wait.
        status: Of its answers.
        dies: Whether it closes connections without an answer.
        cancelled: How many of its clients left before their answer was complete.
    """

    name: str
    url: str = ""
    seen: list[tuple[str, str, bytes]] = field(default_factory=list[tuple[str, str, bytes]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    gate: asyncio.Event | None = None
    status: int = 200
    dies: bool = False
    is_stream: bool = False
    encoding: str = ""
    cancelled: int = 0
    held: int = 0
    most_held: int = 0

    @property
    def numbers(self) -> list[int]:
        """The ids of the inferences that it was asked for, in order."""
        return [int(json.loads(body)["id"]) for _, _, body in self.seen]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.raw_path, body))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.dies:
                assert request.transport is not None
                request.transport.abort()
            if self.is_stream:
                own = {"content-encoding": self.encoding} if self.encoding else {}
                answer = web.StreamResponse(headers={"content-type": "text/event-stream", **own})
                await answer.prepare(request)
                await answer.write(b"data: one\n\ndata: two\n\n")
                return answer
            if request.path.startswith("/v2/") and self.status == 200:
                output = {"name": "label", "shape": [1], "datatype": "BYTES", "data": [self.name]}
                return web.json_response({"model_name": APP, "outputs": [output]})
            own = {"x-own": "kept", "x-wattshift-gco2": "0", "set-cookie": "a=1"}
            return web.Response(status=self.status, body=b"from " + self.name.encode(), headers=own)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.held -= 1


@asynccontextmanager
async def instance_servers(*names: str) -> AsyncIterator[list[InstanceServer]]:
    async with contextlib.AsyncExitStack() as stack:
        found: list[InstanceServer] = []
        for name in names:
            server = InstanceServer(name)
            server.url = await stack.enter_async_context(a_peer(server.answer))
            found.append(server)
        yield found


def a_routed_app(name: str = APP, **more: Any) -> RoutedApp:
    return RoutedApp.model_validate({"name": name, "tenant_id": "acme", "sla_p95_ms": 30.0, **more})


def a_routed_instance(server: InstanceServer, **more: Any) -> RoutedAppServer:
    known = {
        "id": f"instance_{server.name}",
        "app": APP,
        "variant": "b1",
        "accuracy_pct": 79.1,
        "slice": "1g",
        "url": server.url,
        "state": "ready",
        "service_ms": 5.0,
        "busy_w": 100.0,
        "idle_w": 20.0,
        "gco2_per_kwh": 500.0,
        "pue": 1.2,
        "job_id": f"job_{server.name}",
        "node_id": "node-1",
        "location": "here",
    }
    return RoutedAppServer.model_validate({**known, **more})
