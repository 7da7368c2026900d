"""Requests that a gateway carries: the endpoint picker before the router's real door, lanes and cost model.

What holds of requests, places and answers, and the model servers, are those of ``router``. The gateway is that of the
picker's tests, whose streams and connections are here simulated: what either end says is late, the gateway leaves, or
ends its half, when its client leaves or the server breaks off, and answers itself where a server does not.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httptools
from grpc.aio import AbortError

from services.router.app import Router
from services.router.picking import picker
from services.router.picking.picker import OVER, Picker
from services.router.picking.protocol import FULL_DUPLEX, Reply, Said
from tests.simulation import router
from tests.simulation.loop import Simulation
from tests.support import gateways
from tests.support.gateways import Gateway, GatewayError

SILENCE_S = 3.0
"""A gateway waits for a server's next byte for so long."""
ENDS_S = 2.0
"""Once the gateway has ended a stream, the picker does so within this time."""
PIECE_BYTES, CHUNK_BYTES = 100, 150
"""Of bodies, to the picker and from it: less than the bodies here, so that these pass in pieces."""
ELSEWAY = 2
"""A mode in which a gateway gathers a body first."""
ELSEWHERE = "10.0.0.1:8000"
"""Where no server is."""


class _BrokenOffError(Exception):
    """A server broke off its answer, or its client the connection."""


class _Stream:
    """A stream of external processing: what the picker has as a context, and the gateway as a call."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.said, self.replies = asyncio.Queue[Any](), asyncio.Queue[Any]()
        self.processing: asyncio.Task[None] | None = None
        self.times_told = 0
        self.client: Any = None
        self._content = b""
        self.is_told = self.has_head = self.is_broken = False

    def process(self, real: Picker) -> None:
        """Have the picker serve it."""
        self.processing = self._simulation.start(self._process(real))

    async def _process(self, real: Picker) -> None:
        try:
            last = Reply.FromString(await real._process(None, _Context(self)))
            is_own = last.WhichOneof("response") == "immediate_response" and self.is_told and not self.has_head
            self._simulation.check("nobody answers for a server that was asked", not is_own, str(last))
            await self.late()
            self.replies.put_nowait(last)
        except AbortError:
            pass
        finally:
            self.replies.put_nowait(OVER)

    async def late(self) -> None:
        """Let a message take its time."""
        await asyncio.sleep(0.01 * self._simulation.choices.below(6, often=0.2))

    async def write(self, said: Any) -> None:
        """Say something, as a gateway."""
        await self.late()
        self.has_head |= said.WhichOneof("request") == "response_headers"
        self.said.put_nowait(said)

    async def read(self) -> Any:
        """Return the next reply, as to a gateway."""
        reply = await self.replies.get()
        if reply is not OVER and reply.WhichOneof("response") == "request_headers":
            self.times_told += 1
            self._simulation.check("a gateway is told one server", self.times_told == 1)
        if reply is not OVER and reply.WhichOneof("response") in ("response_body", "immediate_response"):
            self._content += reply.response_body.response.body_mutation.streamed_response.body
            self.client.take(self._content + reply.immediate_response.body)
        return reply

    async def done_writing(self) -> None:
        """End the gateway's half."""
        self.said.put_nowait(OVER)
        assert self.processing is not None
        await asyncio.wait([self.processing], timeout=ENDS_S)
        self._simulation.check("a stream that its gateway has ended ends", self.processing.done())

    def cancel(self) -> None:
        """End the stream, or its half of it, as a gateway does whose client has left."""
        assert self.processing is not None
        if not self.processing.done() and self._simulation.choices.below(2):
            self.said.put_nowait(OVER)
        else:
            self.processing.cancel()

    async def code(self) -> Any:
        """Return what the stream ended with."""
        return grpc.StatusCode.OK


