"""Heads without end, too large or too slow, on real sockets; and all that must go on working."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import services
from services.kit import heads
from tests.support.routers import InThisLoop

MOST = heads.MOST_HEAD_BYTES
SHORT_S = 0.3
"""A head's time where a test waits for its end."""
H11 = heads._H11  # pyright: ignore[reportPrivateUsage]
both = pytest.mark.parametrize("protocol", [heads.PROTOCOL, H11], ids=["httptools", "h11"])


class App:
    """Answers with its path and the number of bytes of the body.

    Attributes:
        asked: Paths of the requests that it got.
        gate: Answers of `/slow` end once it is set.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        self.asked.append(path)
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        headers = [(b"transfer-encoding", b"chunked")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/slow":
            await send({"type": "http.response.body", "body": b"<begun>", "more_body": True})
            await self.gate.wait()
        await send({"type": "http.response.body", "body": b"<%s %d>" % (path.encode(), size)})


@dataclass
class Client:
    """A connection, and what it has read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: bytes = b""

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def until(self, text: bytes, count: int = 1) -> None:
        """Read until something has come so often."""
        async with asyncio.timeout(20):
            while self.got.count(text) < count:
                piece = await self.reader.read(65_536)
                assert piece, f"closed after {self.got[-200:]!r}"
                self.got += piece

    async def end(self) -> bytes:
        """Read until the server closes the connection; return all that came."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65_536):
                    self.got += piece
        return self.got


@dataclass
class Served:
    app: App
    port: int

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def a_server(protocol: type[asyncio.Protocol]) -> AsyncIterator[Served]:
    app = App()
    config = uvicorn.Config(app, http=protocol, log_config=None, access_log=False, timeout_keep_alive=75)
    listening = socket.create_server(("127.0.0.1", 0))
    server = InThisLoop(config)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    try:
        yield Served(app, listening.getsockname()[1])
    finally:
        app.gate.set()
        server.should_exit = True
        await running


def a_head(size: int, path: str = "/", line: int = 70_000) -> bytes:
    """Return a request whose head has so many bytes, in headers of at most one length."""
    begin = f"GET {path} HTTP/1.1\r\nhost: x\r\n".encode()
    left = size - len(begin) - 2
    lines: list[bytes] = []
    while left:
        length = left if left <= line else min(line, left - 10)
        lines.append(b"x: " + b"a" * (length - 5) + b"\r\n")
        left -= length
    head = begin + b"".join(lines) + b"\r\n"
    assert len(head) == size
    return head


@both
@pytest.mark.parametrize("line", [10**7, 60, 9_000], ids=["one value", "many short ones", "long ones"])
async def test_a_head_without_end_is_refused_and_closed(protocol: type[asyncio.Protocol], line: int) -> None:
    async with a_server(protocol) as served, served.client() as client:
        client.send(a_head(MOST + 200_000, line=line)[:-2][: MOST + 1])
        answer = await client.end()
        assert answer.startswith(b"HTTP/1.1 431" if protocol is heads.PROTOCOL else b"HTTP/1.1 400")
        assert not served.app.asked


@pytest.mark.parametrize("piece", [1_000, 16_384, 10**6])
@pytest.mark.parametrize(("size", "status"), [(MOST, b"200"), (MOST + 1, b"431")])
async def test_the_limit_is_exact_whatever_the_pieces_and_again_on_a_kept_connection(
    piece: int, size: int, status: bytes
) -> None:
    async with a_server(heads.PROTOCOL) as served, served.client() as client:
        for path in ("/1", "/2"):
            client.send(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            await client.until(f"<{path} 0>".encode())
        client.got = b""
        head = a_head(size)
        for at in range(0, size, piece):
            client.send(head[at : at + piece])
            await asyncio.sleep(0)
        await client.until(b"HTTP/1.1 " + status)
        assert served.app.asked == ["/1", "/2", "/"][: 3 if status == b"200" else 2]


@pytest.mark.parametrize("before", [b"", b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "])
async def test_neither_empty_lines_nor_trailers_go_on_for_ever(before: bytes) -> None:
    async with a_server(heads.PROTOCOL) as served, served.client() as client:
        client.send(before + (b"y" * 2 * MOST if before else b"\r\n" * MOST))
        assert b" 200 " not in await client.end()


async def test_what_is_refused_within_an_answer_only_ends_it() -> None:
    async with a_server(heads.PROTOCOL) as served, served.client() as client:
        client.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.until(b"<begun>")
        client.send(a_head(2 * MOST))
        answer = await client.end()
        assert answer.count(b"HTTP/1.1") == 1
        assert served.app.asked == ["/slow"]


@both
@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-half: "])
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
async def test_a_head_that_does_not_come_ends_its_connection(
    protocol: type[asyncio.Protocol], sent: bytes, is_second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_second and not sent:
        return  # an unused connection: kept, as below
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server(protocol) as served, served.client() as client:
        if is_second:
            client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.until(b"</1 0>")
            client.got = b""
        client.send(sent)
        assert (await client.end()).startswith(b"HTTP/1.1 408")
        assert len(served.app.asked) == is_second


@both
async def test_a_head_that_drips_gains_no_time(
    protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server(protocol) as served, served.client() as client:
        client.send(b"GET / HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                client.send(b"x: y\r\n")
                await asyncio.sleep(SHORT_S / 20)

        dripping = asyncio.create_task(drip())
        answer = await client.end()
        dripping.cancel()
        assert answer.startswith(b"HTTP/1.1 408")
        assert not served.app.asked


@both
async def test_unused_connections_slow_bodies_and_long_answers_stay(
    protocol: type[asyncio.Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server(protocol) as served, served.client() as client:
        client.send(b"POST /upload HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc")
        await asyncio.sleep(2 * SHORT_S)
        client.send(b"def")
        await client.until(b"</upload 6>")
        await asyncio.sleep(2 * SHORT_S)
        client.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /next HTT")  # half of another behind it
        await client.until(b"<begun>")
        await asyncio.sleep(2 * SHORT_S)
        served.app.gate.set()
        await client.until(b"</slow 0>")
        client.send(b"P/1.1\r\nhost: x\r\n\r\n")
        await client.until(b"</next 0>")


@both
async def test_many_small_requests_at_once_are_all_answered_in_order(protocol: type[asyncio.Protocol]) -> None:
    async with a_server(protocol) as served, served.client() as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % at for at in range(1_000)))
        await client.until(b"</999 0>")
        assert served.app.asked == [f"/{at}" for at in range(1_000)]
        assert re.findall(rb"</(\d+) 0>", client.got) == [b"%d" % at for at in range(1_000)]


@both
async def test_bodies_are_not_limited(protocol: type[asyncio.Protocol]) -> None:
    async with a_server(protocol) as served, served.client() as client:
        client.send(b"POST /sized HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n" + b"a" * 3_000_000)
        client.send(b"POST /chunked HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"3e8\r\n" + b"a" * 1_000 + b"\r\n")
        client.send((b"186a0\r\n" + b"a" * 100_000 + b"\r\n") * 5 + b"0\r\n\r\n")
        client.send(a_head(60_000, "/behind"))
        await client.until(b"</behind 0>")
        assert re.findall(rb"<(/\w+ \d+)>", client.got) == [b"/sized 3000000", b"/chunked 501000", b"/behind 0"]


def test_every_server_of_ours_has_these_bounds() -> None:
    found = 0
    for package in (*services.__path__, "gateway", "gpu_agent", "carbon_service", "optimizer_service"):
        for path in Path(package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "uvicorn.run(" not in text
            for call in re.findall(r"uvicorn\.Config\((?s:.*?)\n    \)", text):
                assert "http=PROTOCOL" in call, path
                found += 1
    assert found == 2
