"""A load generator on bare sockets, run in a process of its own so that it shares no event loop with what it measures.

Closed: every connection sends its next request when it has its answer. Open: requests are due at fixed times, whether
or not the ones before were answered, and a latency counts from when its request was due.
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import uvloop


@dataclass
class Load:
    """What to send.

    Attributes:
        body: `%d` in it is replaced by a number of its own for every request, `%text` by text that begins with it.
        text_characters: Of such a text.
        per_second: Open load at this rate over all connections; 0 for a closed one.
        status: Of an answer that counts.
    """

    host: str
    port: int
    path: str
    key: str
    body: str
    connections: int
    duration_s: float
    warm_up_s: float
    per_second: float = 0
    run: str = "run"
    status: int = 201
    text_characters: int = 0


@dataclass
class Result:
    """What came back after the warm-up, over all connections."""

    requests: int
    failed: int
    per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    first_failure: str = ""


def measure(load: Load) -> Result:
    """Carry out a load in another process."""
    command = [sys.executable, "-m", "tests.benchmarks.load", json.dumps(asdict(load))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return Result(**json.loads(done.stdout))


class _Connection(asyncio.Protocol):
    """One connection that waits for each answer."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(rest) >= length and self._answer and not self._answer.done():
            self._buffer = rest[length:]
            self._answer.set_result((int(head[9:12]), rest[:length]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError(str(error)))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body of the answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)  # type: ignore[attr-defined]
        return await self._answer


class _Generator:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._text = ("%d " + "said at great length, " * (load.text_characters // 22 + 1))[: load.text_characters]
        self._sent = 0
        self._latencies_s: list[float] = []
        self._failed = 0
        self._first_failure = ""
        self._begin_s = 0.0
        self._end_s = 0.0

    async def run(self) -> Result:
        load = self._load
        loop = asyncio.get_running_loop()
        connections = [
            (await loop.create_connection(_Connection, load.host, load.port))[1] for _ in range(load.connections)
        ]
        self._begin_s = time.perf_counter() + load.warm_up_s
        self._end_s = self._begin_s + load.duration_s
        work = self._open if load.per_second else self._closed
        await asyncio.gather(*(work(index, connection) for index, connection in enumerate(connections)))
        taken = sorted(self._latencies_s)
        return Result(
            requests=len(taken),
            failed=self._failed,
            per_s=len(taken) / load.duration_s,
            p50_ms=taken[len(taken) // 2] * 1e3,
            p99_ms=taken[int(len(taken) * 0.99)] * 1e3,
            longest_ms=taken[-1] * 1e3,
            first_failure=self._first_failure,
        )

    async def _closed(self, _: int, connection: _Connection) -> None:
        while (now_s := time.perf_counter()) < self._end_s:
            await self._ask(connection, now_s)

    async def _open(self, index: int, connection: _Connection) -> None:
        load = self._load
        interval_s = load.connections / load.per_second
        due_s = self._begin_s - load.warm_up_s + interval_s * index / load.connections
        while due_s < self._end_s:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            await self._ask(connection, due_s)
            due_s += interval_s

    async def _ask(self, connection: _Connection, since_s: float) -> None:
        status, body = await connection.ask(self._request())
        now_s = time.perf_counter()
        if status != self._load.status:
            self._failed += 1
            self._first_failure = self._first_failure or f"{status} {body[:300]!r}"
        elif self._begin_s <= now_s <= self._end_s:
            self._latencies_s.append(now_s - since_s)

    def _request(self) -> bytes:
        load = self._load
        self._sent += 1
        body = load.body.replace("%text", self._text).replace("%d", str(self._sent)).encode()
        head = (
            f"POST {load.path} HTTP/1.1\r\nhost: {load.host}\r\nauthorization: Bearer {load.key}\r\n"
            f"content-type: application/json\r\nidempotency-key: {load.run}-{self._sent}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(_Generator(Load(**json.loads(sys.argv[1]))).run()))))