class _Context:
    """The picker's end of a stream."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    async def read(self) -> Any:
        """Return what the gateway says next."""
        said = await self._stream.said.get()
        if said is OVER:
            self._stream.said.put_nowait(OVER)  # also for whoever asks again
        return said

    async def write(self, reply: bytes) -> None:
        """Reply, as bytes would arrive."""
        await self._stream.late()
        said = Reply.FromString(reply)
        self._stream.is_told |= said.WhichOneof("response") == "request_headers"
        self._stream.replies.put_nowait(said)

    async def abort(self, _: grpc.StatusCode, why: str) -> None:
        """End the stream with an error."""
        raise AbortError(why)


class _Answer(asyncio.Protocol):
    """A connection of the gateway to a server, with what the server answers."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts = asyncio.Queue[bytes | None]()
        self.begun = asyncio.Event()
        self.headers: dict[str, str] = {}
        self.status_code = 0
        self.is_over = False
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            if not self.is_over:
                self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        names = {"content-length", "transfer-encoding"} & self.headers.keys()
        self.is_over |= self.status_code > 0 and not names
        self.begun.set()
        self._parts.put_nowait(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header; trailers do not pass."""
        if not self.begun.is_set():
            self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        """Take in a status, but for interim ones."""
        if self.is_over:
            return
        status = self._parser.get_status_code()
        if 200 <= status < 600:
            self.status_code = status
            self.begun.set()
        else:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        """Take in a piece of the body."""
        if not self.is_over:
            self._parts.put_nowait(body)

    def on_message_complete(self) -> None:
        """Take in the end of the answer."""
        if self.status_code and not self.is_over:
            self.is_over = True
            self._parts.put_nowait(None)

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body; ``_BrokenOffError``: it breaks off."""
        while True:
            async with asyncio.timeout(SILENCE_S):
                piece = await self._parts.get()
            if piece is None and not self.is_over:
                raise _BrokenOffError
            if piece is None:
                return
            yield piece


class _OwnAnswer:
    """What a gateway answers for a server that does not."""

    headers: dict[str, str] = {"content-type": "text/plain"}  # noqa: RUF012

    def __init__(self, status: int) -> None:
        self.status_code = status

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield b"no healthy upstream"


class _Carrying(Gateway):
    """A gateway with a request of one client."""

    def __init__(self, simulation: Simulation, requests: Any, number: int, real: Picker) -> None:
        self._simulation, self._requests, self._number = simulation, requests, number
        self.stream = _Stream(simulation)
        self.stream.process(real)
        self._process = lambda: self.stream
        self._http = cast(Any, SimpleNamespace(stream=self._send))

    @asynccontextmanager
    async def _send(self, _: str, url: str, *, headers: dict[str, str], content: bytes) -> AsyncIterator[Any]:
        """Send a request to a server; yield its answer."""
        check, keys = self._simulation.check, {"authorization", "x-api-key"} & headers.keys()
        authority, subset = url.split("/")[2], self._requests.carried[self._number]
        check("a gateway is told a server that it reaches", subset is None or authority in subset, authority)
        check("no server sees a client's key", not keys, str(keys))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"POST / HTTP/1.1\r\n{lines}\r\n".encode()
        answer: Any = None
        try:
            host, _, port = authority.rpartition(":")
            try:
                _, answer = await self._simulation.loop.create_connection(_Answer, host, int(port))
                answer.transport.write(head + content)
                async with asyncio.timeout(SILENCE_S):
                    await answer.begun.wait()
                status = 0 if answer.status_code else 502
            except ConnectionRefusedError:
                status = 503
            except TimeoutError:
                status = 504
            if status:
                self._requests.answered_between.add(self._number)
            try:
                yield _OwnAnswer(status) if status else answer
            except (_BrokenOffError, TimeoutError):
                self.stream.is_broken = True
                if self._simulation.choices.below(2):
                    await self.stream.done_writing()
                raise _BrokenOffError from None
        finally:
            if answer is not None:
                answer.transport.abort()


async def play(simulation: Simulation) -> None:
    """As ``router``, but a gateway carries all requests."""
    draw, requests = simulation.choices.below, router._Requests()
    simulation.instead(gateways, PIECE_BYTES=PIECE_BYTES)
    simulation.instead(picker.protocol, CHUNK_BYTES=CHUNK_BYTES)
    state = os.stat(__file__)
    key_file: Any = SimpleNamespace(read_bytes=lambda: b"acme\n", stat=lambda: state)

    async def carry(real: Router, client: Any) -> None:
        servers = sorted(each.origin.authority.decode() for each in real.fleet.every_server())
        subset = None if draw(4) else [*servers[: draw(1 + len(servers))], ELSEWHERE]
        requests.carried[client.number] = None if subset is None else frozenset(subset)
        headers = {name.decode(): value.decode() for name, value in client.scope["headers"]}
        if draw(4) == 1:  # it counts as the gateway
            del headers["authorization"]
            client.tenant = "acme"
        gateway = _Carrying(simulation, requests, client.number, Picker(real.door.handle, key_file))
        gateway.stream.client = client
        asking = gateway.ask(client._body, headers, path=client.scope["path"], subset=subset, has_trailers=draw(4) == 1)
        try:
            async with asyncio.timeout(client._leaves_in_s):
                answer = await asking
        except TimeoutError:
            client.has_left = True
        except _BrokenOffError:
            client.is_broken = True
            raise ConnectionResetError from None
        except GatewayError as error:
            simulation.check("a gateway is told what it takes", gateway.stream.is_broken, str(error))
            client.is_broken = True
            raise ConnectionResetError from None
        else:
            client.status, client.content, client.is_complete = answer.status, answer.content, True
            client.headers = {name.encode(): value.encode() for name, value in answer.headers.items()}

    await router._play(simulation, requests, carry)
    await _knock(simulation)


async def _knock(simulation: Simulation) -> None:
    """Have gateways end at once, or pass bodies in a way that cannot be served, which they are told."""
    reached = list[bool]()

    async def handle(*_: Any) -> None:
        reached.append(True)

    for mode in (None, FULL_DUPLEX, ELSEWAY):
        stream, said = _Stream(simulation), Said()
        said.request_headers.end_of_stream = True
        said.protocol_config.request_body_mode = said.protocol_config.response_body_mode = mode or 0
        stream.said.put_nowait(OVER if mode is None else said)
        await stream._process(Picker(handle, None))
        is_told, is_served = stream.replies.get_nowait() is not OVER, bool(reached)
        what = f"{mode}: {is_told}, {is_served}"
        is_so = (is_told, is_served) == (mode == ELSEWAY, mode == FULL_DUPLEX)
        simulation.check("a gateway that cannot be served is told", is_so, what)
        reached.clear()
