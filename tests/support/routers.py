"""A router in this process, in front of model servers that do as the test says.

Serving, admission and telemetry are stand-ins too; Redis is real. Keys are `ws_` and the tenant's name filled up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from aiohttp import web

from services.contracts.apps import AppObservations
from services.contracts.identity import NO_KEY_LIMITS, Identity, KeyLimits, ResolvedKey, Role, TenantLimits
from services.contracts.routing import (
    HeldRequests,
    RoutedApp,
    RoutedAppServer,
    RoutedPool,
    RoutedServer,
    RoutingTable,
    UpstreamKey,
    UpstreamKeys,
    UsageReport,
)
from services.contracts.serving import TrafficReport
from services.kit.heads import Server
from services.router.app import Router, listen, server_config
from services.router.settings import RouterSettings
from tests.gateway.peer import a_peer
from tests.support.servers import as_service
from tests.support.services import TOKEN

MODEL = "llama-70b"


def a_key(tenant: str = "acme", role: Role = Role.USER) -> str:
    return "ws_" + f"{tenant}-{role.value}".ljust(43, "x")


OPERATOR = {"authorization": f"Bearer {a_key('ops', Role.OPERATOR)}"}
"""Headers of who may see what routers measure."""


def chat(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **more}


@dataclass
class ModelServer:
    """A model server.

    Attributes:
        url: Where it listens.
        seen: The bodies of the requests for completions it got, as bytes.
        tokens: Of each answer.
        gate: While set and not released, answers wait.
        takes_s: How long an answer takes.
        gap: Between the tokens of a stream: an awaitable made for each.
        status: Of its answers.
        sends: Headers of answers that have ``body`` or another status than 200.
        cancelled: How many of its clients left before their answer was complete.
    """

    url: str = ""
    name: str = "one"
    seen: list[bytes] = field(default_factory=list[bytes])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    tokens: int = 5
    gate: asyncio.Event | None = None
    takes_s: float = 0.0
    stream_gate: asyncio.Event | None = None
    status: int = 200
    body: bytes | None = None
    sends: dict[str, str] = field(default_factory=dict[str, str])
    dies_after: int | None = None
    health: int = 200
    metrics: str = ""
    cancelled: int = 0
    metrics_read: int = 0
    held: int = 0
    most_held: int = 0
    waits_for: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics":
            self.metrics_read += 1
            return web.Response(text=self.metrics)
        content = await request.read()
        self.seen.append(content)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.held += 1
        self.most_held = max(self.most_held, self.held)
        self._change()
        try:
            return await self._complete(request, json.loads(content))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.held -= 1
            self._change()

    def _change(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Return once something holds of it."""
        async with asyncio.timeout(timeout_s):
            while not is_so():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()

    async def _complete(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if self.gate is not None:
            await self.gate.wait()
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        if self.body is not None or self.status != 200:
            body = self.body or b""
            return web.Response(status=self.status, body=body, content_type="application/json", headers=self.sends)
        if request.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
            usage = {"prompt_tokens": 7, "total_tokens": 7}
            return web.json_response({"object": "list", "data": data, "model": asked["model"], "usage": usage})
        if asked.get("stream"):
            return await self._stream(request, asked)
        usage = {"prompt_tokens": 11, "completion_tokens": self.tokens, "total_tokens": 11 + self.tokens}
        message: dict[str, Any] = {"role": "assistant", "content": f"{self.name} " * self.tokens}
        if asked.get("tools"):
            call = {"name": asked["tools"][0]["function"]["name"], "arguments": '{"city": "Berlin"}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            }
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": message} if "chat" in request.path else {"text": f"{self.name} "}
        document = {"id": "c1", "object": "chat.completion", "created": 1, "model": asked["model"]}
        return web.json_response(document | {"choices": [choice], "usage": usage, "an_unknown_field": {"kept": True}})

    async def _stream(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for index in range(self.tokens):
            if self.dies_after is not None and index >= self.dies_after:
                assert request.transport is not None
                request.transport.abort()
                return answer
            if index == 1 and self.stream_gate is not None:
                await self.stream_gate.wait()
            delta = {"index": 0, "delta": {"content": f"{self.name}{index} "}, "finish_reason": None}
            await answer.write(self._event(asked, choices=[delta]))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 11, "completion_tokens": self.tokens, "total_tokens": 11 + self.tokens}
            await answer.write(self._event(asked, choices=[], usage=usage))
        await answer.write(b"data: [DONE]\n\n")
        return answer

    @staticmethod
    def _event(asked: dict[str, Any], **more: Any) -> bytes:
        chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": asked["model"], **more}
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


@dataclass
class Plane:
    """What stands in for the processes beside the router."""

    pools: list[RoutedPool] = field(default_factory=list[RoutedPool])
    servers: list[RoutedServer] = field(default_factory=list[RoutedServer])
    apps: list[RoutedApp] = field(default_factory=list[RoutedApp])
    app_servers: list[RoutedAppServer] = field(default_factory=list[RoutedAppServer])
    is_serving_up: bool = True
    is_admission_up: bool = True
    is_telemetry_up: bool = True
    is_serving_silent: bool = False
    usage_refused: list[int] = field(default_factory=list[int])
    """Statuses with which the next reports of usage are refused."""
    limits: TenantLimits = field(default_factory=lambda: TenantLimits(requests_per_s=100_000, burst=100_000))
    key_limits: KeyLimits = NO_KEY_LIMITS
    project: str | None = None
    excess: str | None = None
    traffic: list[tuple[str, TrafficReport]] = field(default_factory=list[tuple[str, TrafficReport]])
    usage: list[UsageReport] = field(default_factory=list[UsageReport])
    keys: list[UpstreamKey] = field(default_factory=list[UpstreamKey])
    keys_asked: int = 0
    held: list[HeldRequests] = field(default_factory=list[HeldRequests])
    observations: list[AppObservations] = field(default_factory=list[AppObservations])

    @property
    def table(self) -> RoutingTable:
        return RoutingTable(
            made_at=datetime.now(UTC),
            pools=self.pools,
            servers=self.servers,
            apps=self.apps,
            app_servers=self.app_servers,
        )

    async def answer(self, request: web.Request) -> web.Response:
        content = await request.read()
        match request.path.split("/")[1:]:
            case ["internal", "routing"] if self.is_serving_up:
                return web.Response(text=self.table.model_dump_json(), content_type="application/json")
            case ["internal", "routing", "keys"] if self.is_serving_up:
                self.keys_asked += 1
                found = UpstreamKeys(keys=self.keys).model_dump_json()
                return web.Response(text=found, content_type="application/json")
            case ["internal", "routing", "held"] if self.is_serving_up:
                self.held.append(HeldRequests.model_validate_json(content))
                return web.Response(status=204)
            case ["v1", "pools", _, "traffic"] if self.is_serving_silent:
                await asyncio.sleep(3_600)
                return web.Response(status=503)
            case ["v1", "pools", pool, "traffic"] if self.is_serving_up:
                report = TrafficReport.model_validate_json(content)
                self.traffic.append((pool, report))
                return web.json_response({"windows": len(report.windows), "requests": 0})
            case ["internal", "apps", "observations"] if self.is_serving_up:
                self.observations.append(AppObservations.model_validate_json(content))
                return web.Response(status=204)
            case ["internal", "request-usage"] if self.usage_refused:
                status = self.usage_refused.pop(0)
                problem = {"type": "", "title": "", "status": status, "detail": "No.", "code": "invalid_request"}
                return web.json_response(problem, status=status)
            case ["internal", "request-usage"] if self.is_telemetry_up:
                report = UsageReport.model_validate_json(content)
                self.usage.append(report)
                return web.json_response({"usages": len(report.usages)})
            case ["internal", "keys", "resolve"] if self.is_admission_up:
                return self._resolve(json.loads(content))
            case _:
                return web.Response(status=503)

    def _resolve(self, lookup: dict[str, str]) -> web.Response:
        for tenant in ("acme", "umbra", "ops", "third"):
            for role in Role:
                digest = hashlib.sha256(a_key(tenant, role).encode()).hexdigest()
                if lookup in ({"key_sha256": digest}, {"key_id": f"key_{tenant}"}):
                    identity = Identity(tenant_id=tenant, role=role, key_id=f"key_{tenant}", project=self.project)
                    found = ResolvedKey(
                        identity=identity, limits=self.limits, key_limits=self.key_limits, excess=self.excess
                    )
                    return web.Response(text=found.model_dump_json(), content_type="application/json")
        problem = {"type": "", "title": "", "status": 404, "detail": "There is no such key.", "code": "not_found"}
        return web.json_response(problem, status=404)


def a_routed_pool(name: str = "chat", **more: Any) -> RoutedPool:
    return RoutedPool.model_validate({"name": name, "tenant_id": "acme", "models": [MODEL], **more})


def a_routed_server(server: ModelServer, name: str = "instance_1", **more: Any) -> RoutedServer:
    known = {"id": name, "pool": "chat", "url": server.url, "tenant_id": "acme", "location": "here", "state": "ready"}
    power = {"power_w": 400.0, "idle_w": 100.0, "gco2_per_kwh": 500.0, "pue": 1.2, "job_id": f"job_{name}"}
    return RoutedServer.model_validate({**known, **power, **more})


class _ShortSleeps:
    """``asyncio`` for uvicorn, which looks ten times a second whether its connections have ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 20)


class InThisLoop(Server):
    """A server that leaves signals to the tests, and ends as soon as ``should_exit`` is set."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "should_exit" and value:
            self._end()

    async def shutdown(self, sockets: Any = None) -> None:
        uvicorn.server.asyncio = _ShortSleeps()
        try:
            await super().shutdown(sockets)
        finally:
            uvicorn.server.asyncio = asyncio

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@dataclass
class Running:
    """A router that runs.

    Attributes:
        http: A client with the key of a user of ``acme``.
    """

    url: str
    router: Router
    plane: Plane
    http: httpx.AsyncClient

    async def ask(
        self, path: str = "/v1/chat/completions", *, key: str | None = None, **options: Any
    ) -> httpx.Response:
        headers = options.pop("headers", {}) | ({"authorization": f"Bearer {key}"} if key else {})
        options.setdefault("json", chat())
        return await self.http.post(path, headers=headers, **options)

    async def adopted(self) -> None:
        """Have the router take the table as it is now."""
        await self.router.table.look()


@asynccontextmanager
async def a_plane() -> AsyncIterator[tuple[Plane, str]]:
    plane = Plane()
    async with a_peer(plane.answer) as url:
        yield plane, url


@asynccontextmanager
async def model_servers(*names: str) -> AsyncIterator[list[ModelServer]]:
    async with contextlib.AsyncExitStack() as stack:
        found: list[ModelServer] = []
        for name in names:
            server = ModelServer(name=name)
            server.url = await stack.enter_async_context(a_peer(server.answer))
            found.append(server)
        yield found


@asynccontextmanager
async def a_router(
    plane: Plane, plane_url: str, redis_url: str, folder: Path, **settings: Any
) -> AsyncIterator[Running]:
    """Run a router; its loops run as always, but tables are taken when ``Running.adopted`` says so, too."""
    made = RouterSettings.model_validate(
        {
            "service_token": TOKEN,
            "admission_url": plane_url,
            "serving_url": plane_url,
            "telemetry_url": plane_url,
            "redis_url": as_service(redis_url, "router"),
            "data_dir": folder,
            "endpoint_networks": "127.0.0.0/8",
            "table_poll_s": 0.1,
            "drain_s": 1,
            **settings,
        }
    )
    router = Router(made)
    listening = listen("127.0.0.1", 0, shared=False)
    server = InThisLoop(server_config(router))
    running = asyncio.create_task(server.serve(sockets=[listening]))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    headers = {"authorization": f"Bearer {a_key()}"}
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            await server.is_up.wait()
            yield Running(url, router, plane, http)
    finally:
        server.should_exit = True
        await running
