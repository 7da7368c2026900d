"""Heads without end, too large or too slow, on real sockets; and all that must go on working."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from typer.testing import CliRunner

import services
from services.cli.main import app as wattshift
from services.kit import crowd, heads
from services.kit.crowd import Crowd, show_known
from tests.support.routers import InThisLoop

MOST = heads.MOST_HEAD_BYTES
SHORT_S = 0.3
"""A head's time where a test waits for its end."""


known_or_not = pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])


class App:
    """Answers with its path and the number of bytes of the body.

    Below `/known` it knows who asks, before it reads. `/refused` is answered without a look at the body.

    Attributes:
        asked: Paths of the requests that it got.
        gate: Answers of `/slow` end once it is set; bodies of `/later` are read then.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        self.asked.append(path)
        if path.startswith("/known"):
            show_known(scope)
        if path.endswith("/later"):
            await self.gate.wait()
        size, more = 0, path != "/refused"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        headers = [(b"transfer-encoding", b"chunked")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/much":
            await send({"type": "http.response.body", "body": b"a" * 30_000_000, "more_body": True})
        if path.endswith("/slow"):
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


async def become(client: Client, is_known: bool) -> None:
    """Have a client show a key, if it is to be a known one."""
    if is_known:
        client.send(b"GET /known HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.until(b"</known 0>")
        client.got = b""


@dataclass
class Served:
    app: App
    port: int
    server: uvicorn.Server

    @asynccontextmanager
    async def client(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


@asynccontextmanager
async def a_server(**options: Any) -> AsyncIterator[Served]:
    app = App()
    config = heads.ServerConfig(app, timeout_keep_alive=75, **options)
    listening = socket.create_server(("127.0.0.1", 0))
    server = InThisLoop(config)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    await server.is_up.wait()
    try:
        yield Served(app, listening.getsockname()[1], server)
    finally:
        app.gate.set()
        server.should_exit = True
        await running


async def test_a_head_is_written_with_the_body_that_follows_at_once_and_alone_if_none_does() -> None:
    class Transport:
        def __init__(self) -> None:
            self.writes: list[bytes] = []

        def write(self, data: bytes) -> None:
            self.writes.append(data)

        def close(self) -> None:
            self.writes.append(b"closed")

    transport = Transport()
    joined = heads._Joined(transport, asyncio.get_running_loop())  # pyright: ignore[reportPrivateUsage, reportArgumentType]
    joined.write(b"HTTP/1.1 200 OK\r\n\r\n")
    joined.write(b"cake")
    joined.write(b"more")
    assert transport.writes == [b"HTTP/1.1 200 OK\r\n\r\ncake", b"more"]
    joined.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert len(transport.writes) == 2
    await asyncio.sleep(0)
    assert transport.writes[2:] == [b"HTTP/1.1 204 No Content\r\n\r\n"]
    joined.write(b"HTTP/1.1 500 Internal Server Error\r\n\r\n")
    joined.close()
    assert transport.writes[3:] == [b"HTTP/1.1 500 Internal Server Error\r\n\r\n", b"closed"]


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


@pytest.mark.parametrize("line", [10**7, 60, 9_000], ids=["one value", "many short ones", "long ones"])
async def test_a_head_without_end_is_refused_and_closed(line: int) -> None:
    async with a_server() as served, served.client() as client:
        client.send(a_head(MOST + 200_000, line=line)[:-2][: MOST + 1])
        answer = await client.end()
        assert answer.startswith(b"HTTP/1.1 431")
        assert not served.app.asked


@pytest.mark.parametrize("piece", [1_000, 16_384, 10**6])
@pytest.mark.parametrize(("size", "status"), [(MOST, b"200"), (MOST + 1, b"431")])
async def test_the_limit_is_exact_whatever_the_pieces_and_again_on_a_kept_connection(
    piece: int, size: int, status: bytes
) -> None:
    async with a_server() as served, served.client() as client:
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
    async with a_server() as served, served.client() as client:
        client.send(before + (b"y" * 2 * MOST if before else b"\r\n" * MOST))
        assert b" 200 " not in await client.end()


@pytest.mark.parametrize("before", ["GET {} HTTP/1.1\r\nhost: x\r\n\r\n", "sized", "chunked", "trailers"])
@pytest.mark.parametrize("together", [0, 5_000, MOST + 1])
@pytest.mark.parametrize(("size", "status"), [(MOST, b"200"), (MOST + 1, b"431")])
@known_or_not
async def test_a_head_behind_another_request_has_the_same_limit(
    before: str, together: int, size: int, status: bytes, is_known: bool
) -> None:
    first = {
        "sized": "POST {} HTTP/1.1\r\ncontent-length: 9\r\n\r\nab\n\ncd\r\n\n",
        "chunked": "POST {} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4\r\nab\n\n\r\n0\r\n\r\n",
        "trailers": "POST {} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: y\r\n\r\n",
    }.get(before, before)
    async with a_server() as served, served.client() as client:
        await become(client, is_known)
        head = a_head(size, "/behind")
        client.send(first.format("/slow").encode() + head[:together])
        await client.until(b"<begun>")
        client.send(head[together:])
        served.app.gate.set()
        await client.until(b"</slow")
        await client.until(b"</behind 0>" if status == b"200" else b"HTTP/1.1 431")
        assert served.app.asked[is_known:] == ["/slow", "/behind"][: 1 + (status == b"200")]


@pytest.mark.parametrize(
    "request_in_pieces",
    [(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n",)]
    + [
        (chunked[:at], chunked[at:])
        for chunked in [b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"]
        for at in (-1, -2, -3, -4)
    ],
)
async def test_what_comes_behind_a_request_waits_as_it_came(request_in_pieces: tuple[bytes, ...]) -> None:
    async with a_server() as served, served.client() as client:
        for piece in request_in_pieces[:-1]:
            client.send(piece)
            await asyncio.sleep(0.05)
        client.send(request_in_pieces[-1] + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n" * 3_000)
        await client.until(b"<begun>")
        (connection,) = served.server.server_state.connections
        assert not connection.pipeline  # type: ignore[union-attr]
        served.app.gate.set()
        await client.until(b"</next 0>", 3_000)


@pytest.mark.parametrize("piece", [1, 7])
async def test_a_head_in_small_pieces_is_parsed_once(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    base = heads.HttpToolsProtocol
    before = base.data_received
    monkeypatch.setattr(base, "data_received", lambda self, data: (parsed.append(len(data)), before(self, data))[1])
    async with a_server() as served, served.client() as client:
        head = a_head(5_000)
        for at in range(0, len(head), piece):
            client.send(head[at : at + piece])
            await asyncio.sleep(0)
        await client.until(b"</ 0>")
        assert parsed == [5_000]


@known_or_not
@pytest.mark.parametrize("piece", [1, 2, 3, 5, 11, 97, 10_000])
async def test_messages_end_where_they_end_whatever_the_pieces(piece: int, is_known: bool) -> None:
    sent = (
        b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 12\r\n\r\n\r\n\r\nab\n\n\r\n\r\n"
        b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n"
        b"POST /3 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        b"8\r\n\r\n\r\n\n\n\r\n\r\n3;x=y\r\nabc\r\n0\r\nlast: one\r\n\r\n"
        b"\r\nPOST /4 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        b"POST /5 HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\nGET /6 HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    async with a_server() as served, served.client() as client:
        await become(client, is_known)
        for at in range(0, len(sent), piece):
            client.send(sent[at : at + piece])
            await asyncio.sleep(0.001)
        await client.until(b"</6 0>")
        assert re.findall(rb"<(/\d \d+)>", client.got) == [b"/1 12", b"/2 0", b"/3 11", b"/4 0", b"/5 0", b"/6 0"]


POST = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"


async def drip(client: Client, piece: bytes, every_s: float) -> bytes:
    """Send a piece again and again, until the server closes the connection; return what it said."""

    async def send() -> None:
        while True:
            client.send(piece)
            await asyncio.sleep(every_s)

    sending = asyncio.create_task(send())
    try:
        return await client.end()
    finally:
        sending.cancel()


async def test_the_request_of_an_unknown_client_ends_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "UNKNOWN_S", SHORT_S)
    async with a_server() as served:
        async with served.client() as client:
            client.send(POST % b"/upload")
            assert (await drip(client, b"a" * 1_000, SHORT_S / 20)).startswith(b"HTTP/1.1 408")
        async with served.client() as client:
            client.send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"</slow" not in await client.end()
        async with served.client() as client:
            client.send(b"GET /known/slow HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.until(b"<begun>")
            await asyncio.sleep(3 * SHORT_S)
            served.app.gate.set()
            await client.until(b"</known/slow 0>")
            client.got = b""
            client.send(b"POST /upload HTTP/1.1\r\nhost: x\r\ncontent-length: 6\r\n\r\nabc")  # still known
            await asyncio.sleep(3 * SHORT_S)
            client.send(b"def")
            await client.until(b"</upload 6>")


async def test_a_known_client_sends_a_body_at_a_least_rate_unless_it_has_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads, "BODY_S", SHORT_S)
    monkeypatch.setattr(heads, "UNKNOWN_S", SHORT_S)
    async with a_server() as served:
        async with served.client() as client:
            client.send(POST % b"/known")
            slow = int(heads.LEAST_BODY_BYTES_PER_S * SHORT_S / 20)
            assert (await drip(client, b"a" * slow, SHORT_S / 5)).startswith(b"HTTP/1.1 408")
        async with served.client() as client:
            client.send(POST % b"/known")
            for _ in range(20):
                client.send(b"a" * 1_000)
                await asyncio.sleep(SHORT_S / 5)
            client.send(b"a" * 980_000)
            await client.until(b"</known 1000000>")
        async with served.client() as client:
            client.send(POST % b"/known/later" + b"a" * 1_000_000)
            await asyncio.sleep(3 * SHORT_S)
            served.app.gate.set()
            await client.until(b"</known/later 1000000>")


async def test_what_is_left_of_a_body_that_was_answered_has_the_time_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served:
        async with served.client() as client:
            client.send(POST % b"/refused")
            await client.until(b"</refused 0>")
            await drip(client, b"a" * 1_000, SHORT_S / 20)
        async with served.client() as client:
            client.send(POST % b"/refused" + b"a" * 1_000_000 + b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.until(b"</next 0>")


async def test_an_unknown_client_that_reads_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "UNKNOWN_S", SHORT_S)
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served, served.client() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET /much HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(20):
            while not served.app.asked or served.server.server_state.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("before", [b"", b"\r\n\r\n", b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_half_a_head_of_a_known_client_ends_its_connection(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served, served.client() as client:
        await become(client, True)
        client.send(before + b"GET / HT")
        assert b"HTTP/1.1 408" in await client.end()


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\nx-half: "])
@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
async def test_a_head_that_does_not_come_ends_its_connection(
    sent: bytes, is_second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_second and not sent:
        return  # an unused connection: kept, as below
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served, served.client() as client:
        if is_second:
            client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.until(b"</1 0>")
            client.got = b""
        client.send(sent)
        assert (await client.end()).startswith(b"HTTP/1.1 408")
        assert len(served.app.asked) == is_second


async def test_a_head_that_drips_gains_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served, served.client() as client:
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


async def test_unused_connections_slow_bodies_and_long_answers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "HEAD_S", SHORT_S)
    async with a_server() as served, served.client() as client:
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


async def test_many_small_requests_at_once_are_all_answered_in_order() -> None:
    async with a_server() as served, served.client() as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % at for at in range(1_000)))
        await client.until(b"</999 0>")
        assert served.app.asked == [f"/{at}" for at in range(1_000)]
        assert re.findall(rb"</(\d+) 0>", client.got) == [b"%d" % at for at in range(1_000)]


async def test_bodies_are_not_limited() -> None:
    async with a_server() as served, served.client() as client:
        client.send(b"POST /sized HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n" + b"a" * 3_000_000)
        client.send(b"POST /chunked HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"3e8\r\n" + b"a" * 1_000 + b"\r\n")
        client.send((b"186a0\r\n" + b"a" * 100_000 + b"\r\n") * 5 + b"0\r\n\r\n")
        client.send(a_head(60_000, "/behind"))
        await client.until(b"</behind 0>")
        assert re.findall(rb"<(/\w+ \d+)>", client.got) == [b"/sized 3000000", b"/chunked 501000", b"/behind 0"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("ca")
    for words in (["init"], ["issue", "host", "--host", "localhost"]):
        made = CliRunner().invoke(wattshift, ["ca", *words, "--folder", str(folder)])
        assert made.exit_code == 0, made.output
    return {"ssl_certfile": str(folder / "host.crt"), "ssl_keyfile": str(folder / "host.key")}


def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def test_requests_over_tls(certificate: dict[str, str]) -> None:
    async with a_server(**certificate) as served, served.client(unverified()) as client:
        client.send(b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"a" * 300_000)
        await client.until(b"</1 300000>")
        client.send(b"GET /2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"</2 0>" in await client.end()
    assert not in_all()


def begun_tls(port: int) -> tuple[socket.socket, ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    """Return a connection whose client has said hello before the server could accept it."""
    came, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = unverified().wrap_bio(came, goes)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(goes.read())
    return connection, tls, came, goes


def asked_by_tls(connection: socket.socket, tls: ssl.SSLObject, came: ssl.MemoryBIO, goes: ssl.MemoryBIO) -> bytes:
    """Return the answer to a request; blocks."""

    def done(act: Callable[[], Any]) -> Any:
        while True:
            try:
                return act()
            except ssl.SSLWantReadError:
                connection.sendall(goes.read())
                came.write(connection.recv(65_536) or pytest.fail("the server closed the connection"))

    with connection:
        done(tls.do_handshake)
        tls.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
        got = b""
        while b"</1 0>" not in got:
            got += done(lambda: tls.read(65_536))
        return got


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_client_that_said_hello_before_it_was_accepted_is_answered(
    loop: Callable[[], asyncio.AbstractEventLoop], certificate: dict[str, str]
) -> None:
    async def answer() -> bytes:
        async with a_server(**certificate) as served:
            return await asyncio.to_thread(asked_by_tls, *begun_tls(served.port))

    with asyncio.Runner(loop_factory=loop) as runner:
        assert b"HTTP/1.1 200" in runner.run(answer())


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_connection_counts_and_ends_before_it_has_begun_tls(
    sent: bytes, certificate: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEAD_S", 2 * SHORT_S)
    async with a_server(**certificate) as served, served.client() as client:
        async with asyncio.timeout(20):
            while not in_all():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.send(sent)
        await client.end()
        async with asyncio.timeout(20):
            while in_all():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not served.app.asked


async def test_a_newcomer_is_answered_where_every_place_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CROWD", Crowd(10))
    async with a_server() as served, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(served.client()) for _ in range(50)]
        async with served.client() as client:
            client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.until(b"</1 0>")
        for each in held[:40]:
            assert await each.end() == b""
        held[-1].send(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        await held[-1].until(b"</2 0>")


@pytest.mark.parametrize("sends", ["at once", "later", ""], ids=["asks", "asks later", "is silent"])
async def test_of_many_that_one_peer_opens_at_once_those_that_ask_are_answered(
    sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "CROWD", Crowd(10_000))
    monkeypatch.setattr(crowd, "JUST_S", 60.0 if sends == "later" else 0.0)
    count = 1_500  # fewer than the kernel keeps for a server
    async with a_server() as served, contextlib.AsyncExitStack() as stack:
        held, request = list[socket.socket](), b"GET /1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        for _ in range(count):  # before this loop turns again
            held.append(stack.enter_context(socket.create_connection(("127.0.0.1", served.port))))
            if sends == "at once":
                held[-1].sendall(request)
        for each in held:
            each.setblocking(False)
        opened = [await asyncio.open_connection(sock=each) for each in held]
        if sends == "later":
            while in_all() < count:  # noqa: ASYNC110, of the other end
                await asyncio.sleep(0.01)
            for _, writer in opened:
                writer.write(request)
        if sends:
            answers = [await Client(*each).end() for each in opened]
            assert sum(b"</1 0>" in each for each in answers) == count
        else:
            async with served.client() as client:
                client.send(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
                await client.until(b"</1 0>")
            assert in_all() <= 2 * crowd.MOST_OF_PEER + 1
        for _, writer in opened:
            writer.close()


def in_all() -> int:
    """Return how many connections have a place."""
    return len(heads.CROWD._unknown) + len(heads.CROWD._known)  # pyright: ignore[reportPrivateUsage]


def test_every_server_of_ours_has_these_bounds() -> None:
    found = 0
    for package in (*services.__path__, "gateway", "gpu_agent", "carbon_service", "optimizer_service"):
        for path in Path(package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"uvicorn\.(run|Config)\(", text), path
            found += len(re.findall(r"\bServerConfig\(\n", text))
    assert found == 2


async def test_a_server_turns_seldom_and_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_TURN_S", 3_600.0)
    beats: list[None] = []

    async def beat() -> None:
        beats.append(None)

    config = heads.ServerConfig(lambda *_: None, callback_notify=beat, timeout_notify=0)
    config.load()
    server = heads.Server(config)
    running = asyncio.create_task(server.main_loop())
    await asyncio.sleep(0.5)
    assert len(beats) == 1
    assert server.server_state.default_headers[0][0] == b"date"
    threading.Thread(target=server.handle_exit, args=(signal.SIGTERM, None)).start()  # whoever gets the signal
    async with asyncio.timeout(60):
        await running

    monkeypatch.setattr(heads, "_TURN_S", 0.001)
    server = heads.Server(config)
    running = asyncio.create_task(server.main_loop())
    async with asyncio.timeout(60):
        while len(beats) < 5:  # noqa: ASYNC110, the server does not say when it has turned
            await asyncio.sleep(0.001)
    server.handle_exit(signal.SIGTERM, None)
    async with asyncio.timeout(60):
        await running
