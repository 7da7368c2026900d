"""Anthropic's own client against the router: what users of its Messages run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam

from tests.gateway.peer import a_peer
from tests.router.conftest import Stage
from tests.router.test_kinds import OWN, Server, event
from tests.router.test_usage_of_streams import counted, usages
from tests.support.routers import MODEL, Running, a_key, a_routed_server

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello"}]
SAID = {"id": "msg_1", "type": "message", "role": "assistant", "model": OWN, "stop_sequence": None}
WHOLE = {
    **SAID,
    "content": [{"type": "text", "text": "one two three"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 11, "output_tokens": 3},
}
STREAM = [
    event(
        "message_start",
        message={**SAID, "content": [], "stop_reason": None, "usage": {"input_tokens": 11, "output_tokens": 0}},
    ),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    *(
        event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        for text in ("one", " two", " three")
    ),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 3}),
    event("message_stop"),
]


@pytest.fixture
async def server(stage: Stage) -> AsyncIterator[Server]:
    answering = Server(b"{}")
    async with a_peer(answering.answer) as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url, upstream_model=OWN)]
        yield answering


@pytest.fixture
async def client(server: Server, router: Running) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=router.url, api_key=a_key(), max_retries=0) as made:
        yield made


async def test_messages(client: AsyncAnthropic, server: Server, router: Running, stage: Stage) -> None:
    server.says(WHOLE)
    raw = await client.messages.with_raw_response.create(model=MODEL, max_tokens=50, system="Be brief.", messages=HELLO)
    answer = await raw.parse()
    assert [block.text for block in answer.content if block.type == "text"] == ["one two three"]
    assert (answer.model, answer.usage.input_tokens, answer.usage.output_tokens) == (MODEL, 11, 3)
    assert float(raw.headers["x-wattshift-gco2"]) > 0
    assert counted(await usages(router, stage)) == (1, 11, 3, 0)


async def test_streaming(client: AsyncAnthropic, server: Server, router: Running, stage: Stage) -> None:
    server.body, server.content_type = STREAM, "text/event-stream"
    async with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
        assert [text async for text in stream.text_stream] == ["one", " two", " three"]
        answer = await stream.get_final_message()
    assert (answer.model, answer.stop_reason, answer.usage.output_tokens) == (MODEL, "end_turn", 3)
    assert counted(await usages(router, stage)) == (1, 11, 3, 0)


async def test_tokens_of_a_prompt_are_counted(client: AsyncAnthropic, server: Server) -> None:
    server.says({"input_tokens": 11})
    assert (await client.messages.count_tokens(model=MODEL, messages=HELLO)).input_tokens == 11


async def test_a_stream_that_breaks_off_is_an_error_to_the_client(client: AsyncAnthropic, server: Server) -> None:
    server.body, server.content_type, server.breaks_off = STREAM[:4], "text/event-stream", True
    async with client.messages.stream(model=MODEL, max_tokens=50, messages=HELLO) as stream:
        texts = aiter(stream.text_stream)
        assert [await anext(texts), await anext(texts)] == ["one", " two"]
        with pytest.raises(anthropic.APIError, match="broke off"):
            await anext(texts)


async def test_errors_are_the_clients_own_kinds(
    client: AsyncAnthropic, server: Server, router: Running, stage: Stage
) -> None:
    server.says(WHOLE)
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="no-such-model", max_tokens=5, messages=HELLO)
    assert isinstance(missing.value.body, dict)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="sk-wrong").messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    stage.plane.key_limits = stage.plane.key_limits.model_copy(update={"requests_per_min": 1})
    other = client.with_options(api_key=a_key("third"))
    stage.plane.servers[0] = stage.plane.servers[0].model_copy(update={"tenants": ["*"]})
    stage.plane.pools[0] = stage.plane.pools[0].model_copy(update={"tenants": ["*"]})
    await router.adopted()
    await other.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await other.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    assert int(limited.value.response.headers["retry-after"]) > 0
    stage.plane.servers = []
    await router.adopted()
    with pytest.raises(anthropic.InternalServerError) as absent:
        await client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
    assert absent.value.status_code == 503
