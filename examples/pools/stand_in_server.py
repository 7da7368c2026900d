"""A stand-in for a model server: what a pool requires of one, without a model or a GPU. It needs only Python.

GET  /health                 200 once it has loaded, 503 before
GET  /v1/models              its one model, stand-in
GET  /metrics                Prometheus text: the requests it runs, and those that wait for a slot
POST /v1/completions         answers after as long as a completion takes; counts as running, or waiting, until then
POST /v1/chat/completions    the same for a chat; both also as a stream of tokens (`"stream": true`)
SIGTERM                      it exits at once, whatever it holds

It listens at $WATTSHIFT_PORT. To try it: WATTSHIFT_PORT=8900 python examples/pools/stand_in_server.py --load-s 2
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "stand-in"
WORDS = [f"word{number}" for number in range(1, 21)]


class Engine:
    """In place of the model: a number of slots, each busy for as long as a completion takes."""

    def __init__(self, slots: int, load_s: float, service_s: float) -> None:
        self.ready_at_s = time.monotonic() + load_s
        self.service_s = service_s
        self.held = 0
        self.slots = threading.Semaphore(slots)
        self.n_slots = slots
        self.lock = threading.Lock()

    @property
    def is_loaded(self) -> bool:
        return time.monotonic() >= self.ready_at_s

    def complete(self, seconds: float, tokens: int = 1) -> Iterator[int]:
        """Yield the number of each token after its part of the time."""
        self._count(1)
        try:
            with self.slots:
                for number in range(tokens):
                    time.sleep(seconds / tokens)
                    yield number
        finally:
            self._count(-1)

    def metrics(self) -> str:
        running = min(self.held, self.n_slots)
        lines: list[str] = []
        for name, value in (("running", running), ("waiting", self.held - running)):
            metric = f"vllm:num_requests_{name}"
            lines += [f"# TYPE {metric} gauge", f'{metric}{{model_name="stand-in"}} {float(value)}']
        return "\n".join(lines) + "\n"

    def _count(self, change: int) -> None:
        with self.lock:
            self.held += change


class Handler(BaseHTTPRequestHandler):
    """The paths; `engine` is set before it serves."""

    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200 if self.engine.is_loaded else 503, "text/plain", b"")
        elif self.path == "/metrics":
            self._answer(200, "text/plain; version=0.0.4", self.engine.metrics().encode())
        elif self.path == "/v1/models":
            self._answer_json({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "wattshift"}]})
        else:
            self._answer(404, "text/plain", b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._answer(404, "text/plain", b"")
            return
        try:
            asked = json.loads(body or b"{}")
            seconds = float(asked.get("seconds", self.engine.service_s))
            most = min(max(int(asked.get("max_tokens") or len(WORDS)), 1), len(WORDS))
            is_stream, options = bool(asked.get("stream")), asked.get("stream_options") or {}
        except (ValueError, TypeError, AttributeError):
            self._answer(400, "text/plain", b"")
            return
        tokens = self.engine.complete(min(max(seconds, 0.0), 600.0), most)
        usage = {"prompt_tokens": max(1, len(body) // 4), "completion_tokens": most}
        if is_stream:
            self._stream(tokens, usage if options.get("include_usage") else None)
            return
        text = " ".join(WORDS[number] for number in tokens)
        part = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **part, "finish_reason": "stop"}
        total = {"total_tokens": sum(usage.values())}
        self._answer_json({**self._envelope(), "choices": [choice], "usage": usage | total})

    @property
    def _is_chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    def _envelope(self, chunk: str = "") -> dict[str, object]:
        kind = f"chat.completion{chunk}" if self._is_chat else "text_completion"
        created = int(time.time())
        instance = os.environ.get("WATTSHIFT_INSTANCE")
        return {"id": "stand-in", "object": kind, "created": created, "model": MODEL, "instance": instance}

    def _stream(self, tokens: Iterator[int], usage: dict[str, int] | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for number in tokens:
            text = WORDS[number] + " "
            part = {"delta": {"content": text}} if self._is_chat else {"text": text}
            self._event({**self._envelope(".chunk"), "choices": [{"index": 0, **part, "finish_reason": None}]})
        if usage is not None:
            self._event({**self._envelope(".chunk"), "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, document: dict[str, object]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: a probe a second would fill the log."""

    def _answer_json(self, document: dict[str, object]) -> None:
        self._answer(200, "application/json", json.dumps(document).encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """Ends without waiting for requests."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A stand-in for a model server.")
    parser.add_argument("--load-s", type=float, default=1.0, help="how long loading the model takes")
    parser.add_argument("--service-s", type=float, default=0.2, help="how long a completion takes")
    parser.add_argument("--slots", type=int, default=16, help="completions at once")
    options = parser.parse_args()
    port = os.environ.get("WATTSHIFT_PORT") or sys.exit("WATTSHIFT_PORT is not set")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Handler.engine = Engine(options.slots, options.load_s, options.service_s)
    print(f"pool {os.environ.get('WATTSHIFT_POOL')} serves at port {port}", flush=True)
    Server(("", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
