"""The HTTP client of the data path: one connection per request in flight, kept open between requests.

It is made for this one purpose because of measurements: an aiohttp client alone takes as long as everything else that
the router does with a request. It speaks HTTP/1.1, sends a request in one write and hands on the answer as it arrives.
Time limits are checked twice a second for all connections together, so that a request needs no timer of its own.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from services.kit.edge.exchange import Header
from services.kit.networks import Network, is_within

HIGH_WATER = 256 * 1024  #: Bytes of an answer that may wait for a slow client before its server is read no further
MOST_HEAD_BYTES = 64 * 1024
"""Of an answer that are no part of its body, one after another: headers, trailers, what chunks carry besides."""
KEPT_S = 60.0  #: How long an unused connection is kept
CHECK_S = 0.5
NAMES_AGE_S = 5.0  #: How long the addresses of a name are used before it is resolved again


NOT_ITS_FAULT = frozenset({"preempted", "no_key", "slow_client"})
"""Reasons that say nothing of the server."""


class UpstreamError(Exception):
    """A server did not answer as it should."""

    def __init__(
        self, reason: str, detail: str, *, may_repeat: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.reason = reason
        """Stable code: ``connect``, ``refused_address``, ``closed``, ``timeout``, ``hung``, ``malformed``,
        ``too_large``, ``busy``, ``rate_limited``, ``preempted``, ``no_key``, ``key_refused``, ``slow_client``."""
        self.may_repeat = may_repeat  #: Whether the request was certainly not processed
        self.retry_after_s = retry_after_s  #: When the server says to try again; None if it does not


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a request may take, seconds; None for any time."""

    connect_s: float  #: Time to connect, TLS included
    first_byte_s: float  #: Time from the request to the first byte of the answer
    silence_s: float  #: Time between two pieces of an answer
    total_s: float  #: Total time


