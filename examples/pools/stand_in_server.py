"""A stand-in for a model server: OpenAI's API with the timing of a real one, without a model or a GPU.

GET  /health                200 once it has loaded, 503 before
GET  /metrics               Prometheus text with vLLM's names: requests that run and wait, tokens, times
GET  /v1/models             the names that it serves
POST /v1/chat/completions   also /v1/completions: answers of made-up words, whole or as a stream of events
POST /v1/embeddings         made-up vectors
POST /stand-in              change how it misbehaves (below), as JSON with the options' names; GET shows it
SIGTERM                     it exits at once, whatever it holds

With WATTSHIFT_API_KEY in its environment, as an instance of a pool has it, it asks for that key at all of /v1.

Requests are batched continuously: each is prefilled, then all get a token per step, and what does not fit into
the batch waits, the lowest `priority` first. How long a prefill and a step take is said by `--hardware` (Llama-2-70B on
A100s or H100s), or by `--ttft-ms` and `--tbt-ms`, and by the clock in `--clock-file`, which a job on simulated GPUs has
from its agent. An answer has as many tokens as `max_tokens` says, at most as many as its prompt's hash says. A client
that leaves ends its request. With `--kv-tokens` its memory is limited, and with `--prefix-cache` the beginnings of
prompts that it read before are not read again, as `usage.prompt_tokens_details.cached_tokens` says. Each second it
reports its load to its job's progress file, by which simulated GPUs draw what a real server's did.

To try it: WATTSHIFT_PORT=8900 python examples/pools/stand_in_server.py --load-s 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import hmac
import itertools
import json
import os
import signal
import sys
import time
import zlib
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from aiohttp import web

from services.core.profiles.prefix_cache import PrefixCache

WORDS = ("the", "wind", "turns", "north", "and", "the", "lights", "stay", "on", "over", "a", "quiet", "town")
CHARACTERS_PER_TOKEN = 4
BLOCK_TOKENS = 16
"""Of the prefix cache, as in vLLM."""
CLOCK_READ_S = 0.5
REPORT_S, LOOK_S = 1.0, 0.05
GPU_LOAD_ONE, GPU_LOAD_FULL = 0.60, 0.75
"""Load of its GPUs with one request and with a full batch: where the power of a server with Llama 3 8B's arithmetic lay
between that of an idle H200 and its limit (lab/results/one-gpu.md)."""
CLOCK_SHARE, LOWEST_CLOCK_MHZ = 0.9, 300.0
"""Share of times that is inversely proportional to the clock (FREESH Table 10), and the lowest clock."""
MAX_SECONDS = 600.0
BODY_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Timing:
    """Times at the highest clock, seconds: of a prefill and each token of its prompt, of a step and each request."""

    capacity: int  #: The most requests that it decodes together
    prefill_base_s: float
    prefill_s_per_token: float
    decode_base_s: float
    decode_s_per_request: float
    highest_clock_mhz: float = 1_410.0
    kv_tokens: float = 0.0  #: Tokens of prompts and answers that its memory holds; 0: any number

    def prefill_s(self, tokens: float, clock_mhz: float) -> float:
        """Return the time from the start of a prefill to the first token, seconds."""
        return (self.prefill_base_s + self.prefill_s_per_token * tokens) * self.slowdown(clock_mhz)

    def step_s(self, batch: float, clock_mhz: float) -> float:
        """Return the time between tokens of each request in a batch, seconds."""
        return (self.decode_base_s + self.decode_s_per_request * batch) * self.slowdown(clock_mhz)

    def slowdown(self, clock_mhz: float) -> float:
        """Return times at a clock as multiples of those at the highest."""
        clock = min(max(clock_mhz, LOWEST_CLOCK_MHZ), self.highest_clock_mhz)
        return 1.0 + CLOCK_SHARE * (self.highest_clock_mhz / clock - 1.0)


LLAMA_70B = {
    "a100-tp2": Timing(64, 0.0329, 0.3373e-3, 0.05723, 0.489e-3),
    "a100-tp4": Timing(64, 0.0300, 0.2078e-3, 0.04322, 0.399e-3),
    "a100-tp8": Timing(64, 0.0362, 0.1334e-3, 0.04372, 0.393e-3),
    "h100-tp2": Timing(64, 0.0215, 0.1413e-3, 0.03673, 0.449e-3, 1_980.0),
    "h100-tp4": Timing(64, 0.0271, 0.0897e-3, 0.02868, 0.326e-3, 1_980.0),
    "h100-tp8": Timing(64, 0.0322, 0.0620e-3, 0.02974, 0.306e-3, 1_980.0),
}
"""Llama-2-70B as Splitwise measured it; ``python -m lab.reproductions.serving_profiles`` fits these."""


@dataclass
class Misbehaviour:
    """What a test may want to go wrong.

    Attributes:
        slow: Times are multiplied by this.
        reported_load: Requests that it claims to run, whatever it does; null for the truth.
        die_after_tokens: Every stream is cut off after so many tokens, without an end.
        hang: Requests get no answer.
        fail_status: Requests get this status.
        unhealthy: /health says 503.
    """

    slow: float = 1.0
    reported_load: int | None = None
    die_after_tokens: int | None = None
    hang: bool = False
    fail_status: int | None = None
    unhealthy: bool = False


@dataclass(eq=False)
class Generation:
    """A request in the engine."""

    prompt_tokens: int
    output_tokens: int
    priority: int
    blocks: list[int] = field(default_factory=list[int])
    cached_tokens: int = 0
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue[int])
    produced: int = 0
    token_at_s: float = 0.0
    is_gone: bool = False


class Engine:
    """Prefill and decode, in real time."""

    def __init__(
        self, server: Timing, load_s: float, speed: float, clock_file: Path | None, cache_tokens: int = 0
    ) -> None:
        self.server, self.speed, self.clock_file = server, speed, clock_file
        self.cache = PrefixCache(cache_tokens, BLOCK_TOKENS)
        self.misbehaviour = Misbehaviour()
        self.ready_at_s = time.monotonic() + load_s
        self.waiting: list[tuple[int, int, Generation]] = []
        self.prefilling: set[Generation] = set()
        self.running: list[Generation] = []
        self.other = 0
        self.totals = {"prompt_tokens": 0, "generation_tokens": 0, "requests": 0, "ttft_s": 0.0, "first_tokens": 0}
        self.totals |= {"cached_tokens": 0, "between_tokens_s": 0.0, "later_tokens": 0}
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._clock_mhz, self._clock_read_s = server.highest_clock_mhz, 0.0

    @property
    def is_loaded(self) -> bool:
        return time.monotonic() >= self.ready_at_s

    @property
    def clock_mhz(self) -> float:
        """The clock in the file, MHz: a number, or the `clock_mhz` of a device file; the highest where it has none."""
        now_s = time.monotonic()
        if self.clock_file is not None and now_s - self._clock_read_s > CLOCK_READ_S:
            self._clock_read_s = now_s
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self.clock_file.read_text())
                mhz = found.get("clock_mhz") if isinstance(found, dict) else found
                self._clock_mhz = float(mhz or self.server.highest_clock_mhz)
        return self._clock_mhz

    async def generate(self, generation: Generation) -> AsyncGenerator[int, None]:
        """Yield the numbers of tokens as they are produced."""
        began_s = time.monotonic()
        self.totals["requests"] += 1
        heapq.heappush(self.waiting, (generation.priority, next(self._numbers), generation))
        self._admit()
        try:
            while generation.produced < generation.output_tokens:
                number = await generation.tokens.get()
                generation.produced += 1
                if number == 0:
                    self.totals["ttft_s"] += time.monotonic() - began_s
                    self.totals["first_tokens"] += 1
                self.totals["generation_tokens"] += 1
                yield number
        finally:
            generation.is_gone = True
            self.running = [each for each in self.running if each is not generation]
            self.prefilling.discard(generation)
            self._admit()

    async def decode(self) -> None:
        """Give every running request a token per step, for ever."""
        while True:
            if not self.running:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self._real_s(self.server.step_s(len(self.running), self.clock_mhz)))
            for each in list(self.running):
                self._produce(each)

    @property
    def gpu_load(self) -> float:
        """The load of its GPUs now, 0 to 1: nothing without requests, and little more with many than with one."""
        batch = len(self.running) + len(self.prefilling) + self.other
        more = min((batch - 1) / max(self.server.capacity - 1, 1), 1.0)
        return GPU_LOAD_ONE + (GPU_LOAD_FULL - GPU_LOAD_ONE) * more if batch else 0.0

    async def report(self, path: Path) -> None:
        """Write the mean load into the job's progress file each second, for ever."""
        loads: list[float] = []
        while True:
            await asyncio.sleep(LOOK_S)
            loads.append(self.gpu_load)
            if len(loads) * LOOK_S >= REPORT_S:
                with contextlib.suppress(OSError):  # in place: the job may write this file, but not into its folder
                    path.write_text(json.dumps({"gpu_load": round(sum(loads) / len(loads), 4)}) + "\n")
                loads.clear()

    def metrics(self) -> str:
        """Return vLLM's metrics, as far as pools and routers read them."""
        memory = self.held_tokens / self.server.kv_tokens if self.server.kv_tokens else 0.0
        waiting = sum(not each.is_gone for *_, each in self.waiting)
        running = len(self.running) + len(self.prefilling) + self.other
        if self.misbehaviour.reported_load is not None:
            running, waiting = self.misbehaviour.reported_load, 0
        lines: list[str] = []
        for name, kind, value in (
            ("num_requests_running", "gauge", running),
            ("num_requests_waiting", "gauge", waiting),
            ("kv_cache_usage_perc", "gauge", min(memory, 1.0)),
            ("prefix_cache_queries_total", "counter", self.totals["prompt_tokens"]),
            ("prefix_cache_hits_total", "counter", self.totals["cached_tokens"]),
            ("prompt_tokens_total", "counter", self.totals["prompt_tokens"]),
            ("generation_tokens_total", "counter", self.totals["generation_tokens"]),
            ("time_to_first_token_seconds_sum", "counter", self.totals["ttft_s"]),
            ("time_to_first_token_seconds_count", "counter", self.totals["first_tokens"]),
            ("inter_token_latency_seconds_sum", "counter", self.totals["between_tokens_s"]),
            ("inter_token_latency_seconds_count", "counter", self.totals["later_tokens"]),
        ):
            lines += [f"# TYPE vllm:{name} {kind}", f'vllm:{name}{{model_name="stand-in"}} {float(value)}']
        return "\n".join(lines) + "\n"

    @property
    def held_tokens(self) -> int:
        """Tokens of the requests that it works on, prompts and answers to their ends."""
        return sum(each.prompt_tokens + each.output_tokens for each in (*self.running, *self.prefilling))

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.prefilling) < self.server.capacity:
            *_, generation = self.waiting[0]
            tokens = generation.prompt_tokens + generation.output_tokens
            held = self.held_tokens  # one that is larger than the memory runs alone
            if not generation.is_gone and self.server.kv_tokens and held and held + tokens > self.server.kv_tokens:
                return
            heapq.heappop(self.waiting)
            if not generation.is_gone:
                self.prefilling.add(generation)
                task = asyncio.ensure_future(self._prefill(generation))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _prefill(self, generation: Generation) -> None:
        known = self.cache.shared(generation.blocks) * BLOCK_TOKENS
        generation.cached_tokens = max(min(known, generation.prompt_tokens - 1), 0)  # one makes the first token
        self.cache.keep(generation.blocks)
        self.totals["prompt_tokens"] += generation.prompt_tokens
        self.totals["cached_tokens"] += generation.cached_tokens
        read = generation.prompt_tokens - generation.cached_tokens
        await asyncio.sleep(self._real_s(self.server.prefill_s(read, self.clock_mhz)))
        self.prefilling.discard(generation)
        if generation.is_gone:
            return
        self.running.append(generation)
        self._produce(generation)
        self._wake.set()

    def _produce(self, generation: Generation) -> None:
        number = generation.produced + generation.tokens.qsize()
        generation.tokens.put_nowait(number)
        now_s = time.monotonic()
        if number:
            self.totals["between_tokens_s"] += now_s - generation.token_at_s
            self.totals["later_tokens"] += 1
        generation.token_at_s = now_s
        if number + 1 >= generation.output_tokens:
            self.running = [each for each in self.running if each is not generation]
            self._admit()

    def _real_s(self, modelled_s: float) -> float:
        return modelled_s * self.misbehaviour.slow / self.speed


