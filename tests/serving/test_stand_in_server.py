"""The stand-in for a model server: OpenAI's shapes, continuous batching, and misbehaving on purpose."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from lab.serving.model_server import LLAMA_70B
from tests.support.app_instances import until

FILE = Path(__file__).parents[2] / "examples" / "pools" / "stand_in_server.py"
CHAT = "/v1/chat/completions"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stand_in_server", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stand_in_server"] = module
    spec.loader.exec_module(module)
    return module


STAND_IN = loaded()
FAST = STAND_IN.Timing(2, prefill_base_s=0.001, prefill_s_per_token=0.0, decode_base_s=0.001, decode_s_per_request=0.0)
SLOW = STAND_IN.Timing(1, prefill_base_s=0.001, prefill_s_per_token=0.0, decode_base_s=60.0, decode_s_per_request=0.0)
"""A token a minute: what it holds stays held for as long as a test takes."""


@asynccontextmanager
async def running(
    server: Any = FAST, engines: list[Any] | None = None, key: str = "", **misbehaviour: Any
) -> AsyncGenerator[TestClient[Any, Any], None]:
    engine = STAND_IN.Engine(server, 0.0, 1.0, None)
    if engines is not None:
        engines.append(engine)
    engine.misbehaviour = STAND_IN.Misbehaviour(**misbehaviour)
    api = STAND_IN.Api(engine, ["stand-in", "other"], context=100, most_tokens=50, service_s=0.0, key=key)
    decode = asyncio.ensure_future(engine.decode())
    async with TestClient(TestServer(api.app(), handler_cancellation=True)) as client:
        yield client
    decode.cancel()


def asked(text: str = "hello", **terms: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **terms}


async def load(client: TestClient[Any, Any]) -> tuple[float, float]:
    """Return the requests that run and wait, as the metrics say."""
    text = await (await client.get("/metrics")).text()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in text.splitlines() if not line.startswith("#")}
    return values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]


def cached(usage: dict[str, Any]) -> int:
    return usage["prompt_tokens_details"]["cached_tokens"]


async def until_load(client: TestClient[Any, Any], wanted: tuple[float, float]) -> None:
    async with asyncio.timeout(20):
        while await load(client) != wanted:
            pass


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    lines = (await response.text()).splitlines()
    return [json.loads(line[6:]) if line != "data: [DONE]" else "done" for line in lines if line]


async def test_a_whole_answer_has_openais_shape_and_its_usage() -> None:
    async with running() as client:
        answer = await (await client.post(CHAT, json=asked(max_tokens=3, model="other"))).json()
        text = await (await client.post("/v1/completions", json={"prompt": "once", "max_tokens": 2})).json()

    assert answer["object"] == "chat.completion"
    assert answer["model"] == "other"
    assert len(answer["choices"][0]["message"]["content"].split()) == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3
    assert text["object"] == "text_completion"
    assert len(text["choices"][0]["text"].split()) == 2


async def test_a_stream_has_a_chunk_for_each_token_and_then_the_usage() -> None:
    async with running() as client:
        wanted = asked(max_tokens=4, stream=True)
        with_usage = await events(await client.post(CHAT, json=wanted | {"stream_options": {"include_usage": True}}))
        without = await events(await client.post(CHAT, json=wanted))

    assert [len(each["choices"]) for each in with_usage[:-1]] == [1, 1, 1, 1, 1, 0]
    assert with_usage[0]["choices"][0]["delta"]["role"] == "assistant"
    assert with_usage[4]["choices"][0] == {"index": 0, "finish_reason": "length", "delta": {}}
    assert with_usage[5]["usage"]["completion_tokens"] == 4
    assert with_usage[-1] == without[-1] == "done"
    assert len(without) == len(with_usage) - 1


async def test_it_asks_for_its_key_where_vllm_does() -> None:
    async with running(key="the key") as client:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer other"}, 401),
            ({"authorization": "Bearer the key"}, 200),
        ):
            assert (await client.get("/v1/models", headers=headers)).status == status
            assert (await client.post(CHAT, json=asked(max_tokens=1), headers=headers)).status == status
        for path in ("/health", "/metrics"):
            assert (await client.get(path)).status == 200


async def test_a_tool_that_must_be_called_is_called() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    async with running() as client:
        whole = await (await client.post(CHAT, json=asked(tools=tools, tool_choice="required"))).json()
        stream = await events(await client.post(CHAT, json=asked(tools=tools, tool_choice="required", stream=True)))

    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert stream[0]["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_embeddings_and_models_are_listed() -> None:
    async with running() as client:
        found = await (await client.post("/v1/embeddings", json={"input": ["a", "b"]})).json()
        models = await (await client.get("/v1/models")).json()

    assert [len(each["embedding"]) for each in found["data"]] == [8, 8]
    assert found["data"][0]["embedding"] != found["data"][1]["embedding"]
    assert [each["id"] for each in models["data"]] == ["stand-in", "other"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, b"{", 400, None),
        (CHAT, b"[]", 400, None),
        (CHAT, b'{"messages": []}', 400, None),
        (CHAT, json.dumps(asked(model="gpt")).encode(), 404, "model_not_found"),
        (CHAT, json.dumps(asked("x" * 900)).encode(), 400, "context_length_exceeded"),
        (CHAT, json.dumps(asked(max_tokens=0)).encode(), 400, None),
        (CHAT, json.dumps(asked(priority="high")).encode(), 400, None),
        ("/v1/completions", b'{"seconds": "long"}', 400, None),
        ("/v1/embeddings", b"{}", 400, None),
        ("/stand-in", b'{"explode": true}', 400, None),
    ],
)
async def test_bad_input_is_refused_in_openais_shape(path: str, body: bytes, status: int, code: str | None) -> None:
    async with running() as client:
        answer = await client.post(path, data=body)
        error = (await answer.json())["error"]

        assert (answer.status, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert await load(client) == (0, 0)


async def test_what_does_not_fit_into_the_batch_waits_by_priority() -> None:
    engines = list[Any]()
    async with running(SLOW, engines) as client:
        held = [asyncio.ensure_future(client.post(CHAT, json=asked("first", max_tokens=9)))]
        await until_load(client, (1, 0))
        for at, priority in enumerate((5, -3, 0)):
            held.append(asyncio.ensure_future(client.post(CHAT, json=asked("later", max_tokens=9, priority=priority))))
            await until_load(client, (1, at + 1))

        assert [priority for priority, *_ in sorted(engines[0].waiting)] == [-3, 0, 5]
        for each in held:
            each.cancel()


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with running(SLOW) as client:
        leaving = asyncio.ensure_future(client.post(CHAT, json=asked(max_tokens=9)))
        await until_load(client, (1, 0))
        waiting = asyncio.ensure_future(client.post(CHAT, json=asked(max_tokens=9, stream=True)))
        await until_load(client, (1, 1))

        leaving.cancel()
        await until_load(client, (1, 0))
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            (await waiting).close()
        await until_load(client, (0, 0))


async def test_two_are_decoded_together() -> None:
    async with running() as client:
        answers = await asyncio.gather(*(client.post(CHAT, json=asked(str(at), max_tokens=20)) for at in range(6)))

        assert [each.status for each in answers] == [200] * 6
        assert await load(client) == (0, 0)


async def test_it_dies_in_the_middle_of_a_stream() -> None:
    async with running(die_after_tokens=2) as client:
        response = await client.post(CHAT, json=asked(max_tokens=9, stream=True))
        with pytest.raises(aiohttp.ClientError):
            await response.read()

        await until_load(client, (0, 0))


async def test_it_lies_fails_and_hangs_on_purpose() -> None:
    async with running(reported_load=77, unhealthy=True) as client:
        assert await load(client) == (77, 0)
        assert (await client.get("/health")).status == 503

        shown = await (await client.post("/stand-in", json={"reported_load": None, "fail_status": 503})).json()
        assert shown["unhealthy"] is True
        assert (await client.post(CHAT, json=asked())).status == 503

        await client.post("/stand-in", json={"fail_status": None, "hang": True})
        hanging = asyncio.ensure_future(client.post(CHAT, json=asked()))
        assert await load(client) == (0, 0)
        assert not hanging.done()
        hanging.cancel()


def test_times_follow_the_clock_in_a_file(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("705\n")
    devices = tmp_path / "devices"
    devices.write_text('{"relative_speed": 0.57, "clock_mhz": 720}')
    unknown = tmp_path / "unknown"
    unknown.write_text('{"relative_speed": 1.0, "clock_mhz": null}')

    async def clocks() -> tuple[float, ...]:
        return (
            STAND_IN.Engine(FAST, 0.0, 1.0, clock).clock_mhz,
            STAND_IN.Engine(FAST, 0.0, 1.0, devices).clock_mhz,
            STAND_IN.Engine(FAST, 0.0, 1.0, unknown).clock_mhz,
            STAND_IN.Engine(FAST, 0.0, 1.0, tmp_path / "missing").clock_mhz,
        )

    assert asyncio.run(clocks()) == (705, 720, 1_410, 1_410)


def test_options_say_the_timing() -> None:
    llama = STAND_IN.server_of(STAND_IN.parsed(["--hardware", "a100-tp4"]))
    plain = STAND_IN.server_of(STAND_IN.parsed(["--slots", "3", "--tbt-ms", "25"]))

    assert llama == STAND_IN.LLAMA_70B["a100-tp4"]
    for name, timing in STAND_IN.LLAMA_70B.items():
        assert asdict(timing).items() <= asdict(LLAMA_70B[name]).items(), "those that the lab fits"
        for clock in (100, 300, 900, 5_000):
            assert timing.slowdown(clock) == LLAMA_70B[name].slowdown(clock)
    assert (plain.capacity, plain.step_s(3, 1_410)) == (3, 0.025)


async def test_what_was_read_before_is_not_read_again() -> None:
    server = STAND_IN.Timing(2, 0.001, 1e-6, 0.001, 0.0)
    text = "wind " * 40
    engines: list[Any] = []
    async with running(server, engines) as client:
        engines[0].cache = STAND_IN.PrefixCache(1_000, STAND_IN.BLOCK_TOKENS)
        first, again, other = [
            (await (await client.post(CHAT, json=asked(each, max_tokens=2))).json())["usage"]
            for each in (text, text + "north", "sun " + text)
        ]
        stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 1}
        streamed = (await events(await client.post(CHAT, json=asked(text, **stream))))[-2]["usage"]
        metrics = await (await client.get("/metrics")).text()

    assert cached(first) == cached(other) == 0
    assert cached(again) == first["prompt_tokens"] // 16 * 16
    assert cached(streamed) == cached(again)
    assert f'vllm:prefix_cache_hits_total{{model_name="stand-in"}} {2.0 * cached(again)}' in metrics


async def test_a_request_waits_for_memory_though_there_is_a_place() -> None:
    engines: list[Any] = []
    async with running(replace(SLOW, capacity=8, kv_tokens=60.0), engines) as client:
        first = asyncio.ensure_future(client.post(CHAT, json=asked(max_tokens=20)))
        await until_load(client, (1, 0))
        second = asyncio.ensure_future(client.post(CHAT, json=asked("h" * 120, max_tokens=20)))
        await until_load(client, (1, 1))
        usage = next(
            line for line in (await (await client.get("/metrics")).text()).splitlines() if "usage_perc{" in line
        )
        assert 0.4 < float(usage.split()[-1]) < 1
        first.cancel()
        await until_load(client, (1, 0))
        second.cancel()
        await until_load(client, (0, 0))


def test_options_limit_memory() -> None:
    assert STAND_IN.server_of(STAND_IN.parsed(["--kv-tokens", "9000"])).kv_tokens == 9_000
    hardware = STAND_IN.server_of(STAND_IN.parsed(["--hardware", "a100-tp4", "--kv-tokens", "7"]))
    assert hardware == replace(STAND_IN.LLAMA_70B["a100-tp4"], kv_tokens=7)


async def test_its_load_reaches_the_progress_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STAND_IN, "REPORT_S", 0.01)
    monkeypatch.setattr(STAND_IN, "LOOK_S", 0.01)
    path = tmp_path / "progress"
    path.write_text("")
    inode = path.stat().st_ino
    engines: list[Any] = []

    def reported() -> float:
        return json.loads(path.read_text() or '{"gpu_load": -1}')["gpu_load"]

    async with running(SLOW, engines) as client:
        report = asyncio.create_task(engines[0].report(path))
        await until(lambda: reported() == 0)
        busy = asyncio.create_task(client.post(CHAT, json=asked()))
        await until(lambda: reported() > 0.5)
        busy.cancel()
        await until(lambda: reported() == 0)
        report.cancel()
    assert path.stat().st_ino == inode  # a job may write this file, but not into its folder
    assert list(tmp_path.iterdir()) == [path]
