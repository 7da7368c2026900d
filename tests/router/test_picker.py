"""The endpoint picker, asked as Envoy asks it, in front of servers to which the gateway carries requests itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.kit.self_signed import new_certificate
from services.router.picking.picker import OVER
from services.router.picking.protocol import Said
from tests.support.gateways import Gateway, GatewayError, a_gateway
from tests.support.routers import (
    MODEL,
    ModelServer,
    Running,
    a_key,
    a_plane,
    a_routed_pool,
    a_routed_server,
    a_router,
    chat,
    model_servers,
)

JSON = {"content-type": "application/json"}
BEARER = {"authorization": f"Bearer {a_key()}", **JSON}


@asynccontextmanager
async def picking(
    redis_url: str, folder: Path, *names: str, **settings: Any
) -> AsyncIterator[tuple[Running, Gateway, list[ModelServer]]]:
    async with a_plane() as (plane, plane_url), model_servers(*names) as servers:
        plane.pools = [a_routed_pool()]
        plane.servers = [
            a_routed_server(each, each.name, gco2_per_kwh=100.0 * (at + 1)) for at, each in enumerate(servers)
        ]
        async with a_router(plane, plane_url, redis_url, folder, picker_port=0, **settings) as running:
            await running.adopted()
            async with a_gateway(running.router.picker_port) as gateway:
                yield running, gateway, servers


def body(**more: Any) -> bytes:
    return json.dumps(chat(**more)).encode()


def authority(server: ModelServer) -> str:
    return server.url.removeprefix("http://")


async def test_a_request_goes_to_the_cleanest_server_and_its_answer_comes_back(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "clean", "dirty") as (running, gateway, (clean, dirty)):
        answer = await gateway.ask(body(), BEARER)
        assert (answer.status, answer.is_of_picker) == (200, False)
        assert answer.server == answer.metadata == authority(clean)
        assert "authorization" not in answer.seen, "no server may see a client's key"
        found = json.loads(answer.content)
        assert found["model"] == MODEL
        assert found["an_unknown_field"] == {"kept": True}
        assert float(answer.headers["x-wattshift-gco2"]) > 0
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert (len(clean.seen), len(dirty.seen)) == (1, 0)
        await running.router.usage.send(all_windows=True)
    (report,) = running.plane.usage
    (usage,) = report.usages
    assert (usage.tenant_id, usage.requests, usage.input_tokens, usage.output_tokens) == ("acme", 1, 11, 5)


async def test_a_stream_passes_as_it_comes_and_states_what_it_emitted(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, (server,)):
        server.stream_gate = asyncio.Event()
        asking = asyncio.create_task(gateway.ask(body(stream=True), BEARER))
        await server.until(lambda: server.held == 1)
        assert json.loads(server.seen[0])["stream_options"] == {"include_usage": True}
        assert running.router.fleet.servers["one"].held == 1, "its place is kept while its answer passes"
        server.stream_gate.set()
        answer = await asking
        assert answer.content.count(b"data: {") == 5, "the usage that its client did not ask for is not in it"
        assert b": x-wattshift-gco2=" in answer.content
        assert "content-length" not in answer.headers
        assert running.router.fleet.servers["one"].held == 0
        await running.router.usage.send(all_windows=True)
    assert running.plane.usage[0].usages[0].output_tokens == 5


async def test_load_moves_requests_on_and_every_place_is_given_back(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "a", "b") as (running, gateway, servers):
        running.plane.servers = [each.model_copy(update={"capacity": 2}) for each in running.plane.servers]
        await running.adopted()
        servers[0].gate = servers[1].gate = asyncio.Event()
        asking = [asyncio.create_task(gateway.ask(body(), BEARER)) for _ in range(5)]
        await servers[1].until(lambda: servers[1].held == 2)
        assert [each.held for each in servers] == [2, 2]
        servers[0].gate.set()
        answers = await asyncio.gather(*asking)
        assert [each.status for each in answers] == [200] * 5
        assert all(each.held == 0 for each in running.router.fleet.servers.values())
        assert not running.router.gate.in_flight


async def test_only_servers_that_the_gateway_reaches_are_picked(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "clean", "dirty") as (_, gateway, (_, dirty)):
        answer = await gateway.ask(body(), BEARER, subset=[authority(dirty), "10.0.0.1:8000"])
        assert answer.server == authority(dirty)
        refused = await gateway.ask(body(), BEARER, subset=["10.0.0.1:8000"])
        assert (refused.status, refused.is_of_picker) == (503, True)
        assert json.loads(refused.content)["error"]["code"] == "no_server"


async def test_refusals_are_those_of_the_router(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, (server,)):
        unknown = await gateway.ask(body(), {})
        assert (unknown.status, unknown.headers["www-authenticate"]) == (401, "Bearer")
        for no_request in (b"{", b""):
            broken = await gateway.ask(no_request, BEARER)
            assert (broken.status, json.loads(broken.content)["error"]["code"]) == (400, "invalid_json")
        missing = await gateway.ask(json.dumps(chat() | {"model": "none"}).encode(), BEARER)
        assert missing.status == 404
        models = await gateway.ask(b"", BEARER, path="/v1/models", method="GET")
        assert [each["id"] for each in json.loads(models.content)["data"]] == [MODEL]
        assert "content-length" not in models.headers, "the gateway states it"
        large = await gateway.ask(b" " * (running.router.settings.max_body_bytes + 1), BEARER)
        assert large.status == 413
        assert server.seen == []


async def test_a_request_without_a_key_counts_as_the_gateway_s(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text(a_key("umbra") + "\n")
    async with picking(redis_url, tmp_path, "one", picker_key_file=key) as (running, gateway, _):
        running.plane.pools = [a_routed_pool(tenant_id="umbra")]
        running.plane.servers = [each.model_copy(update={"tenant_id": "umbra"}) for each in running.plane.servers]
        await running.adopted()
        assert (await gateway.ask(body(), JSON)).status == 200
        assert (await gateway.ask(body(), BEARER)).status == 404, "a key of its own counts, and is no other tenant's"
        reads: list[Path] = []
        read = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or read(path))
        for _ in range(3):
            assert (await gateway.ask(body(), JSON)).status == 200
        assert key not in reads, "it has not changed"
        replaced = tmp_path / "replaced"
        replaced.write_text("ws_" + "x" * (key.stat().st_size - 4) + "\n")  # as long, and renamed into place
        replaced.rename(key)
        assert (await gateway.ask(body(), JSON)).status == 401
        key.write_text(a_key("umbra") + "\n")
        assert (await gateway.ask(body(), JSON)).status == 200
        key.unlink()
        assert (await gateway.ask(body(), JSON)).status == 401


async def test_a_long_body_and_its_trailers_pass_in_pieces(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (_, gateway, (server,)):
        text = "word " * 60_000
        server.tokens = 50_000
        answer = await gateway.ask(body(text=text), BEARER, has_trailers=True)
        assert json.loads(server.seen[0])["messages"][0]["content"] == text
        assert json.loads(answer.content)["choices"][0]["message"]["content"] == "one " * 50_000


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_server_that_refuses_is_noted_and_nobody_else_is_asked(
    redis_url: str, tmp_path: Path, status: int
) -> None:
    async with picking(redis_url, tmp_path, "clean", "dirty") as (running, gateway, (clean, dirty)):
        clean.status, clean.body = status, b'{"error": {"message": "No."}}'
        answer = await gateway.ask(body(stream=True), BEARER)
        assert answer.status == status
        assert "error" in json.loads(answer.content)
        assert (len(clean.seen), len(dirty.seen)) == (1, 0), "the gateway has sent it, and sends it nowhere else"
        assert running.router.fleet.servers["clean"].held == 0


async def test_a_server_that_fails_again_and_again_is_picked_no_more(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "clean", "dirty") as (_, gateway, (clean, dirty)):
        clean.status = 503
        statuses = [(await gateway.ask(body(), BEARER)).status for _ in range(4)]
        assert statuses == [503, 503, 503, 200]
        assert (len(clean.seen), len(dirty.seen)) == (3, 1)


async def test_until_the_gateway_was_told_a_server_another_may_be_picked(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "locked", "open") as (running, gateway, (locked, _)):
        without_key = {"pool": None, "models": [MODEL], "upstream_key": "missing"}
        first, second = running.plane.servers
        first = a_routed_server(locked, "locked", gco2_per_kwh=100.0, **without_key)
        running.plane.servers = [first, second]
        await running.adopted()
        answer = await gateway.ask(body(), BEARER)
        assert (answer.status, answer.server) == (200, second.url.removeprefix("http://"))
        running.plane.servers = [first]
        await running.adopted()
        refused = await gateway.ask(body(), BEARER)
        assert (refused.status, refused.is_of_picker) == (502, True), "it is answered, and not left alone"
        assert locked.seen == []


async def test_certificates_are_replaced_while_it_runs(redis_url: str, tmp_path: Path) -> None:
    old, new = new_certificate("localhost"), new_certificate("localhost")
    both = tmp_path / "both.pem"
    both.write_text(old)
    async with picking(redis_url, tmp_path, "one", tls_cert=both, tls_key=both) as (running, _, _):
        port = running.router.picker_port
        for written, known in ((old, old), (new, new), ("half of a ", new)):
            both.write_text(written)
            async with a_gateway(port, known.encode()) as gateway:
                assert (await gateway.ask(body(), BEARER)).status == 200


async def test_over_tls_only_who_knows_the_certificate_is_served(redis_url: str, tmp_path: Path) -> None:
    pem = new_certificate("localhost")
    (tmp_path / "both.pem").write_text(pem)
    both = tmp_path / "both.pem"
    async with picking(redis_url, tmp_path, "one", tls_cert=both, tls_key=both) as (running, gateway, _):
        with pytest.raises((GatewayError, grpc.aio.AioRpcError)):
            await gateway.ask(body(), BEARER)
        port = running.router.picker_port
        async with a_gateway(port, pem.encode()) as known:
            assert (await known.ask(body(), BEARER)).status == 200


async def test_an_answer_that_breaks_off_ends_with_an_error(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, (server,)):
        server.dies_after = 2
        with pytest.raises(Exception, match="peer closed"):
            await gateway.ask(body(stream=True), BEARER)
        await asyncio.wait_for(_idle(running), 5)
        assert running.router.fleet.servers["one"].held == 0


async def test_a_client_that_leaves_frees_its_place(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, (server,)):
        running.plane.servers = [each.model_copy(update={"capacity": 1}) for each in running.plane.servers]
        await running.adopted()
        server.gate = asyncio.Event()
        served = asyncio.create_task(gateway.ask(body(), BEARER))
        await server.until(lambda: server.held == 1)
        waiting = asyncio.create_task(gateway.ask(body(), BEARER))
        await asyncio.sleep(0.05)
        for each in (waiting, served):
            each.cancel()
        await asyncio.gather(served, waiting, return_exceptions=True)
        await asyncio.wait_for(_idle(running), 5)
        assert running.router.fleet.servers["one"].held == 0
        server.gate = None
        assert (await gateway.ask(body(), BEARER)).status == 200


async def test_a_stream_that_its_gateway_ends_first_ends(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, _):
        begun, asked = Said(), Said()
        for name, value in {":method": "POST", ":path": "/v1/chat/completions", **BEARER}.items():
            begun.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        asked.request_body.body, asked.request_body.end_of_stream = body(), True
        for said, code in (
            ((), grpc.StatusCode.INVALID_ARGUMENT),
            ((begun,), grpc.StatusCode.CANCELLED),  # before its body, and before the server's answer
            ((begun, asked), grpc.StatusCode.CANCELLED),
        ):
            call = gateway._process()
            for each in said:
                await call.write(each)
            await call.done_writing()
            async with asyncio.timeout(5):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await call.read() is not OVER:
                        pass
                assert await call.code() is code
        assert not running.router.gate.in_flight
        assert running.router.fleet.servers["one"].held == 0


async def test_a_router_that_ends_finishes_what_it_picked_and_picks_no_more(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (running, gateway, (server,)):
        server.gate = asyncio.Event()
        asking = asyncio.create_task(gateway.ask(body(), BEARER))
        await server.until(lambda: server.held == 1)
        stop = running.router._stop_picking
        assert stop is not None
        stopping = asyncio.create_task(stop(10))
        await asyncio.sleep(0.1)
        with pytest.raises((GatewayError, grpc.aio.AioRpcError)):
            await gateway.ask(body(), BEARER)
        server.gate.set()
        assert (await asking).status == 200
        await asyncio.wait_for(stopping, 5)


async def test_a_gateway_that_holds_bodies_back_is_told_what_is_needed(redis_url: str, tmp_path: Path) -> None:
    async with picking(redis_url, tmp_path, "one") as (_, gateway, (server,)):
        answer = await gateway.ask(body(), BEARER, mode=2)
        assert answer.status == 500
        assert b"FULL_DUPLEX_STREAMED" in answer.content
        assert server.seen == []


async def _idle(running: Running) -> None:
    running.router.gate.close()
    await running.router.gate.is_empty.wait()