class RefusedError(Exception):
    """A request that is refused, in OpenAI's shape."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class Api:
    """OpenAI's API in front of the engine."""

    def __init__(
        self, engine: Engine, models: list[str], context: int, most_tokens: int, service_s: float, key: str = ""
    ) -> None:
        self.engine, self.models, self.context, self.key = engine, models, context, key
        self.most_tokens, self.service_s = most_tokens, service_s
        self._numbers = itertools.count()

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(middlewares=[self._errors, self._keyed], client_max_size=BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/v1/models", self.list_models),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                web.post("/v1/embeddings", self.embeddings),
                web.get("/stand-in", self.show_misbehaviour),
                web.post("/stand-in", self.misbehave),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Say whether it serves."""
        healthy = self.engine.is_loaded and not self.engine.misbehaviour.unhealthy
        return web.Response(status=200 if healthy else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """Show the load."""
        return web.Response(text=self.engine.metrics(), content_type="text/plain")

    async def list_models(self, request: web.Request) -> web.Response:
        """List the models."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "wattshift"} for name in self.models]
        return web.json_response({"object": "list", "data": data})

    async def show_misbehaviour(self, request: web.Request) -> web.Response:
        """Show what goes wrong on purpose."""
        return web.json_response(asdict(self.engine.misbehaviour))

    async def misbehave(self, request: web.Request) -> web.Response:
        """Change what goes wrong on purpose."""
        asked = await _object(request)
        if unknown := sorted(set(asked) - set(asdict(self.engine.misbehaviour))):
            raise RefusedError(f"unknown option {unknown[0]}", param=unknown[0])
        self.engine.misbehaviour = Misbehaviour(**(asdict(self.engine.misbehaviour) | asked))
        return await self.show_misbehaviour(request)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Complete a conversation."""
        asked = await self._asked(request)
        if not isinstance(asked.get("messages"), list) or not asked["messages"]:
            raise RefusedError("messages must be a list of at least one message", param="messages")
        text = json.dumps(asked["messages"])
        return await self._complete(request, asked, text, asked.get("max_completion_tokens", asked.get("max_tokens")))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt; with `seconds` answer after so long, whatever the timing says."""
        asked = await self._asked(request)
        if "seconds" in asked or not asked:
            return await self._wait(asked)
        return await self._complete(request, asked, json.dumps(asked.get("prompt", "")), asked.get("max_tokens"))

    async def embeddings(self, request: web.Request) -> web.Response:
        """Return made-up vectors."""
        asked = await self._asked(request)
        inputs = asked.get("input")
        texts = inputs if isinstance(inputs, list) else [inputs]
        if inputs is None or not texts:
            raise RefusedError("input must be a text or a list of texts", param="input")
        tokens = sum(_tokens(json.dumps(text)) for text in texts)
        await asyncio.sleep(self.engine.server.prefill_s(tokens, self.engine.clock_mhz) / self.engine.speed)
        data = [{"object": "embedding", "index": at, "embedding": _vector(str(text))} for at, text in enumerate(texts)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "model": self._model(asked), "data": data, "usage": usage})

    async def _asked(self, request: web.Request) -> dict[str, Any]:
        if self.engine.misbehaviour.hang:
            await asyncio.sleep(MAX_SECONDS)
        if self.engine.misbehaviour.fail_status is not None:
            raise RefusedError("it fails on purpose", self.engine.misbehaviour.fail_status)
        return await _object(request)

    async def _wait(self, asked: dict[str, Any]) -> web.Response:
        try:
            seconds = float(asked.get("seconds", self.service_s))
        except (TypeError, ValueError):
            raise RefusedError("seconds must be a number", param="seconds") from None
        self.engine.other += 1
        try:
            await asyncio.sleep(min(max(seconds, 0.0), MAX_SECONDS))
        finally:
            self.engine.other -= 1
        return web.json_response(_completion("text_completion", "cmpl-0", self.models[0], ["..."], None))

    def _model(self, asked: dict[str, Any]) -> str:
        model = asked.get("model", self.models[0])
        if model not in self.models:
            raise RefusedError(f"The model `{model}` does not exist.", 404, "model_not_found", "model")
        return model

    async def _complete(
        self, request: web.Request, asked: dict[str, Any], text: str, max_tokens: Any
    ) -> web.StreamResponse:
        model, prompt_tokens = self._model(asked), _tokens(text)
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise RefusedError("max_tokens must be at least 1", param="max_tokens")
        if prompt_tokens + (max_tokens or 1) > self.context:
            message = f"This model's maximum context length is {self.context} tokens, and you asked for more."
            raise RefusedError(message, 400, "context_length_exceeded", "messages")
        natural = 1 + zlib.crc32(text.encode()) % self.most_tokens
        length = min(natural, max_tokens or natural)
        priority = asked.get("priority", 0)
        if not isinstance(priority, int):
            raise RefusedError("priority must be a whole number", param="priority")
        generation = Generation(prompt_tokens, length, priority, _blocks(text))
        is_chat = request.path.endswith("/chat/completions")
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{next(self._numbers)}"
        tool = _tool(asked) if is_chat else None
        reason = "tool_calls" if tool else "length" if max_tokens is not None and length == max_tokens else "stop"
        if asked.get("stream"):
            return await self._stream(request, asked, generation, (name, model, is_chat, tool, reason))
        words = [WORDS[number % len(WORDS)] async for number in self.engine.generate(generation)]
        kind = "chat.completion" if is_chat else "text_completion"
        return web.json_response(_completion(kind, name, model, words, tool, reason) | {"usage": _usage(generation)})

    async def _stream(
        self,
        request: web.Request,
        asked: dict[str, Any],
        generation: Generation,
        answer: tuple[str, str, bool, dict[str, Any] | None, str],
    ) -> web.StreamResponse:
        name, model, is_chat, tool, reason = answer
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            chunk = {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": choices}
            await response.write(f"data: {json.dumps(chunk | more)}\n\n".encode())

        async with contextlib.aclosing(self.engine.generate(generation)) as numbers:
            async for number in numbers:
                if number == self.engine.misbehaviour.die_after_tokens and request.transport is not None:
                    request.transport.abort()
                    return response
                await send([_piece(is_chat, number, tool)])
        end = {"index": 0, "finish_reason": reason}
        await send([end | ({"delta": {}} if is_chat else {"text": ""})])
        if with_usage:
            await send([], usage=_usage(generation))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    @web.middleware
    async def _keyed(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse who does not know the key, as vLLM does below /v1."""
        sent = request.headers.get("authorization", "").encode()
        if (
            self.key
            and request.path.startswith("/v1/")
            and not hmac.compare_digest(sent, f"Bearer {self.key}".encode())
        ):
            raise RefusedError("the API key is missing or another one", 401, "invalid_api_key")
        return await handler(request)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusedError as error:
            body = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
            return web.json_response({"error": body}, status=error.status)


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        asked = json.loads(await request.read() or b"{}")
    except ValueError:
        raise RefusedError("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise RefusedError("the body is not a JSON object")
    return asked


def _vector(text: str) -> list[float]:
    return [(zlib.crc32(f"{at} {text}".encode()) % 2_001 - 1_000) / 1_000 for at in range(8)]


def _tokens(text: str) -> int:
    return max(len(text) // CHARACTERS_PER_TOKEN, 1)


def _blocks(text: str) -> list[int]:
    """Return the ids of a prompt's whole blocks, each standing for all before it too."""
    size, found, known = BLOCK_TOKENS * CHARACTERS_PER_TOKEN, list[int](), 0
    for at in range(size, len(text) + 1, size):
        known = zlib.crc32(text[at - size : at].encode(), known)
        found.append(known)
    return found


def _usage(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.output_tokens,
        "total_tokens": generation.prompt_tokens + generation.output_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def _tool(asked: dict[str, Any]) -> dict[str, Any] | None:
    """Return the call of a tool that the client insists on."""
    choice, tools = asked.get("tool_choice"), asked.get("tools") or []
    if choice == "required" and tools:
        name = tools[0]["function"]["name"]
    elif isinstance(choice, dict):
        name = choice["function"]["name"]
    else:
        return None
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}


def _piece(is_chat: bool, number: int, tool: dict[str, Any] | None) -> dict[str, Any]:
    word = WORDS[number % len(WORDS)] + " "
    if not is_chat:
        return {"index": 0, "text": word, "finish_reason": None}
    role = {"role": "assistant"} if number == 0 else {}
    if tool is None:
        return {"index": 0, "delta": role | {"content": word}, "finish_reason": None}
    calls = {"tool_calls": [{"index": 0, **tool}]} if number == 0 else {"content": ""}
    return {"index": 0, "delta": role | calls, "finish_reason": None}


def _completion(
    kind: str, name: str, model: str, words: list[str], tool: dict[str, Any] | None, reason: str = "stop"
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    if kind == "text_completion":
        choice["text"] = " ".join(words)
    else:
        message = {"role": "assistant", "content": None if tool else " ".join(words)}
        choice["message"] = message | ({"tool_calls": [tool]} if tool else {})
    head = {"id": name, "object": kind, "created": int(time.time()), "model": model, "choices": [choice]}
    return head | {"instance": os.environ.get("WATTSHIFT_INSTANCE")}


async def serve(api: Api, host: str, port: int) -> None:
    """Serve until the process ends."""
    runner = web.AppRunner(api.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1_024).start()
    print(f"pool {os.environ.get('WATTSHIFT_POOL')} serves at port {port}", flush=True)
    if "WATTSHIFT_PROGRESS_FILE" in os.environ:
        report = api.engine.report(Path(os.environ["WATTSHIFT_PROGRESS_FILE"]))
        await asyncio.gather(api.engine.decode(), report)
    await api.engine.decode()


def server_of(options: argparse.Namespace) -> Timing:
    """Return the timing that the options ask for."""
    if options.hardware is not None:
        return replace(LLAMA_70B[options.hardware], kv_tokens=options.kv_tokens)
    ttft_s, tbt_s = options.ttft_ms / 1e3, options.tbt_ms / 1e3
    return Timing(options.slots, ttft_s, 0.0, tbt_s, 0.0, kv_tokens=options.kv_tokens)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="A stand-in for a model server.")
    parser.add_argument("--host", default="", help="address to listen at; by default all")
    parser.add_argument("--model", action="append", help="a name that it serves; repeatable (default: stand-in)")
    parser.add_argument("--load-s", type=float, default=1.0, help="how long loading the model takes")
    parser.add_argument("--hardware", choices=sorted(LLAMA_70B), help="time requests as Llama-2-70B there")
    parser.add_argument("--ttft-ms", type=float, default=40.0, help="without --hardware: time of a prefill")
    parser.add_argument("--tbt-ms", type=float, default=10.0, help="without --hardware: time between tokens")
    parser.add_argument("--slots", type=int, default=16, help="without --hardware: requests in a batch")
    parser.add_argument("--kv-tokens", type=int, default=0, help="tokens that its memory holds; 0: any number")
    parser.add_argument("--prefix-cache", type=int, default=0, help="tokens of prompts that are not read again")
    parser.add_argument("--service-s", type=float, default=0.2, help="time of a completion without any fields")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--context", type=int, default=8_192, help="most tokens of prompt and answer")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times faster than that")
    device_file = os.environ.get("WATTSHIFT_DEVICE_FILE")
    parser.add_argument(
        "--clock-file",
        type=Path,
        default=device_file and Path(device_file),
        help="file with the clock of its GPU, MHz (default: $WATTSHIFT_DEVICE_FILE, which says a simulated GPU's)",
    )
    for name, kind in (("slow", float), ("reported-load", int), ("die-after-tokens", int), ("fail-status", int)):
        parser.add_argument(f"--{name}", type=kind, help="misbehave; see POST /stand-in")
    for name in ("hang", "unhealthy"):
        parser.add_argument(f"--{name}", action="store_true", default=None, help="misbehave; see POST /stand-in")
    return parser.parse_args(arguments)


async def main() -> None:
    """Serve until SIGTERM."""
    options = parsed()
    port = os.environ.get("WATTSHIFT_PORT") or sys.exit("WATTSHIFT_PORT is not set")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    engine = Engine(server_of(options), options.load_s, options.speed, options.clock_file, options.prefix_cache)
    names = asdict(engine.misbehaviour)
    engine.misbehaviour = Misbehaviour(**(names | {n: v for n in names if (v := getattr(options, n)) is not None}))
    models = options.model or ["stand-in"]
    key = os.environ.get("WATTSHIFT_API_KEY", "")
    api = Api(engine, models, options.context, options.tokens, options.service_s, key)
    await serve(api, options.host, int(port))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
