"""Tokens are the servers' own counts for every answer: usage is asked for, and hidden from who did not ask."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.contracts.routing import RequestUsage
from services.router.streams import Footprint, StreamReader
from tests.gateway.peer import a_peer
from tests.router.conftest import Stage
from tests.support.routers import MODEL, OPERATOR, Running, a_routed_server, chat

FOOTPRINT = Footprint(7.2, 0.25, "here")
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 1_234, "completion_tokens": 30, "total_tokens": 1_264}


def sse(document: Any) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def words(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **more}


class Served:
    """A model server that sends several tokens in an event, as with speculative decoding."""

    def __init__(self, *, refuses: str = "", ignores: bool = False, in_last_chunk: bool = False) -> None:
        self.refuses, self.ignores, self.in_last_chunk = refuses, ignores, in_last_chunk
        self.asked: list[dict[str, Any]] = []
        self.encoding = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        asked = await request.json()
        self.asked.append(asked)
        options = asked.get("stream_options")
        if options is not None and self.refuses:
            return web.json_response({"error": {"message": self.refuses}}, status=int(self.refuses[:3]))
        if asked.get("prompt") == "too long":
            return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)
        states = bool(options and options.get("include_usage")) and not self.ignores
        null = {"usage": None} if states else {}
        events = [words("ten of them ", **null), words("and ten ", **null), words("and ten", **null)]
        if states and self.in_last_chunk:
            events[-1]["usage"] = USAGE
        elif states:
            events.append({"id": "c", "choices": [], "usage": USAGE})
        whole = b"".join(map(sse, events)) + DONE
        headers = {"content-type": "text/event-stream", "x-accel-buffering": "yes"}
        if self.encoding:
            return web.Response(body=gzip.compress(whole), headers={**headers, "content-encoding": self.encoding})
        return web.Response(body=whole, headers=headers)


async def usages(router: Running, stage: Stage) -> list[RequestUsage]:
    await router.router.usage.send(time.time() + 120, all_windows=True)
    return [usage for report in stage.plane.usage for usage in report.usages]


def counted(found: list[RequestUsage]) -> tuple[int, int, int, int]:
    return tuple(  # pyright: ignore[reportReturnType]
        sum(getattr(each, name) for each in found)
        for name in ("requests", "input_tokens", "output_tokens", "estimated_requests")
    )


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]


@pytest.mark.parametrize("in_last_chunk", [False, True])
@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_a_stream_counts_as_its_server_says_whatever_the_client_asked(
    router: Running, stage: Stage, options: dict[str, Any], in_last_chunk: bool
) -> None:
    server = Served(in_last_chunk=in_last_chunk)
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        answer = await router.ask(json=chat(stream=True, big=2**63, **options))

    assert server.asked[0]["stream_options"] == {"include_usage": True}
    assert server.asked[0]["big"] == 2**63
    assert "usage" not in answer.text, "the client did not ask"
    assert [each["choices"][0]["delta"]["content"] for each in documents(answer.text)] == [
        *("ten of them ", "and ten ", "and ten")
    ]
    assert counted(await usages(router, stage)) == (1, 1_234, 30, 0)


async def test_who_asks_for_usage_gets_all_of_it(router: Running, stage: Stage) -> None:
    server = Served()
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        answer = await router.ask(json=chat(stream=True, stream_options={"include_usage": True}))

    found = documents(answer.text)
    assert [each["usage"] for each in found] == [None, None, None, USAGE]
    assert "gco2" in found[-1]["wattshift"]
    assert counted(await usages(router, stage)) == (1, 1_234, 30, 0)


@pytest.mark.parametrize("refusal", ["400 Unrecognized request argument supplied: stream_options", "422 extra field"])
async def test_a_server_that_refuses_to_state_usage_is_remembered_and_its_tokens_are_estimates(
    router: Running, stage: Stage, refusal: str
) -> None:
    server = Served(refuses=refusal)
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        answers = [await router.ask(json=chat(stream=True)) for _ in range(3)]
        refused = await router.ask(json=chat(stream=True, stream_options={"include_usage": True}))

    assert [answer.status_code for answer in answers] == [200] * 3
    assert ["stream_options" in asked for asked in server.asked] == [True, False, False, False, True]
    assert refused.status_code == int(refusal[:3]), "what the client itself asked for is its own to mend"
    assert counted(await usages(router, stage))[2:] == (9, 3)
    lines = (await router.http.get("/metrics", headers=OPERATOR)).text.splitlines()
    label = f'{{model="{MODEL}",request_class=""}}'
    assert f"wattshift_router_estimated_tokens_requests_total{label} 3" in lines


async def test_a_refusal_of_the_request_itself_is_the_servers_own_and_nothing_is_remembered(
    router: Running, stage: Stage
) -> None:
    server = Served()
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        asked = {"model": MODEL, "prompt": "too long", "stream": True}
        refused = await router.ask("/v1/completions", json=asked)
        await router.ask(json=chat(stream=True))

    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "the prompt is too long")
    assert server.asked[1] == asked, "the client is told what its own words met"
    assert "stream_options" in server.asked[2]


async def test_a_server_that_states_no_usage_has_its_events_counted_as_an_estimate(
    router: Running, stage: Stage
) -> None:
    async with a_peer(Served(ignores=True).answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        await router.ask(json=chat(stream=True))
    assert counted(await usages(router, stage))[2:] == (3, 1)


@pytest.mark.parametrize("body", [b'{"choices": []}', b'{"choices": [], "usage": {"completion_tokens": 7}}'])
async def test_a_whole_answer_without_both_counts_is_an_estimate(router: Running, stage: Stage, body: bytes) -> None:
    stage.one.body = body
    await router.ask()
    stage.one.body = None
    await router.ask()
    await router.ask("/v1/embeddings", json={"model": MODEL, "input": "Hello"})
    assert counted(await usages(router, stage))[0::3] == (3, 1)


@pytest.mark.parametrize("encoding", ["gzip", "x-unknown"])
async def test_a_stream_with_an_encoding_of_its_own_is_appended_to_by_nothing(
    router: Running, stage: Stage, encoding: str
) -> None:
    server = Served()
    server.encoding = encoding
    async with a_peer(server.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        raw = b""
        async with router.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
            async for piece in answer.aiter_raw():
                raw += piece
    assert answer.headers["content-encoding"] == encoding
    assert gzip.decompress(raw).endswith(DONE)
    assert counted(await usages(router, stage))[3] == 1


async def test_proxies_are_told_to_buffer_no_stream(router: Running, stage: Stage) -> None:
    async with a_peer(Served().answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url)]
        await router.adopted()
        answer = await router.ask(json=chat(stream=True))
    assert answer.headers.get_list("x-accel-buffering") == ["no"]


async def test_the_comment_can_be_left_out_by_a_client_or_for_all(stage: Stage) -> None:
    async with stage.router() as router:
        await router.adopted()
        with_it = await router.ask(json=chat(stream=True))
        without = await router.ask(json=chat(stream=True), headers={"x-wattshift-comment": "off"})
    async with stage.router(stream_comment=False) as router:
        await router.adopted()
        nobodys = await router.ask(json=chat(stream=True))
        asked = await router.ask(json=chat(stream=True, stream_options={"include_usage": True}))
    assert "\n: x-wattshift-gco2=" in with_it.text
    for each in (without, nobodys, asked):
        assert not any(line.startswith(":") for line in each.text.split("\n"))
        assert each.text.endswith("data: [DONE]\n\n")
    assert "gco2" in documents(asked.text)[-1]["wattshift"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [',"usage":null', '"usage": null,', "\\", '\\","usage":null,"', "data: [DONE]", '{"usage": {}}']
)


@given(st.lists(TEXT, max_size=5), st.booleans(), st.booleans(), st.lists(st.integers(1, 60), max_size=20))
def test_what_hides_usage_changes_nothing_else(texts: list[str], is_tight: bool, last: bool, cuts: list[int]) -> None:
    separators = (",", ":") if is_tight else (", ", ": ")

    def dumped(document: Any) -> bytes:
        return b"data: " + json.dumps(document, separators=separators).encode() + b"\n\n"

    plain = b"".join(dumped(words(text)) for text in texts)
    stated = [words(text, usage=None) for text in texts]
    stated += [words("", usage=USAGE)] if last else [{"id": "c", "choices": [], "usage": USAGE}]
    whole, pieces = b"".join(map(dumped, stated)) + DONE, []
    for cut in cuts:
        pieces.append(whole[:cut])
        whole = whole[cut:]
    reader = StreamReader(lambda: FOOTPRINT, wants_usage=False, hides_usage=True, has_comment=False)
    out = b"".join([*(reader.feed(piece) for piece in [*pieces, whole] if piece), reader.close()])

    shown = [json.loads(event[6:]) for event in out.split(b"\n\n") if event.startswith(b"data: {")]
    assert shown == [*(words(text) for text in texts), *([words("")] if last else [])]
    assert out.startswith(plain)
    assert out.endswith(DONE)
    assert (reader.input_tokens, reader.output_tokens) == (1_234, 30)


def test_an_error_within_a_stream_is_no_success() -> None:
    for event, has_failed in (
        (b'data: {"error": {"message": "CUDA error"}}', True),
        (b'data: {"choices": [{"delta": {"content": "\\"error\\""}}]}', False),
        (b'data: {"choices": [{"delta": {}}], "error": null}', False),
    ):
        reader = StreamReader(lambda: Footprint(None, None, "here"), wants_usage=False)
        assert reader.feed(event + b"\n\n") == event + b"\n\n"
        assert reader.has_failed is has_failed


@pytest.mark.parametrize("waits", [False, True], ids=["at the server", "in the queue"])
async def test_a_client_that_leaves_before_a_whole_answer_is_counted_as_one_that_left(
    router: Running, stage: Stage, waits: bool
) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=1)]
    await router.adopted()
    stage.one.gate = asyncio.Event()
    first = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    leaving = asyncio.create_task(router.ask()) if waits else first
    lanes = router.router.lanes
    await stage.one.until(lambda: sum(len(lane.queue) for lane in lanes.all()) == waits)
    leaving.cancel()
    await stage.one.until(lambda: bool(router.router.metrics.requests.values))
    assert {labels[2] for labels in router.router.metrics.requests.values} == {"499"}
    stage.one.gate.set()
    if waits:
        assert (await first).status_code == 200
    await router.router.usage.send(all_windows=True)
    told = [usage for report in stage.plane.usage for usage in report.usages]
    assert [usage.requests for usage in told] == [1], "who left the queue used nothing"
    assert told[0].share_s > 0


@pytest.mark.parametrize("body", [b"", b"<html>Hello</html>", b'{"choices": [', b"[1]", b"{" + b"x" * 300_000])
async def test_a_good_answer_that_is_no_json_is_a_failure_of_its_server_and_teaches_nothing(
    router: Running, stage: Stage, body: bytes
) -> None:
    stage.one.body = body
    answer = await router.ask()
    assert (answer.status_code, answer.content) == (200, body)
    assert {labels[2] for labels in router.router.metrics.requests.values} == {"502"}
    assert router.router.fleet.servers["instance_1"].breaker.failures == 1
    assert router.router.expectations.lengths.predict([MODEL]).answers == 0


async def test_a_client_that_leaves_a_stream_is_counted_as_one_that_left(router: Running, stage: Stage) -> None:
    stage.one.stream_gate = asyncio.Event()
    async with router.http.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as answer:
        await anext(answer.aiter_bytes())
    await stage.one.until(lambda: stage.one.held == 0)
    counted = router.router.metrics.requests.values
    assert {labels[2] for labels in counted} == {"499"}