class Connection(asyncio.Protocol):
    """A connection that carries one request and its answer at a time."""

    __slots__ = (
        *("_first_s", "_has_body", "_longest_s", "_loop", "_parser", "_paused", "_pieces", "_size"),
        *("_transport", "_unread", "_waiter", "began_at_s", "complete", "error", "has_answered", "headers"),
        *("idle_since_s", "last_at_s", "on_over", "origin", "reusable", "status"),
    )

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.origin, self._loop = origin, loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser
        self._waiter: asyncio.Future[None] | None = None
        self.error: UpstreamError | None = None
        self.on_over: Callable[[], object] | None = None
        """Called from time to time once the answer has ended, while its client has yet to read the rest."""
        self.reusable = True
        self.idle_since_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._unread = 0
        self._paused = False
        self.status = 0
        self.headers: list[Header] = []
        self.complete = False
        self.has_answered = False
        self._longest_s: float | None = None
        self._first_s: float | None = None
        self._has_body = False

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        found = transport.get_extra_info("socket")
        if found is not None:
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.close()  # nobody has asked for more
            return
        self.last_at_s = time.monotonic()
        self._unread += len(data)
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(UpstreamError("malformed", "The server changed the protocol."))
        except httptools.HttpParserError as error:
            self._fail(UpstreamError("malformed", f"The server's answer is not HTTP: {error}"))
        else:
            if self._unread > MOST_HEAD_BYTES and not self.complete:
                self._fail(UpstreamError("malformed", f"The server's headers are larger than {MOST_HEAD_BYTES} bytes."))
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, which may also be the end of the answer."""
        self.reusable = False
        self._transport = None
        self.origin.lost(self)
        if self.status and not self.complete and self._ends_with_connection():
            self.complete = True
        if not self.complete and self.error is None:
            self.error = UpstreamError("closed", "The server closed the connection before its answer was complete.")
        self._wake()

    def _ends_with_connection(self) -> bool:
        return not any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    # the parser's side

    def on_message_begin(self) -> None:
        self.reusable &= not self.complete  # another answer, of which nobody has asked for any part

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers are ignored."""
        if not self.status:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Keep the status; forget interim ones."""
        if self.complete:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers = []
            return
        if not 200 <= status < 600:
            self._fail(UpstreamError("malformed", f"The server's answer has the status {status}."))
            return
        self.status = status
        if not self._parser.should_keep_alive():
            self.reusable = False

    def on_body(self, body: bytes) -> None:
        """Keep a piece, and stop reading while too much waits."""
        if self.complete:
            return
        self._unread = 0
        self._has_body = True
        self._pieces.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True

    # the router's side

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self.reusable

    def send(self, request: bytes) -> None:
        """Send a request, head and body; ``UpstreamError`` if the connection was lost."""
        if self._transport is None or self.error is not None:
            raise UpstreamError("closed", "The server closed the connection.", may_repeat=True)
        self._reset()
        self.began_at_s = self.last_at_s = time.monotonic()
        self.origin.busy.add(self)
        self._transport.write(request)

    def limit(self, total_s: float) -> None:
        """Give the request in flight a limit of its own."""
        self._longest_s = total_s

    def limit_first(self, first_s: float) -> None:
        """Give the request in flight a limit of its own to the first byte of its answer's body."""
        self._first_s = first_s

    async def head(self) -> None:
        """Wait for status and headers; ``UpstreamError`` if they do not arrive."""
        while not self.status:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def whole(self, most_bytes: int) -> bytes:
        """Return the whole body; ``UpstreamError`` if it does not arrive, or is too large."""
        while not self.complete:
            if self.error is not None:
                raise self.error
            if self._size > most_bytes:
                self._fail(UpstreamError("too_large", f"The server's answer is larger than {most_bytes} bytes."))
                continue
            if self._paused:
                self._paused = False
                cast("asyncio.Transport", self._transport).resume_reading()
            await self._wait()
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def piece(self) -> bytes:
        """Return what has arrived of the body since, empty at its end; ``UpstreamError`` if it breaks off."""
        while not self._pieces:
            if self.complete:
                return b""
            if self.error is not None:
                raise self.error
            await self._wait()
        found = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
            self.last_at_s = time.monotonic()
        return found

    def release(self) -> None:
        """Give the connection back; close it unless its answer is complete."""
        self.on_over = None
        self.origin.busy.discard(self)
        if self.complete and self.is_open and not self._paused:
            self.idle_since_s = time.monotonic()
            self.origin.idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection: a server still working on the answer sees that its client left."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def abort(self, error: UpstreamError) -> None:
        """End the request in flight with an error."""
        self._fail(error)

    def check(self, limits: Limits, now_s: float) -> None:
        """End the request in flight if it has exceeded a time limit; a slow client's has only the total one."""
        if self.complete or self.error is not None:
            if self.on_over is not None:
                self.on_over()
            return
        total_s = self._longest_s if self._longest_s is not None else limits.total_s
        if self._paused:
            if now_s - self.began_at_s > total_s:
                self._fail(UpstreamError("slow_client", f"It was not read within {total_s:g} s."))
        elif now_s - self.began_at_s > total_s:
            self._fail(UpstreamError("timeout", f"The answer was not complete within {total_s:g} s."))
        elif self._first_s is not None and not self._has_body and now_s - self.began_at_s > self._first_s:
            self._fail(UpstreamError("hung", f"The server began no stream within {self._first_s:g} s."))
        elif not self.has_answered and now_s - self.began_at_s > limits.first_byte_s:
            self._fail(UpstreamError("timeout", f"The server did not answer within {limits.first_byte_s:g} s."))
        elif self.has_answered and now_s - self.last_at_s > limits.silence_s:
            self._fail(UpstreamError("timeout", f"The server was silent for {limits.silence_s:g} s."))

    def _fail(self, error: UpstreamError) -> None:
        if self.error is None:
            self.error = error
        self.close()
        self._wake()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Origin:
    """A server's address and the connections to it."""

    def __init__(self, url: str, networks: tuple[Network, ...] | None) -> None:
        """Take a base address; ``networks`` are those that it must lie in, None for any."""
        parts = urlsplit(url)
        self.url = url
        self.host = parts.hostname or ""
        self.is_tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.is_tls else 80)
        self.path = parts.path.rstrip("/").encode()
        named = f"[{self.host}]" if ":" in self.host else self.host
        self.name = named if parts.port is None else f"{named}:{self.port}"
        self.authority = self.name.encode()
        self.networks = networks
        self.idle: list[Connection] = []
        self.busy: set[Connection] = set()
        self.connect_s: float | None = None
        self._addresses: list[tuple[Any, ...]] = []
        self._resolved_s = -math.inf
        self._tls: ssl.SSLContext | None = None

    async def connection(self, limits: Limits, *, unused_s: float = KEPT_S) -> Connection:
        """Return an idle connection, unused for no longer than ``unused_s``, or a new one.

        Raises:
            UpstreamError: None can be made; the request may be repeated elsewhere.
        """
        while self.idle:
            found = self.idle.pop()
            if found.is_open and time.monotonic() - found.idle_since_s <= unused_s:
                return found
            found.close()
        try:
            async with asyncio.timeout(limits.connect_s):
                return await self._connect()
        except TimeoutError:
            detail = f"{self.url} could not be connected to within {limits.connect_s:g} s."
            raise UpstreamError("connect", detail, may_repeat=True) from None
        except (OSError, UnicodeError) as error:  # a name such as `a..b` cannot even be asked for
            detail = f"{self.url} could not be connected to: {error}"
            raise UpstreamError("connect", detail, may_repeat=True) from error

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if time.monotonic() > self._resolved_s + NAMES_AGE_S:
            self._addresses = await self._resolve(loop)
            self._resolved_s = time.monotonic()
        tls: ssl.SSLContext | None = None
        if self.is_tls:
            tls = self._tls = self._tls or ssl.create_default_context()
        failed: OSError = OSError("it has no address")
        for address in self._addresses:
            began_s = time.monotonic()
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop),
                    str(address[0]),
                    int(address[1]),
                    ssl=tls,
                    server_hostname=self.host if tls else None,
                )
            except OSError as error:
                failed = error
                continue
            self.connect_s = time.monotonic() - began_s
            return connection
        raise failed

    async def _resolve(self, loop: asyncio.AbstractEventLoop) -> list[tuple[Any, ...]]:
        """Return the allowed addresses of the host: exactly what was checked is connected to."""
        try:
            ipaddress.ip_address(self.host.partition("%")[0])
            found: Iterable[tuple[Any, ...]] = [(self.host, self.port)]
        except ValueError:
            found = [each[4] for each in await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)]
        networks = self.networks
        allowed = [address for address in found if networks is None or is_within(str(address[0]), networks)]
        if not allowed:
            detail = f"{self.host} has no address within the networks of WATTSHIFT_ENDPOINT_NETWORKS."
            raise UpstreamError("refused_address", detail, may_repeat=True)
        return allowed

    def lost(self, connection: Connection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)

    def check(self, limits: Limits, now_s: float) -> None:
        """End requests that have exceeded a limit, and connections that have not been used for long."""
        for connection in list(self.busy):
            connection.check(limits, now_s)
        for connection in [each for each in self.idle if now_s - each.idle_since_s > KEPT_S]:
            connection.close()

    def close(self) -> None:
        """Close the connections that are not in use; the others close when they are released."""
        for connection in list(self.idle):
            connection.close()
        for connection in self.busy:
            connection.reusable = False
