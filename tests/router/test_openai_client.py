"""OpenAI's own client against the router: what users run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from openai.types.responses import Response

from services.contracts.identity import KeyLimits
from services.router.stored_answers import own_id
from tests.gateway.peer import a_peer
from tests.router.conftest import Stage
from tests.router.test_kinds import OWN, event
from tests.support.routers import MODEL, Running, a_key, a_routed_pool, a_routed_server

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def client(router: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=a_key(), max_retries=0) as made:
        yield made


async def test_chat(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    answer = raw.parse()
    assert answer.choices[0].message.content == "one " * 5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert float(raw.headers["x-wattshift-gco2"]) > 0
    assert raw.headers["x-wattshift-location"] == "here"


async def test_streaming_with_and_without_usage(client: AsyncOpenAI) -> None:
    words = []
    async for chunk in await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True):
        words.append(chunk.choices[0].delta.content)
    assert words == [f"one{index} " for index in range(5)]
    last = None
    options = {"include_usage": True}
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, stream_options=options)
    async for chunk in stream:
        last = chunk
    assert last is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert set(last.model_extra["wattshift"]) == {"gco2", "wh", "location"}


async def test_tool_calls(client: AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, tools=[tool])
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("weather", '{"city": "Berlin"}')


async def test_completions_embeddings_and_models(client: AsyncOpenAI) -> None:
    assert (await client.completions.create(model=MODEL, prompt="Hello")).choices[0].text == "one "
    embedded = await client.embeddings.create(model=MODEL, input="Hello", encoding_format="float")
    assert embedded.data[0].embedding == [0.1, 0.2]
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "acme"


def a_response(server: str, number: int, events: bool = False, previous: str | None = None) -> bytes | list[bytes]:
    """Return what a server answers to ``/v1/responses``, whole or as events."""
    text = {"type": "output_text", "text": f"{server} 1", "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": 11, "output_tokens": 3, "total_tokens": 14}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    said = {"id": f"resp_{server}_{number}", "object": "response", "created_at": 1, "model": OWN, "output": [message]}
    said |= {"status": "completed", "usage": usage, "previous_response_id": previous, "tools": [], "error": None}
    if not events:
        return json.dumps(said).encode()
    at = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    said_so_far = {
        "response.created": {"response": {**said, "output": [], "usage": None}},
        "response.output_item.added": {"output_index": 0, "item": {**message, "content": []}},
        "response.content_part.added": {**at, "part": {**text, "text": ""}},
        "response.output_text.delta": {**at, "delta": f"{server} 1", "logprobs": []},
        "response.completed": {"response": said},
    }
    return [event(name, sequence_number=n, **more) for n, (name, more) in enumerate(said_so_far.items())]


class Responses:
    """A server that stores its answers and continues no others, as vLLM does."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[tuple[str, dict[str, Any]]]()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        previous = asked.get("previous_response_id")
        self.asked.append((self.name, asked))
        if previous is not None and previous not in {f"resp_{self.name}_{number}" for number in range(1, 30)}:
            return web.json_response({"error": {"message": f"no {previous}", "code": "not_found"}}, status=404)
        body = a_response(self.name, len(self.asked), asked.get("stream", False), previous)
        if isinstance(body, bytes):
            return web.Response(body=body, content_type="application/json")
        return web.Response(body=b"".join(body), content_type="text/event-stream")


@pytest.fixture
async def storing(stage: Stage, router: Running) -> AsyncIterator[list[Responses]]:
    """Two servers for which nothing speaks but what they have, with room for one request each."""
    servers = [Responses("one"), Responses("two")]
    async with a_peer(servers[0].answer) as one, a_peer(servers[1].answer) as two:
        known = {"upstream_model": OWN, "capacity": 1}
        stage.plane.servers = [
            a_routed_server(stage.one, url=one, **known),
            a_routed_server(stage.one, "instance_2", url=two, **known),
        ]
        await router.adopted()
        yield servers


