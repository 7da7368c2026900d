"""A language model's server with a real model's arithmetic and made-up weights: OpenAI's API, continuous batching.

GET  /health                200 once it has loaded
GET  /metrics               requests that run and wait, by vLLM's names
POST /v1/completions        also /v1/chat/completions: as many tokens as `max_tokens` says, whole or as a stream

The layers are those of Llama 3 8B unless options say otherwise, in bfloat16; each prompt is prefilled by itself, and
each decode step is one CUDA graph over all that run. What it answers means nothing; how long it takes and what the GPU
draws is what such a model takes, which is what profiles, routers and ledgers are tried with. It needs PyTorch with
CUDA, and aiohttp. To try it: WATTSHIFT_PORT=8900 python lab/hardware/llm_server.py
"""

import argparse
import asyncio
import json
import os
import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from aiohttp import web
from torch.nn import functional  # pyright: ignore[reportMissingImports]

VOCABULARY = 32_000


@dataclass
class Request:
    """A request: its prompt's length and what it may answer, tokens, and where its tokens go."""

    prompt_tokens: int
    output_tokens: int
    tokens: asyncio.Queue[int]
    done: int = 0
    is_gone: bool = False


class Decoder:
    """The model on one GPU, with room for `slots` requests of `context` tokens each."""

    def __init__(self, shape: argparse.Namespace) -> None:
        self.shape = shape
        self.head = shape.width // shape.heads
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}

        def made(*size: int) -> Any:
            return torch.empty(*size, **options).normal_(0.0, size[-1] ** -0.5)

        kv = shape.kv_heads * self.head
        self.embedding = made(VOCABULARY, shape.width)
        self.out = made(VOCABULARY, shape.width)
        self.layers = [
            {
                "qkv": made(shape.width + 2 * kv, shape.width),
                "o": made(shape.width, shape.width),
                "up": made(2 * shape.inner, shape.width),
                "down": made(shape.width, shape.inner),
            }
            for _ in range(shape.layers)
        ]
        self.keys = torch.zeros(shape.layers, shape.slots, shape.kv_heads, shape.context, self.head, **options)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros(shape.slots, dtype=torch.long, device="cuda")
        self.at = torch.zeros(shape.slots, dtype=torch.long, device="cuda")
        self.places = torch.arange(shape.context, device="cuda")
        self.rows = torch.arange(shape.slots, device="cuda")
        self.sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= shape.slots]
        self.graphs: dict[int, Any] = {}
        self.chosen: dict[int, Any] = {}

    def capture(self) -> None:
        """Record a decode step for each batch size."""
        for size in self.sizes:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self._step(size)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.chosen[size] = self._step(size)
            self.graphs[size] = graph

    def prefill(self, slot: int, prompt: Any) -> int:
        """Read a prompt, token ids [n], into a slot; return its first token."""
        n = len(prompt)
        x = self.embedding[prompt]
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x)
            self.keys[index, slot, :, :n], self.values[index, slot, :, :n] = k.transpose(0, 1), v.transpose(0, 1)
            wide = self.shape.heads // self.shape.kv_heads
            k, v = k.repeat_interleave(wide, 1), v.repeat_interleave(wide, 1)
            mixed = functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True
            )
            x = self._after(layer, x, mixed[0].transpose(0, 1).reshape(n, -1))
        token = int((self._normal(x[-1:]) @ self.out.T).argmax())
        self.tokens[slot], self.at[slot] = token, n
        return token

    def decode(self, running: int) -> list[int]:
        """Return the next token of each of the first `running` slots."""
        size = next(size for size in self.sizes if size >= running)
        self.graphs[size].replay()
        return self.chosen[size][:running].tolist()

    def move(self, come_from: int, to: int) -> None:
        """Move a request to another slot, so that those that run stay together."""
        for kept in (self.keys, self.values):
            kept[:, to] = kept[:, come_from]
        self.tokens[to], self.at[to] = self.tokens[come_from], self.at[come_from]

    def _step(self, size: int) -> Any:
        rows, at = self.rows[:size], self.at[:size]
        x = self.embedding[self.tokens[:size]]
        mask = (self.places[None, :] > at[:, None])[:, None, None, :]
        wide = self.shape.heads // self.shape.kv_heads
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x)
            keys, values = self.keys[index], self.values[index]
            keys[rows, :, at], values[rows, :, at] = k, v
            asked = q.view(size, self.shape.kv_heads, wide, self.head)
            weights = asked @ keys[:size].transpose(2, 3) * self.head**-0.5
            weights = weights.masked_fill(mask, float("-inf")).softmax(-1, dtype=torch.float32).to(x.dtype)
            x = self._after(layer, x, (weights @ values[:size]).reshape(size, -1))
        chosen = (self._normal(x) @ self.out.T).argmax(-1)
        self.tokens[:size] = chosen
        self.at[:size] = (at + 1).clamp(max=self.shape.context - 1)
        return chosen

    def _heads(self, layer: dict[str, Any], x: Any) -> tuple[Any, Any, Any]:
        kv = self.shape.kv_heads * self.head
        q, k, v = (self._normal(x) @ layer["qkv"].T).split((self.shape.width, kv, kv), -1)
        return (
            q.view(-1, self.shape.heads, self.head),
            k.view(-1, self.shape.kv_heads, self.head),
            v.view(-1, self.shape.kv_heads, self.head),
        )

    def _after(self, layer: dict[str, Any], x: Any, mixed: Any) -> Any:
        x = x + mixed @ layer["o"].T
        gate, up = (self._normal(x) @ layer["up"].T).chunk(2, -1)
        return x + (functional.silu(gate) * up) @ layer["down"].T

    def _normal(self, x: Any) -> Any:
        return functional.rms_norm(x, (self.shape.width,))


