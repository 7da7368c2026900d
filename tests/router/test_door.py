"""The door: completions of all kinds through the router, and what it says of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from services.contracts.clocks import ClockPolicy, ServerClocks
from services.contracts.identity import Role, TenantLimits
from services.contracts.routing import LatencyReport, ServerLatency
from services.contracts.streams import LATENCY_FIELD, latency_stream
from services.kit.redis import connect
from tests.gateway.peer import a_peer
from tests.router.conftest import Stage, error_of
from tests.support.crowds import known_connections
from tests.support.routers import (
    MODEL,
    Running,
    a_key,
    a_routed_pool,
    a_routed_server,
    chat,
)


async def test_a_completion_passes_unchanged_with_its_footprint(router: Running, stage: Stage) -> None:
    body = b'{ "model": "llama-70b",\n "messages": [{"role":"user","content":"Hi"}], "an_unknown_field": [1.50, 2e3] }'
    answer = await router.ask(content=body, json=None, headers={"content-type": "application/json"})

    assert answer.status_code == 200, answer.text
    assert stage.one.seen == [body]
    assert answer.json()["an_unknown_field"] == {"kept": True}
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.headers["x-wattshift-location"] == "here"
    wh, gco2 = float(answer.headers["x-wattshift-wh"]), float(answer.headers["x-wattshift-gco2"])
    assert gco2 == pytest.approx(wh / 1e3 * 1.2 * 500, rel=1e-4)
    assert 0 < wh < 400 * 20 / 3600


async def test_the_upstream_never_sees_the_clients_key(router: Running, stage: Stage) -> None:
    await router.ask()
    assert "authorization" not in stage.one.headers[0]
    assert not [value for value in stage.one.headers[0].values() if "ws_" in value]


async def test_a_server_gets_the_id_of_a_request_in_the_form_its_client_gave_it(router: Running, stage: Stage) -> None:
    known = ["7D444840-9dc0-11d1-b245-5ffdce74fad2", "order-66", "x" * 128]
    for given in known:
        answer = await router.ask(headers={"x-request-id": given})
        assert answer.headers["x-request-id"] == given
    await router.ask()
    await router.ask(headers={"x-request-id": "x" * 129})
    assert [headers.get("x-request-id") for headers in stage.one.headers] == [*known, None, None]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_server_that_takes_ids_of_one_form_alone_is_asked_without_another(
    router: Running, stage: Stage, is_stream: bool
) -> None:
    uuid, seen = "7d444840-9dc0-11d1-b245-5ffdce74fad2", list[tuple[str | None, bool]]()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        seen.append((given := request.headers.get("x-request-id"), b"include_usage" in body))
        if given == "order-66":
            return web.Response(status=400, text="Invalid UUID in request header X-Request-ID")
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

    async with a_peer(answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        for given in ("order-66", "order-66", uuid):
            answered = await router.ask(headers={"x-request-id": given}, json=chat(stream=is_stream))
            assert (answered.status_code, answered.headers["x-request-id"]) == (200, given)
    assert seen == [("order-66", is_stream), (None, is_stream), (None, is_stream), (uuid, is_stream)]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_completions_and_embeddings_pass_too(router: Running, path: str) -> None:
    field = "prompt" if path == "/v1/completions" else "input"
    answer = await router.ask(path, json={"model": MODEL, field: "Hello"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == MODEL


async def test_a_stream_passes_and_ends_with_a_comment_of_its_footprint(router: Running) -> None:
    answer = await router.ask(json=chat(stream=True))
    events = answer.text.split("\n\n")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-2:] == ["data: [DONE]", ""]
    assert events[-3].startswith(": x-wattshift-gco2=")
    assert events[-3].endswith("x-wattshift-location=here")
    words = [json.loads(event[6:])["choices"][0]["delta"]["content"] for event in events[:-3]]
    assert words == [f"one{index} " for index in range(5)]


async def test_a_stream_that_states_its_usage_states_its_footprint_there(router: Running) -> None:
    answer = await router.ask(json=chat(stream=True, stream_options={"include_usage": True}))
    events = [event for event in answer.text.split("\n\n") if event]
    last = json.loads(events[-2][6:])
    assert last["usage"]["completion_tokens"] == 5
    assert set(last["wattshift"]) == {"gco2", "wh", "location"}
    assert not any(event.startswith(":") for event in events)


async def test_models_are_those_that_the_tenant_may_use(router: Running, stage: Stage) -> None:
    stage.plane.pools = [
        a_routed_pool(),
        a_routed_pool("umbras", tenant_id="umbra", models=["secret"]),
        a_routed_pool("for-all", tenant_id="umbra", models=["common"], tenants=["*"]),
    ]
    await router.adopted()
    listed = (await router.http.get("/v1/models")).json()
    assert [row["id"] for row in listed["data"]] == ["common", MODEL]
    assert (await router.http.get(f"/v1/models/{MODEL}")).json()["owned_by"] == "acme"
    assert error_of(await router.http.get("/v1/models/secret")) == (404, "model_not_found")
    assert error_of(await router.ask(json=chat(model="secret"))) == (404, "model_not_found")
    operator = await router.http.get("/v1/models", headers={"authorization": f"Bearer {a_key('ops', Role.OPERATOR)}"})
    assert [row["id"] for row in operator.json()["data"]] == ["common", MODEL, "secret"]


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_traces_reach_the_server_and_its_limits_the_client(router: Running, stage: Stage, status: int) -> None:
    stage.one.status, stage.one.body = status, b'{"choices": []}'
    stage.one.sends = {"x-ratelimit-remaining-requests": "9", "openai-processing-ms": "3", "set-cookie": "a=b"}
    given = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    answer = await router.ask(headers=given | {"x-other": "stays"})
    assert given.items() <= stage.one.headers[0].items()
    assert "x-other" not in stage.one.headers[0]
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (status, "9")
    assert answer.headers["openai-processing-ms"] == "3"
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"not json", (400, "invalid_json")),
        (b"[1, 2]", (400, "invalid_json")),
        (b'{"messages": []}', (400, "missing_model")),
        (b'{"model": 7}', (400, "missing_model")),
        (b'{"model": "no-such-model"}', (404, "model_not_found")),
        (b'{"model": "llama-70b", "stream": "yes"}', (400, "invalid_value")),
        (b'{"model": "llama-70b", "tools": ' + b"[" * 300 + b"]" * 300 + b"}", (400, "invalid_json")),
        (
            b'{"model": "llama-70b", "messages": ' + b'[{"content": ' * 200 + b"1" + b"}]" * 200 + b"}",
            (400, "invalid_json"),
        ),
    ],
)
async def test_bad_bodies_get_openais_shape_and_reach_no_server(
    router: Running, stage: Stage, body: bytes, expected: tuple[int, str]
) -> None:
    answer = await router.ask(content=body, json=None, headers={"content-type": "application/json"})
    assert error_of(answer) == expected
    assert stage.one.seen == []


async def test_many_messages_are_not_taken_for_deep_ones(router: Running, stage: Stage) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}] * 400
    assert (await router.ask(json={"model": MODEL, "messages": messages})).status_code == 200
    assert len(stage.one.seen) == 1


async def test_keys_types_sizes_and_paths_are_checked(router: Running, stage: Stage) -> None:
    assert error_of(await router.ask(key="ws_" + "n" * 43)) == (401, "invalid_api_key")
    assert error_of(await router.ask(key="sk-somebody-elses")) == (401, "invalid_api_key")
    assert error_of(await router.ask(key=a_key("acme", Role.READ_ONLY))) == (403, "forbidden")
    assert error_of(await router.ask(content=b"{}", json=None)) == (415, "unsupported_media_type")
    assert error_of(await router.ask("/v1/unknown", json={"input": "names no model"})) == (404, "unknown_url")
    assert error_of(await router.http.get("/v1/chat/completions")) == (405, "method_not_allowed")
    assert stage.one.seen == []


async def test_a_body_beyond_the_limit_is_refused(stage: Stage) -> None:
    async with stage.router(max_body_bytes=2_000) as router:
        await router.adopted()
        assert error_of(await router.ask(json=chat("x" * 3_000))) == (413, "body_too_large")
        assert (await router.ask(json=chat("x" * 1_000))).status_code == 200


async def test_a_tenant_beyond_its_rate_is_refused_with_a_time(stage: Stage) -> None:
    stage.plane.limits = TenantLimits(requests_per_s=0.01, burst=1)
    async with stage.router() as router:
        await router.adopted()
        assert (await router.ask()).status_code == 200
        refused = await router.ask()
        assert error_of(refused) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1


async def test_of_a_session_a_server_keeps_no_name_which_may_be_as_long_as_a_body(router: Running) -> None:
    await router.ask(json=chat(user="x" * 1_000_000))
    await router.ask(headers={"x-session-id": "s" * 10_000})
    kept = router.router.fleet.servers["instance_1"].costs._sessions
    assert [type(each) for each in kept] == [int, int]


async def test_what_the_model_server_refuses_passes_unchanged(router: Running, stage: Stage) -> None:
    stage.one.status = 400
    too_long = {"error": {"message": "maximum context length is 8192", "type": "BadRequestError", "param": None}}
    stage.one.body = json.dumps(too_long).encode()
    answer = await router.ask()
    assert (answer.status_code, answer.json()) == (400, too_long)


async def test_a_client_that_leaves_cancels_its_request_upstream(router: Running, stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    asking = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    asking.cancel()
    await stage.one.until(lambda: stage.one.cancelled == 1)
    await stage.one.until(lambda: router.router.fleet.servers["instance_1"].held == 0)
    stage.one.gate = None
    assert (await router.ask()).status_code == 200


async def test_a_client_that_leaves_within_a_stream_cancels_it(router: Running, stage: Stage) -> None:
    stage.one.stream_gate = asyncio.Event()
    async with router.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        assert b"one0" in await anext(answer.aiter_bytes())
    await stage.one.until(lambda: stage.one.cancelled == 1)
    await stage.one.until(lambda: router.router.fleet.servers["instance_1"].held == 0)


async def test_an_unknown_power_is_not_stated_as_zero(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, power_w=None)]
    await router.adopted()
    answer = await router.ask()
    assert "x-wattshift-wh" not in answer.headers
    assert "x-wattshift-gco2" not in answer.headers
    assert answer.headers["x-wattshift-location"] == "here"


async def test_a_key_stays_valid_while_admission_is_away(router: Running, stage: Stage) -> None:
    assert (await router.ask()).status_code == 200
    stage.plane.is_admission_up = False
    assert (await router.ask()).status_code == 200
    assert error_of(await router.ask(key=a_key("third")))[0] == 503


async def test_latencies_go_to_the_stream_of_the_servers_node_each_second(stage: Stage) -> None:
    clocks = ServerClocks(policy=ClockPolicy.MIAD, max_tbt_ms=100)
    node = f"node-{stage.folder.name}"
    stage.plane.servers = [a_routed_server(stage.one, node_id=node, clocks=clocks)]
    redis: Any = connect(stage.redis_url)
    seen: list[ServerLatency] = []
    async with stage.router() as router:
        await router.adopted()
        stage.one.status = 400
        await router.ask(json=chat())
        stage.one.status = 200
        await router.ask(json=chat(stream=True))
        async with asyncio.timeout(20):
            while sum(each.ended for each in seen) < 1:
                reports = await redis.xrange(latency_stream(node))
                found = [LatencyReport.model_validate_json(fields[LATENCY_FIELD]) for _, fields in reports]
                seen = [row for report in found for row in report.servers]
    await redis.aclose()

    assert sum(each.ended for each in seen) == 1, "what is refused is no answer that ended"
    assert sum(each.ended_tokens for each in seen) == 5
    [first] = [each for each in seen if each.first_tokens]
    [last] = [each for each in seen if each.ended]
    assert first.mean_ttft_ms is not None
    assert first.mean_wait_ms is not None
    assert last.mean_e2e_s is not None
    assert first.mean_wait_ms <= first.mean_ttft_ms <= 1e3 * last.mean_e2e_s
    assert first.clocks == clocks


@pytest.mark.parametrize("path", ["/v1/models", "/apps/none", "/status"])
async def test_a_connection_is_known_once_it_has_shown_a_valid_key(router: Running, path: str) -> None:
    await router.http.get(path, headers={"authorization": "Bearer ws_" + "x" * 43})
    assert not known_connections()
    await router.http.get(path)
    assert known_connections() == 1