async def test_responses_whole_and_as_a_stream(client: AsyncOpenAI, storing: list[Responses]) -> None:
    whole = await client.responses.create(model=MODEL, input="Hello", instructions="Be brief.")
    assert whole.output_text in ("one 1", "two 1")
    assert (whole.model, whole.usage and whole.usage.output_tokens) == (MODEL, 3)
    texts, last = list[str](), None
    async for each in await client.responses.create(model=MODEL, input="Hello", stream=True):
        if each.type == "response.output_text.delta":
            texts.append(each.delta)
        last = each
    assert texts in (["one 1"], ["two 1"])
    assert last is not None
    assert last.type == "response.completed"
    assert last.response.model == MODEL


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_continues_a_stored_answer_reaches_the_server_that_has_it(
    client: AsyncOpenAI, storing: list[Responses], is_stream: bool
) -> None:
    async def ask(previous: str | None = None) -> Response:
        more = {} if previous is None else {"previous_response_id": previous}
        if not is_stream:
            return await client.responses.create(model=MODEL, input="Hello", **more)
        async with client.responses.stream(model=MODEL, input="Hello", **more) as stream:
            return await stream.get_final_response()

    first = await asyncio.gather(*(ask() for _ in range(6)))
    assert {each.output_text for each in first} == {"one 1", "two 1"}
    for each in first:
        second = await ask(each.id)
        assert (second.output_text, second.previous_response_id) == (each.output_text, each.id)
        third = await ask(second.id)
        assert third.output_text == each.output_text


@pytest.mark.parametrize("path", ["responses", "responses/compact"])
async def test_an_answer_is_continued_by_nobody_else_and_not_once_its_server_is_gone(
    client: AsyncOpenAI, router: Running, stage: Stage, storing: list[Responses], path: str
) -> None:
    stage.plane.pools[0] = stage.plane.pools[0].model_copy(update={"tenants": ["*"]})
    stage.plane.servers = [each.model_copy(update={"tenants": ["*"]}) for each in stage.plane.servers]
    await router.adopted()
    other = client.with_options(api_key=a_key("umbra"))
    ours, theirs = [await each.responses.create(model=MODEL, input="Hello") for each in (client, other)]
    sent = len(asked := [*storing[0].asked, *storing[1].asked])

    async def is_unknown(who: AsyncOpenAI, previous: object) -> None:
        with pytest.raises(openai.NotFoundError) as missing:
            await who.post(path, cast_to=object, body={"model": MODEL, "previous_response_id": previous})
        assert (missing.value.code, missing.value.param) == ("previous_response_not_found", "previous_response_id")

    own, mark = own_id(ours.id), theirs.id.removeprefix(own_id(theirs.id))
    for given in (ours.id, own, own + mark, ours.id[:-1], ours.id + ours.id, "resp_never-s00000000", "", [own], 1):
        await is_unknown(other, given)
    await is_unknown(client, own)
    del stage.plane.servers[0 if ours.output_text == "one 1" else 1]
    await router.adopted()
    await is_unknown(client, ours.id)
    assert sent == len(asked) == 2, "no server was asked"
    assert len([*storing[0].asked, *storing[1].asked]) == sent


async def test_an_answer_that_a_fallback_gave_is_continued_there(
    client: AsyncOpenAI, router: Running, stage: Stage, storing: list[Responses]
) -> None:
    (pool,), servers = stage.plane.pools, stage.plane.servers
    stage.plane.pools = [pool.model_copy(update={"fallback": ["spare"]}), a_routed_pool("spare", models=["spare"])]
    stage.plane.servers = [servers[1].model_copy(update={"pool": "spare"})]
    await router.adopted()
    first = await client.responses.create(model=MODEL, input="Hello")
    stage.plane.servers = [servers[0], *stage.plane.servers]
    await router.adopted()
    second = await client.responses.create(model=MODEL, input="Hello", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("two 1", "two 1")


async def test_too_many_requests_are_the_clients_own_kind(client: AsyncOpenAI, stage: Stage) -> None:
    stage.plane.key_limits = KeyLimits(requests_per_min=1)
    await client.chat.completions.create(model=MODEL, messages=HELLO)
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) > 0


async def test_errors_are_the_clients_own_kinds(router: Running, stage: Stage, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no-such-model", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(model=MODEL, messages=HELLO)
    stage.one.status, stage.one.body = 400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert refused.value.code == "context_length_exceeded"
    stage.plane.servers = []
    await router.adopted()
    with pytest.raises(openai.InternalServerError) as absent:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert absent.value.status_code == 503


async def test_a_stream_that_breaks_off_is_an_error_to_the_client(stage: Stage, client: AsyncOpenAI) -> None:
    stage.one.dies_after = 2
    stream = aiter(await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))
    words = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    with pytest.raises(openai.APIError, match="broke off"):
        await anext(stream)
    assert words == ["one0 ", "one1 "]


async def test_cancelling_reaches_the_server(stage: Stage, client: AsyncOpenAI) -> None:
    stage.one.stream_gate = asyncio.Event()
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    assert (await anext(aiter(stream))).choices[0].delta.content == "one0 "
    await stream.close()
    await stage.one.until(lambda: stage.one.cancelled == 1)
