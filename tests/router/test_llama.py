"""The door in front of software that is not ours: ``llama_cpp.server`` with a tiny model that the test writes.

Built from PyPI's source in a virtual environment of the test's own, without what the test does not use and without
optimisation: five minutes of processor time, of which two idle cores make less than three; pip keeps the wheel for the
next time. It serves one request at a time, so that what happens when a client leaves shows in the next request.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.router.conftest import Stage, error_of
from tests.support.ports import Ports
from tests.support.routers import a_routed_pool, a_routed_server
from tests.support.servers import wait_until

pytestmark = pytest.mark.slow

MODEL = "tiny"
LESS = ("MTMD_BUILD", "LLAVA_BUILD", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "GGML_NATIVE")
BUILD = [f"-D{name}=OFF" for name in (*LESS, "LLAMA_BUILD_SERVER", "GGML_OPENMP")]
BUILD += ["-DCMAKE_C_FLAGS_RELEASE=-O1", "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
MOST_BUILD_S = 2_700
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
def add(name, *shape): out.add_tensor(name, (rng.standard_normal(shape) * 0.05).astype(np.float32))
add("token_embd.weight", len(tokens), width); add("output.weight", len(tokens), width)
out.add_tensor("output_norm.weight", np.ones(width, np.float32))
for n in range(layers):
    for part in ("q", "k", "v", "output"): add(f"blk.{n}.attn_{part}.weight", width, width)
    for part in ("gate", "up"): add(f"blk.{n}.ffn_{part}.weight", inner, width)
    add(f"blk.{n}.ffn_down.weight", width, inner)
    for part in ("attn", "ffn"): out.add_tensor(f"blk.{n}.{part}_norm.weight", np.ones(width, np.float32))
out.write_header_to_file(); out.write_kv_data_to_file(); out.write_tensors_to_file(); out.close()
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a llama_cpp.server."""
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler to build it with")
    folder = tmp_path_factory.mktemp("llama")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    packages = ["llama-cpp-python[server]", "gguf"]
    environment = {**os.environ, "CMAKE_ARGS": " ".join(BUILD)}
    install = [str(python), "-m", "pip", "install", "-q", *packages]
    subprocess.run(install, env=environment, check=True, timeout=MOST_BUILD_S)
    model = folder / "tiny.gguf"
    subprocess.run([str(python), "-c", WRITE_MODEL, str(model)], check=True)
    ports = Ports()
    port = ports.take(28_900)
    options = ["--model", str(model), "--model_alias", MODEL, "--port", str(port), "--n_ctx", "512"]
    with subprocess.Popen([str(python), "-m", "llama_cpp.server", *options], cwd=folder) as server:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(url))
        yield url
        server.terminate()
    ports.release()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def test_software_that_is_not_ours_is_served_through_the_door(stage: Stage, llama: str, tmp_path: Path) -> None:
    stage.plane.pools = [a_routed_pool(models=[MODEL])]
    stage.plane.servers = [a_routed_server(stage.one, url=llama, capacity=1)]
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    async with stage.router(preemptions=0) as router:
        await router.adopted()

        whole = await router.ask(json=ask)
        assert whole.status_code == 200, whole.text
        assert whole.json()["usage"]["completion_tokens"] > 0
        assert float(whole.headers["x-wattshift-gco2"]) > 0

        streamed = await router.ask(json={**ask, "stream": True})
        events = [event for event in streamed.text.replace("\r\n", "\n").split("\n\n") if event]
        assert events[-1] == "data: [DONE]"
        assert events[-2].startswith(": x-wattshift-")
        chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
        assert chunks[0]["object"] == "chat.completion.chunk"

        too_long = {**ask, "messages": [{"role": "user", "content": "word " * 2_000}]}
        refused = await router.ask(json=too_long)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["message"]

        async with router.http.stream("POST", "/v1/chat/completions", json={**ask, "max_tokens": 100, "stream": True}):
            pass
        async with asyncio.timeout(120):  # the server may go on with what nobody reads before it takes the next request
            assert (await router.ask(json=ask)).status_code == 200
        assert router.router.fleet.servers["instance_1"].held == 0
        assert error_of(await router.ask(json={**ask, "model": "other"})) == (404, "model_not_found")
