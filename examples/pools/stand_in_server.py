"""A stand-in for a model server: what a pool requires of one, without a model or a GPU. It needs only Python.

GET  /health           200 once it has loaded, 503 before
GET  /metrics          Prometheus text: the requests it runs, and those that wait for a slot
POST /v1/completions   answers after as long as a completion takes; counts as running, or waiting, until then
SIGTERM                it exits at once, whatever it holds

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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


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

    def complete(self, seconds: float) -> None:
        self._count(1)
        try:
            with self.slots:
                time.sleep(seconds)
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
        else:
            self._answer(404, "text/plain", b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path != "/v1/completions":
            self._answer(404, "text/plain", b"")
            return
        try:
            asked = json.loads(body or b"{}")
            seconds = float(asked.get("seconds", self.engine.service_s))
        except (ValueError, TypeError, AttributeError):
            self._answer(400, "text/plain", b"")
            return
        self.engine.complete(min(max(seconds, 0.0), 600.0))
        answer = {
            "object": "text_completion",
            "choices": [{"index": 0, "text": "...", "finish_reason": "stop"}],
            "instance": os.environ.get("WATTSHIFT_INSTANCE"),
        }
        self._answer(200, "application/json", json.dumps(answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests: a probe a second would fill the log."""

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