class Server:
    """Requests in, tokens out: a thread runs the model, the loop talks."""

    def __init__(self, shape: argparse.Namespace) -> None:
        self.shape = shape
        self.is_ready = False
        self.failure: str | None = None
        self.waiting: queue.Queue[Request] = queue.Queue()
        self.running: list[Request] = []

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve for ever."""
        with torch.inference_mode():
            model = Decoder(self.shape)
            model.prefill(0, torch.zeros(64, dtype=torch.long, device="cuda"))
            model.capture()
            self.is_ready = True
            while True:
                self._turn(model, loop)

    def _turn(self, model: Decoder, loop: asyncio.AbstractEventLoop) -> None:
        told: list[tuple[Request, int]] = []
        while len(self.running) < self.shape.slots and not (self.running and self.waiting.empty()):
            request = self.waiting.get()  # waits while nothing runs
            prompt = torch.randint(VOCABULARY, (request.prompt_tokens,), device="cuda")
            told.append((request, model.prefill(len(self.running), prompt)))
            self.running.append(request)
            if told:
                break  # one prompt, then a step for all
        told += zip(self.running, model.decode(len(self.running)), strict=True)
        for request, _ in told:
            request.done += 1
        loop.call_soon_threadsafe(lambda: [request.tokens.put_nowait(token) for request, token in told])
        for slot in reversed(range(len(self.running))):
            if self.running[slot].done >= self.running[slot].output_tokens or self.running[slot].is_gone:
                last = len(self.running) - 1
                if slot != last:
                    model.move(last, slot)
                    self.running[slot] = self.running[last]
                self.running.pop()


def application(server: Server) -> web.Application:
    """Return the HTTP side."""

    async def begin(app: web.Application) -> None:
        def run(loop: asyncio.AbstractEventLoop) -> None:
            try:
                server.run(loop)
            except Exception as error:
                print(f"the model failed: {error!r}", flush=True)
                os._exit(1)

        threading.Thread(target=run, args=(asyncio.get_running_loop(),), daemon=True).start()

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=200 if server.is_ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        counts = {"num_requests_running": len(server.running), "num_requests_waiting": server.waiting.qsize()}
        return web.Response(text="".join(f"# TYPE vllm:{k} gauge\nvllm:{k} {v}.0\n" for k, v in counts.items()))

    async def complete(asked: web.Request) -> web.StreamResponse:
        body = await asked.json()
        is_chat = "messages" in body
        text = " ".join(str(m["content"]) for m in body["messages"]) if is_chat else str(body.get("prompt", ""))
        room = server.shape.context
        prompt = max(1, min(len(text.split()), room - 2))
        wanted = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        request = Request(prompt, max(1, min(wanted, room - prompt - 1)), asyncio.Queue())
        server.waiting.put(request)
        usage = {"prompt_tokens": prompt, "completion_tokens": request.output_tokens}
        usage["total_tokens"] = sum(usage.values())
        kind = "chat.completion" if is_chat else "text_completion"
        base = {"id": f"c{time.monotonic_ns()}", "created": int(time.time()), "model": body.get("model", "made-up")}

        def choice(words: str, end: str | None, *, streams: bool) -> dict[str, Any]:
            said = {"text": words}
            if is_chat:
                said = {"delta" if streams else "message": {"role": "assistant", "content": words}}
            return {"index": 0, "finish_reason": end, **said}

        try:
            if not body.get("stream"):
                words = [f"t{await request.tokens.get()}" for _ in range(request.output_tokens)]
                answer = choice(" ".join(words), "length", streams=False)
                return web.json_response({**base, "object": kind, "choices": [answer], "usage": usage})
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(asked)
            kind = "chat.completion.chunk" if is_chat else kind
            for position in range(request.output_tokens):
                end = "length" if position == request.output_tokens - 1 else None
                piece = choice(f"t{await request.tokens.get()} ", end, streams=True)
                event = {**base, "object": kind, "choices": [piece]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if (body.get("stream_options") or {}).get("include_usage"):
                event = {**base, "object": kind, "choices": [], "usage": usage}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            request.is_gone = True

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "made-up", "object": "model"}]})

    app = web.Application(client_max_size=2**26)
    app.on_startup.append(begin)
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/metrics", metrics),
            web.get("/v1/models", models),
            web.post("/v1/completions", complete),
            web.post("/v1/chat/completions", complete),
        ]
    )
    return app


def main() -> None:
    """Serve at `$WATTSHIFT_PORT`."""
    parser = argparse.ArgumentParser(description="Serve a language model with made-up weights.")
    for name, default in (
        ("layers", 32), ("width", 4_096), ("heads", 32), ("kv-heads", 8), ("inner", 14_336),
        ("slots", 64), ("context", 1_024),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    port = int(os.environ.get("WATTSHIFT_PORT", "8900"))
    web.run_app(application(Server(parser.parse_args())), port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
