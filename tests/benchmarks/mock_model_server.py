"""A model server that costs as little as possible: a fixed answer, or a stream of two tokens 5 ms apart.

Run in a process of its own: ``python -m tests.benchmarks.mock_model_server PORT``. It also stands in for serving,
admission and telemetry, so that a benchmark starts only one process beside the router.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime

import uvloop

MODEL = "llama-70b"
APP = "images"
APP_INSTANCES = 64
GAP_S = 0.005
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 12, "completion_tokens": 1, "total_tokens": 13}
ANSWER = json.dumps({"id": "chatcmpl-0123456789", "object": "chat.completion", "created": 1, "model": MODEL,
                     "choices": [_CHOICE], "usage": _USAGE}, separators=(",", ":")).encode()  # fmt: skip
_LABEL = {"name": "label", "shape": [1], "datatype": "BYTES", "data": ["dam"]}
LABEL = json.dumps({"model_name": APP, "outputs": [_LABEL]}, separators=(",", ":")).encode()
TOKEN = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'


def _whole(content: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        len(content),
        content,
    )


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Server(asyncio.Protocol):
    """One connection; requests come one at a time."""

    port = 0
    hold_s = 0.0
    tokens = 2
    servers = 2

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].partition(b"\r\n")[0]) if at >= 0 else 0
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._answer(head, rest[:length])

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        write = self._transport.write  # type: ignore[attr-defined]
        if path == b"/v1/chat/completions":
            if b'"stream":true' in body or b'"stream": true' in body:
                asyncio.get_running_loop().create_task(self._stream())
            else:
                write(_whole(ANSWER))
        elif path in (b"/label", b"/v2/models/%s/infer" % APP.encode()):
            write(_whole(LABEL))
        elif path == b"/internal/routing":
            write(_whole(table(self.port, self.servers)))
        elif path == b"/internal/keys/resolve":
            identity = {"tenant_id": "acme", "role": "user", "key_id": "key_1"}
            limits = {"requests_per_s": 1_000_000.0, "burst": 1_000_000}
            write(_whole(json.dumps({"identity": identity, "limits": limits}).encode()))
        elif path.endswith(b"/traffic"):
            write(_whole(b'{"windows":0,"requests":0}'))
        elif path == b"/internal/request-usage":
            write(_whole(b'{"usages":0}'))
        else:
            write(_whole(b"{}"))
            if b"\r\nConnection: close" in head:
                self._transport.close()

    async def _stream(self) -> None:
        write = self._transport.write  # type: ignore[attr-defined]
        write(STREAM_HEAD + _chunk(TOKEN))
        for _ in range(self.tokens - 1):
            await asyncio.sleep(GAP_S if not self.hold_s else self.hold_s)
            write(_chunk(TOKEN))
        write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def table(port: int, servers_per_class: int) -> bytes:
    """Return a routing table: a pool of four classes with some servers each, in two places, and an application."""
    classes = [{"name": name, "max_latency_s": 30.0} for name in ("SS", "SL", "LS", "LL")]
    pool = {"name": "chat", "tenant_id": "acme", "models": [MODEL], "partition": "a"}
    pool |= {"input_tokens": 184, "output_tokens": 444, "classes": classes}
    servers = [
        {
            "id": f"instance_{name}_{number}",
            "pool": "chat",
            "url": f"http://127.0.0.1:{port}",
            "tenant_id": "acme",
            "location": ("here", "there")[number % 2],
            "request_class": name,
            "state": "ready",
            "capacity": 4_096,
            "job_id": f"job_{name}_{number}",
            "power_w": 400.0,
            "gco2_per_kwh": (300.0, 450.0)[number % 2],
        }
        for name in ("SS", "SL", "LS", "LL")
        for number in range(servers_per_class)
    ]
    instances = [
        {
            "id": f"instance_{number}",
            "app": APP,
            "variant": "b1",
            "accuracy_pct": 78.4,
            "slice": "1g",
            "url": f"http://127.0.0.1:{port}",
            "state": "ready",
            "service_ms": 2.5,
            "busy_w": 17.1,
            "idle_w": 12.0,
            "gco2_per_kwh": 300.0,
            "job_id": f"job_{number}",
            "location": "here",
        }
        for number in range(APP_INSTANCES)
    ]
    table = {"made_at": datetime.now(UTC).isoformat(), "pools": [pool], "servers": servers}
    table |= {"apps": [{"name": APP, "tenant_id": "acme"}], "app_servers": instances}
    return json.dumps(table).encode()


async def serve(port: int) -> None:
    """Serve until killed."""
    Server.port = port
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", port, backlog=4_096)
    await server.serve_forever()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Server.hold_s, Server.tokens, Server.servers = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    uvloop.run(serve(int(sys.argv[1])))
