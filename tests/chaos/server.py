"""A model server whose answers can be told apart: each piece names the request, the process and its place.

It speaks OpenAI's completions and the Open Inference Protocol v2, and answers all else as plain HTTP. It runs by its
path, with the standard library alone, since storms start it over and over: ``server.py NOTES``. What arrives is written
to NOTES before anything else is done with it, a line for each request. As ``job.py`` does, it notices a device that
somebody else holds.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from job import hold, node  # pyright: ignore[reportImplicitRelativeImport]

PIECE_S = 0.02
INFER_S = 0.05


class Server(ThreadingHTTPServer):
    """Counts what it holds, and numbers what arrives."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, notes: Path, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.own = f"{os.environ['WATTSHIFT_ALLOCATION_ID']}-{os.getpid()}"
        self.held = 0
        self._numbers = itertools.count()
        self._arrived = os.open(notes / f"arrived-{self.own}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def arrive(self, visit: str) -> str:
        """Write down a request, and return what its answer is told apart by."""
        os.write(self._arrived, f"{visit}\n".encode())
        return f"{self.own}-{next(self._numbers)}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    @property
    def own_server(self) -> Server:
        """The server that it belongs to."""
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        """Answer probes: it is ready once it listens."""
        if self.path == "/metrics":
            figures = f"vllm:num_requests_running {self.own_server.held}\nvllm:num_requests_waiting 0\n"
            self._answer(figures.encode(), "text/plain")
        else:
            self._answer(b"{}")

    def do_POST(self) -> None:
        """Answer a request."""
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.own_server.held += 1
        try:
            if self.path == "/v1/completions":
                self._complete(json.loads(body))
            elif self.path.endswith("/infer"):
                self._infer(json.loads(body))
            else:
                visit = body.decode()
                stamp = self.own_server.arrive(visit)
                time.sleep(INFER_S)
                self._answer(json.dumps({"visit": visit, "stamp": stamp}).encode())
        except ConnectionError:
            self.close_connection = True  # whoever asked has left
        finally:
            self.own_server.held -= 1

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def _infer(self, asked: Any) -> None:
        stamp = self.own_server.arrive(asked["id"])
        time.sleep(INFER_S)
        output = {"name": "visit", "datatype": "BYTES", "shape": [1], "data": asked["inputs"][0]["data"]}
        self._answer(json.dumps({"id": asked["id"], "stamp": stamp, "outputs": [output]}).encode())

    def _complete(self, asked: Any) -> None:
        visit, pieces = asked["prompt"], asked["max_tokens"]
        stamp = self.own_server.arrive(visit)
        usage = {"prompt_tokens": 1, "completion_tokens": pieces, "total_tokens": pieces + 1}
        words = [f"{visit} {stamp} {number}/{pieces}" for number in range(pieces)]
        head = {"id": stamp, "object": "text_completion", "created": 0, "model": asked["model"]}
        if not asked.get("stream"):
            time.sleep(PIECE_S * pieces)
            choices = [{"index": 0, "finish_reason": "length", "text": "\n".join(words)}]
            self._answer(json.dumps(head | {"choices": choices, "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for word in words:
            time.sleep(PIECE_S)
            self._event(json.dumps(head | {"choices": [{"index": 0, "finish_reason": None, "text": word}]}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        event = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def _answer(self, body: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)


def main() -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    notes = Path(sys.argv[1])
    for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        hold(notes / f"{node()}-{device}.lock", notes, "device-held-twice")
    Server(notes, int(os.environ["WATTSHIFT_PORT"])).serve_forever()


if __name__ == "__main__":
    main()
