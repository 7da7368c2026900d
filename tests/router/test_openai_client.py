"""OpenAI's own client against the router: what users run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI

from tests.router.conftest import Stage
from tests.support.routers import MODEL, Running, a_key

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
