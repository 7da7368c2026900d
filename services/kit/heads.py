"""Connections of our servers: what clients may send and leave open is bounded, more tightly until they are identified.

httptools, which uvicorn parses with, sets no bounds: it would collect a header for ever, and wait for its end for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import termios
from array import array
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.middleware.proxy_headers import _TrustedHosts  # pyright: ignore[reportPrivateUsage]
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.kit.crowd import CONNECTION, CROWD
from services.kit.tls import FollowedContext, Tls

MOST_HEAD_BYTES = 65_536
HEAD_S = 10.0
"""Within this time after connecting, or after its first byte, a head is complete; with TLS, first the handshake."""
UNKNOWN_S = 30.0
"""Within this time after its head, the request of an unknown client is complete and answered, or its key has proved
valid. What it sends of a request that is answered already has the time of a head."""
BODY_S = 30.0
LEAST_BODY_BYTES_PER_S = 500
"""Of a known client that has a body to send; looked at every ``BODY_S``. Answers take as long as they take."""
LAST_LOOK_S = 0.1
"""What came while this process was held up is read before a connection is closed: uvloop looks at its clocks first."""
_TURN_S = 1.0
_END = re.compile(rb"\n\r?\n")
"""Heads end so, and bodies in chunks."""


class _Connection(HttpToolsProtocol):
    """A client's connection: it has a place in the crowd, and is closed if its client does not do its part.

    httptools is given each head whole, and the next only after the last request is answered. It would join the pieces
    of a value anew with each piece, and make a request of each of thousands of heads that arrive at once. To make a
    message always end where a piece does, chunked bodies are split where messages may end.
    """

    config: ServerConfig
    cycle: Any
    flow: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.held_bytes = 0  #: Bytes received of a request in progress; 0 once the connection is known
        self._is_known = False
        self._is_lost = False
        self._is_refused = False
        self._number: int | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._owed: tuple[float, Any, Any] | None = None
        self._came_bytes = 0  # since the clock began to run
        self._held = bytearray()
        self._searched = 0  # bytes of it in which there is no end
        self._left = 0  # bytes of a body with a length
        self._unfinished = 0  # bytes since the parser came to the end of a head or a message, or to a body
        self._has_finished = False
        self._awaits_head = True
        self._joined: _Joined | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._accepted = transport
        self._number = CROWD.enter(self, transport, self.config.proxies)
        if self._number is None:
            transport.abort()
            return
        self.app_state = {**self.app_state, CONNECTION: self._number}
        tls = None if isinstance(transport.get_extra_info("sockname"), str) else self.config.tls
        if tls is None:
            super().connection_made(transport)
        else:
            handshake = self.loop.start_tls(transport, self, tls.now(), server_side=True, ssl_handshake_timeout=HEAD_S)
            # TLS takes over the transport at its first step, which a task would put off: uvloop begins to read when
            # this returns, whatever was paused, and what has come by then would be taken for HTTP.
            self._shaking = self.loop.create_task(self._shake_hands(handshake, handshake.send(None)))
        self._look()

    async def _shake_hands(self, handshake: Coroutine[Any, Any, Any], awaited: asyncio.Future[Any]) -> None:
        """Begin HTTP after the handshake; the connection's place and time limit already count during the handshake."""
        try:
            await asyncio.wait([awaited])
            handshake.send(None)
        except StopIteration as done:
            if done.value is not None and not self._is_lost:
                super().connection_made(done.value)
                self._begin()
        except (OSError, RuntimeError):  # no TLS, or closed in the meantime
            self._accepted.abort()
            self._leave()
        finally:
            handshake.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self.transport is not None:  # pyright: ignore[reportUnnecessaryComparison]
            super().connection_lost(exc)

    def _leave(self) -> None:
        self._is_lost = True
        CROWD.hold(self, 0)
        if self._number is not None:
            CROWD.leave(self._number)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.held_bytes:
            CROWD.hold(self, self._begun_bytes)
        self._look()
        if self._held:
            self._begin()

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing happens until its client sends or reads something."""
        return (
            self.transport is None  # pyright: ignore[reportUnnecessaryComparison]
            or not self._is_answering
            or self.transport.is_closing()
            or self.cycle.more_body
            or self.flow.write_paused
        )

    @property
    def is_unread(self) -> bool:
        """Whether this process has yet to read what its client has sent."""
        if self._is_lost or self._accepted.is_closing() or (self.flow is not None and self.flow.read_paused):
            return False
        unread = array("i", [0])
        try:
            fcntl.ioctl(self._accepted.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
        except (OSError, AttributeError):
            return False
        return unread[0] > 0

    @property
    def is_unused(self) -> bool:
        """Whether no request is in progress."""
        return self._awaits_head and not (self._is_answering or self._begun_bytes)

    def become_known(self) -> None:
        """Note that its client has shown a valid key."""
        self._is_known = True
        CROWD.hold(self, 0)
        self._look()

    def end_now(self) -> None:
        self._accepted.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _what_is_owed(self) -> tuple[float, Any, Any] | None:
        """Return how many seconds the client has, what to do after that, and its request; None if it owes nothing."""
        if self._is_lost:
            return None
        if self.transport is None:  # pyright: ignore[reportUnnecessaryComparison]
            return HEAD_S, self.end_now, None
        if self.transport.is_closing():  # it has to read what is left
            return (HEAD_S, self.end_now, None) if self._is_refused or not self._is_known else None
        if not self._is_answering:
            is_due = self.cycle is None or not self._awaits_head or self._begun_bytes
            return (HEAD_S, self._refuse, self.cycle) if is_due else None
        if not self._is_known:
            return UNKNOWN_S, self._refuse, self.cycle
        return (BODY_S, self._look_at_body, self.cycle) if self.cycle.more_body else None

    def _look(self) -> None:
        owed = self._what_is_owed()
        if owed == self._owed:
            return
        self._owed = owed
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None
        if owed is not None:
            self._came_bytes = 0
            self._clock = self.loop.call_later(owed[0], self._look_again)

    def _look_again(self) -> None:
        if self._owed is not None:
            self._clock = self.loop.call_later(LAST_LOOK_S, self._owed[1])

    def _look_at_body(self) -> None:
        if self._came_bytes < BODY_S * LEAST_BODY_BYTES_PER_S and not self.flow.read_paused:
            self._refuse()
        else:
            self._owed = None
            self._look()

    def _refuse(self, status: int = 408) -> None:
        """Close the connection, with the reason unless that would end up in the middle of an answer."""
        self._is_refused = True
        if not self._is_answering or not self.cycle.response_started:
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()
        self._look()

    def data_received(self, data: bytes) -> None:
        self._came_bytes += len(data)
        if not self._is_known:
            CROWD.hold(self, self.held_bytes + len(data))
        self._unset_keepalive_if_required()
        self._held += data
        if self.transport is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self._begin()

    def _begin(self) -> None:
        while self._held and not self.transport.is_closing() and (size := self._next()):
            piece = bytes(memoryview(self._held)[:size])
            del self._held[:size]
            self._has_finished = False
            super().data_received(piece)
            self._unfinished = 0 if self._has_finished else self._unfinished + size
        self._look()

    def _next(self) -> int:
        """Return how many bytes to give the parser now; 0 while there are too few, or when there are too many."""
        room = MOST_HEAD_BYTES - self._unfinished
        if self._awaits_head:
            if self._is_answering:
                if len(self._held) > MOST_HEAD_BYTES:
                    self.flow.pause_reading()
                return 0
            found = _END.search(self._held, max(0, self._searched - 2))
            self._searched = 0 if found else len(self._held)
            if (found.end() if found else len(self._held)) > room:
                self._refuse(431)
                return 0
            return found.end() if found else 0
        if self._left:
            size = min(self._left, len(self._held))
            self._left -= size
            return size
        if room < 4:  # for what is neither body nor its end
            self._refuse(431)
            return 0
        found = _END.search(self._held)
        size = found.end() if found else len(self._held.rstrip(b"\r\n"))
        return min(size, room - 3) if size > room else size

    @property
    def _begun_bytes(self) -> int:
        """How many bytes of the next head have arrived."""
        return len(self._held) + self._unfinished

    def on_headers_complete(self) -> None:
        self._awaits_head = False
        self._has_finished = True
        for name, value in self.headers:
            if name == b"content-length":
                self._left = int(value)
                break
        super().on_headers_complete()
        if self._joined is None:
            self._joined = _Joined(self.transport, self.loop)
        self.cycle.transport = self._joined

    def on_body(self, body: bytes) -> None:
        self._has_finished = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_finished = self._awaits_head = True
        self._left = 0
        super().on_message_complete()


class _Joined:
    """Writes the head of an answer together with what follows in the same turn of the loop: one packet for most.

    Each write of its own takes as long as a third of all else that a small request needs.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/"):
            self._head = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class ServerConfig(uvicorn.Config):
    """How each of our servers is run; the options are uvicorn's."""

    tls: FollowedContext | None = None
    """How a connection begins, except at a socket of this machine; None for plain HTTP."""

    def __init__(self, app: Any, **options: Any) -> None:
        ours: dict[str, Any] = {"http": _Connection, "ws": "none", "log_config": None, "access_log": False}
        super().__init__(app, **ours | options)
        self.proxies = _TrustedHosts(self.forwarded_allow_ips)  #: Peers whose connections stand for many clients

    def load(self) -> None:
        """Load what uvicorn loads, but leave TLS to the connections: uvicorn would not count handshakes."""
        super().load()
        if self.ssl is not None:
            names = self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs
            certificate, key, authority = (None if each is None else Path(each) for each in names)
            self.tls = FollowedContext(Tls(certificate, key, authority), self.ssl)
        self.ssl = None


class Server(uvicorn.Server):
    """Runs one of our servers. It ticks once a second, and at once when it is to end; uvicorn's own ticks ten times."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._end: Callable[[], object] = lambda: None

    async def main_loop(self) -> None:
        """Keep the date of answers and the pulse up to date until the server is to end."""
        loop, told = asyncio.get_running_loop(), asyncio.Event()
        self._end = lambda: loop.call_soon_threadsafe(told.set)
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TURN_S):
                    await told.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._end()
