"""Connections of our servers: a request's head, which comes before anything is known of its sender, has bounds.

httptools, which uvicorn parses with, has none: it would collect a header for ever, and wait for its end for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_HEAD_BYTES = 65_536
HEAD_S = 10.0
"""Within this time after connecting, or after its first byte, a head is complete."""
LAST_LOOK_S = 0.1
"""What came while this process was held up is read before a connection is closed: uvloop looks at its clocks first."""
PIECE_BYTES = 16_384
"""The parser is given so much at once. A head that begins behind a request in one piece is counted from the next."""


class _Clocked:
    """Closes a connection whose head does not come; the mixin of both protocols."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    _clock: asyncio.TimerHandle | None = None

    def _expect(self, is_expected: bool) -> None:
        """Have the clock run while a head is expected, and stop otherwise."""
        if is_expected and self._clock is None:
            self._clock = self.loop.call_later(HEAD_S, self._look_again)
        elif not is_expected and self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _look_again(self) -> None:
        self._clock = self.loop.call_later(LAST_LOOK_S, self._end)

    def _end(self) -> None:
        self._clock = None
        if self._is_answering:  # an earlier request of the connection; reading may be paused meanwhile
            self._expect(True)
        else:
            self._refuse(408)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int) -> None:
        """Close the connection; say why, unless that would end up within an answer."""
        self._expect(False)
        if not self._is_answering:
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()


class _H11(_Clocked, H11Protocol):
    """By h11, where httptools is not installed; it refuses what is too large itself, with 400."""

    def __init__(self, config: Config, *args: Any, **options: Any) -> None:
        config.h11_max_incomplete_event_size = MOST_HEAD_BYTES
        super().__init__(config, *args, **options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        is_open = not self.transport.is_closing()
        self._expect(is_open and self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0]))


if find_spec("httptools") is not None:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class _HttpTools(_Clocked, HttpToolsProtocol):
        """By httptools, which is given no more of what is neither a complete head nor a body than a head may have."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._unfinished = 0  # bytes since the parser came to the end of a head or a message, or to a body
            self._has_finished = False
            self._awaits_head = True
            self._has_begun = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect(True)

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect(False)
            super().connection_lost(exc)

        def handle_websocket_upgrade(self) -> None:
            self._expect(False)
            super().handle_websocket_upgrade()

        def data_received(self, data: bytes) -> None:
            at = 0
            while at < len(data) and self in self.connections and not self.transport.is_closing():
                room = MOST_HEAD_BYTES - self._unfinished
                if not room:
                    self._refuse(431)
                    return
                piece = data[at : at + min(room, PIECE_BYTES)]
                at += len(piece)
                self._has_finished = False
                super().data_received(piece)
                self._unfinished = 0 if self._has_finished else self._unfinished + len(piece)
            if self in self.connections:
                is_begun = self._has_begun or self._unfinished > 0
                self._expect(self._awaits_head and is_begun and not self.transport.is_closing())

        def on_message_begin(self) -> None:
            self._has_begun = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._has_begun = self._awaits_head = False
            self._has_finished = True
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._has_finished = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._has_finished = self._awaits_head = True
            super().on_message_complete()

    PROTOCOL: type[asyncio.Protocol] = _HttpTools
else:
    PROTOCOL = _H11  # pyright: ignore[reportConstantRedefinition]
