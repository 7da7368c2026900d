"""The endpoint picker's server: each stream of a gateway is a request at the router's door, carried by the gateway.

The door, the lanes, the cost model and all that is learned and counted are those of any other request. What differs is
who carries it: in place of a connection of ours, the gateway is told the server, sends the request there and hands its
answer over for as long as it comes. Once it was told, nobody else can be asked.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from starlette.types import ASGIApp, Message, Scope

from services.kit.edge.exchange import Header
from services.kit.logging import Log
from services.kit.tls import Tls, check
from services.router.fleet import Server
from services.router.picking import protocol
from services.router.turn import CARRIER
from services.router.upstream import Connection, UpstreamError

log = Log(__name__)

OVER: Any = vars(grpc.aio)["EOF"]  #: What is read at a stream's end; its stubs lack it
OURS = frozenset({b"authorization", b"x-api-key"})
"""Headers of clients that no server may see; those of the server's own key take their place."""
HEARD_OUT_S = 5.0
_UNSET = frozenset({b"host", b"accept", b"user-agent"})  #: Of what we would send, what the gateway does itself


class Picker:
    """Serves gateways."""

    def __init__(self, app: ASGIApp, key_file: Path | None) -> None:
        """Take what answers requests, and the file of the key that those without one of their own count as."""
        self._app, self._key_file = app, key_file
        self._read: tuple[tuple[int, ...], bytes] | None = None  #: The state of that file, and the key in it
        self._server: grpc.aio.Server | None = None

    async def start(self, host: str, port: int, tls: Tls) -> int:
        """Listen; return the port. ``OSError`` if that cannot be done, or a file cannot be read."""
        server = grpc.aio.server()
        # As if it had one reply, the last: gRPC sends that and the end of the stream in one step. Others are written.
        process = grpc.stream_unary_rpc_method_handler(self._process, protocol.Said.FromString, bytes)
        handlers = grpc.method_handlers_generic_handler(protocol.SERVICE, {protocol.METHOD: process})
        server.add_generic_rpc_handlers((handlers,))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls.certificate is None or tls.key is None:
                found = server.add_insecure_port(address)
            else:
                given = grpc.dynamic_ssl_server_credentials(_pair(tls), lambda: _renewed(tls), tls.asks_clients)
                found = server.add_secure_port(address, given)
        except RuntimeError as error:
            raise OSError(f"the endpoint picker cannot listen on {address}: {error}") from None
        await server.start()
        self._server = server
        log.info("picker.listens", address=host, port=found)
        return found

    async def stop(self, grace_s: float) -> None:
        """Let streams end for a while, then end them."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _process(self, _: object, context: Any) -> bytes:
        said = await context.read()
        if said is OVER or said.WhichOneof("request") != "request_headers":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "A stream begins with the request's headers.")
        if (why := protocol.refuses(said)) is not None:
            log.error("picker.refused", why=why)
            return protocol.at_once(500, [(b"content-type", b"text/plain")], why.encode())
        carried = _Carried(context, said, await self._key())
        await self._app(carried.scope, carried.receive, carried.send)
        await carried.hear_out()
        last = carried.last
        vars(carried).clear()  # its scope and its connection refer to it: what they hold needs no collection of garbage
        return last or await context.abort(grpc.StatusCode.CANCELLED, "The gateway ended the stream first.")

    async def _key(self) -> bytes | None:
        """Return the key in its file, which is read again when it has changed."""
        if self._key_file is None:
            return None
        try:
            found = self._key_file.stat()
            state = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if self._read is None or self._read[0] != state:
                self._read = state, (await asyncio.to_thread(self._key_file.read_bytes)).strip()
            return self._read[1]
        except OSError as error:
            log.warning("picker.no_key", path=str(self._key_file), error=str(error))
            return None


def _pair(tls: Tls) -> Any:
    """Return certificate, key and authority as their files have them; ``ValueError`` if they do not go together."""
    check(tls)
    assert tls.key is not None
    assert tls.certificate is not None
    authority = tls.authority.read_bytes() if tls.asks_clients and tls.authority is not None else None
    return grpc.ssl_server_certificate_configuration([(tls.key.read_bytes(), tls.certificate.read_bytes())], authority)


def _renewed(tls: Tls) -> Any:
    """Return what a connection that begins is shown; None for what was shown before, while files are being replaced."""
    try:
        return _pair(tls)
    except (OSError, ValueError):
        return None


class _Carried:
    """One request that a gateway carries, as the app has it."""

    def __init__(self, context: Any, said: Any, key: bytes | None) -> None:
        """Take the first message of the stream, and the key that the request counts as if it has none."""
        self._read: Callable[[], Awaitable[Any]] = context.read
        self._write: Callable[[bytes], Awaitable[None]] = context.write
        headers = protocol.headers_of(said.request_headers)
        known = dict(headers)
        if key is not None and not OURS & known.keys():
            headers.append((b"authorization", b"Bearer " + key))
        path, _, query = known.get(b":path", b"/").partition(b"?")
        self.scope: Scope = {
            "type": "http",
            "method": known.get(b":method", b"POST").decode("latin-1"),
            "path": path.decode("latin-1"),
            "query_string": query,
            "headers": [each for each in headers if not each[0].startswith(b":")],
            CARRIER: self,
        }
        self.reaches = protocol.subset_of(said)
        self._sent_by_client = known.keys()
        self._is_read = said.request_headers.end_of_stream
        self._has_request_trailers = False
        self._told: _GatewayConnection | None = None
        self._start: Message | None = None
        self._content = bytearray()
        self._is_passing = False
        self.last: bytes | None = None  #: The stream's last reply; None until there is one

    async def receive(self) -> Message:
        """Return the next piece of the request's body."""
        if self._is_read:
            return {"type": "http.request", "body": b"", "more_body": False}
        said = await self._read()
        if said is OVER:
            return {"type": "http.disconnect"}
        body = said.request_body
        self._has_request_trailers = said.WhichOneof("request") == "request_trailers"
        self._is_read = body.end_of_stream or self._has_request_trailers
        return {"type": "http.request", "body": body.body, "more_body": not self._is_read}

    async def part(self) -> tuple[str, Any]:
        """Return the next part of the answer, with its name; ``UpstreamError`` if there is none."""
        said = await self._read()
        if said is OVER:
            raise UpstreamError("closed", "The gateway ended the answer before it was complete.")
        name = said.WhichOneof("request")
        return name, getattr(said, name)

    async def hear_out(self) -> None:
        """Let a gateway hand over all of an answer before it is given another, with which its stream ends."""
        if self._told is not None and self._told.status and not self._told.complete:
            with contextlib.suppress(TimeoutError, UpstreamError):
                async with asyncio.timeout(HEARD_OUT_S):
                    while await self._told.piece():
                        pass

    def connection(self, server: Server) -> Connection:
        """Return what stands in for a connection to a server."""
        return _GatewayConnection(server, self)

    @property
    def has_told(self) -> bool:
        """Whether the gateway was told a server: from then on, no other can be asked."""
        return self._told is not None

    async def pick(self, server: Server, request: bytes, connection: "_GatewayConnection") -> None:
        """Have the gateway send a request, head and body, to a server, whose answer ``connection`` stands for."""
        self._told = connection
        head, _, body = request.partition(b"\r\n\r\n")
        lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:]]
        headers: list[Header] = [(name, value) for name, value in lines if name not in _UNSET]
        dropped = OURS & self._sent_by_client - {name for name, _ in headers}
        await self._write(protocol.to_server(server.origin.authority, headers, dropped))
        for reply in protocol.body_of("request", body, is_last=True, has_trailers=self._has_request_trailers):
            await self._write(reply)

    async def send(self, message: Message) -> None:
        """Answer the client, by the gateway."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        content, more = message.get("body", b""), message.get("more_body", False)
        if self._is_passing:
            return await self._pass(content, more)
        assert self._start is not None
        connection, status, headers = self._told, self._start["status"], self._start["headers"]
        if connection is not None and not connection.status:
            return  # the gateway waits for the server, and takes no answer of ours
        if connection is not None and connection.has_body and (more or connection.complete):
            self._is_passing = True
            given = {name for name, _ in headers}
            await self._write(protocol.answer_begins(status, headers, {b"content-length"} - given))
            return await self._pass(content, more)
        self._content += content
        if not more:
            self.last = protocol.at_once(status, headers, bytes(self._content))

    async def _pass(self, content: bytes, more: bool) -> None:
        if self._told is not None and self._told.complete and self._told.on_over is not None:
            self._told.on_over()  # its client may take a while to read
        has_trailers = not more and self._told is not None and self._told.has_trailers
        replies = protocol.body_of("response", content, is_last=not more, has_trailers=has_trailers)
        if not more:
            self.last = replies.pop()
        for reply in replies:
            await self._write(reply)


class _GatewayConnection(Connection):
    """Stands in for a connection: a request is sent by telling the gateway, and the answer is what that hands over.

    How long an answer may take is the gateway's to say: what we would end here, it would not hear of.

    Attributes:
        has_body: Whether its answer has a body.
        has_trailers: Whether its answer has ended in trailers.
    """

    __slots__ = ("_carried", "_request", "_server", "has_body", "has_trailers")

    def __init__(self, server: Server, carried: _Carried) -> None:
        super().__init__(server.origin, asyncio.get_running_loop())
        self._server, self._carried = server, carried
        self._request = b""
        self.has_body, self.has_trailers = True, False

    def send(self, request: bytes) -> None:
        """Note the request, which the gateway is told before its answer's head is waited for."""
        self._request = request
        self.began_at_s = self.last_at_s = time.monotonic()

    async def head(self) -> None:
        """Tell the gateway, and wait for status and headers; ``UpstreamError`` if they do not arrive."""
        await self._carried.pick(self._server, self._request, self)
        _, message = await self._part()
        headers = protocol.headers_of(message)
        status = next((value for name, value in headers if name == b":status"), b"")
        self.headers = [each for each in headers if not each[0].startswith(b":")]
        self.complete = message.end_of_stream
        self.has_body = not self.complete
        self.status = int(status) if status.isdigit() else 502

    async def whole(self, most_bytes: int) -> bytes:
        """Return the whole body; ``UpstreamError`` if it does not arrive, or is too large."""
        content = bytearray()
        while piece := await self.piece():
            content += piece
            if len(content) > most_bytes:
                raise UpstreamError("too_large", f"The server's answer is larger than {most_bytes} bytes.")
        return bytes(content)

    async def piece(self) -> bytes:
        """Return the next piece of the body; empty at its end. ``UpstreamError``: it breaks off."""
        while not self.complete:
            name, message = await self._part()
            self.has_trailers = name == "response_trailers"
            self.complete = self.has_trailers or message.end_of_stream
            if not self.has_trailers and message.body:
                return message.body
        return b""

    async def _part(self) -> tuple[str, Any]:
        found = await self._carried.part()
        self.last_at_s = time.monotonic()
        return found
