"""Streams of server-sent events on their way through: counted, and completed with their emissions.

Bytes pass as they came, whole events at a time. Only the chunk that states the usage, or the end of the stream, gets
something added; and usage that only the router asked for is taken out.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import orjson

from services.kit.edge.exchange import Header
from services.router.kinds import Renamed, tokens_of

J_PER_WH = 3_600.0
LONGEST_EVENT = 4 * 1024 * 1024
"""Bytes that are held back for the end of an event; a longer one is passed on in parts, unread."""
DONE = b"data: [DONE]"
_ENDS = (b"\n\n", b"\r\n\r\n")
_NO_USAGE = (b',"usage":null', b', "usage": null', b'"usage":null,', b'"usage": null, ')


@dataclass(frozen=True, slots=True)
class Footprint:
    """What an answer took; None if power or intensity is unknown."""

    energy_j: float | None
    carbon_gco2: float | None
    location: str

    def headers(self) -> list[Header]:
        """Return energy and emissions as headers, as far as they are known."""
        found: list[Header] = []
        if self.carbon_gco2 is not None and math.isfinite(self.carbon_gco2):
            found.append((b"x-wattshift-gco2", b"%.6g" % self.carbon_gco2))
        if self.energy_j is not None and math.isfinite(self.energy_j):
            found.append((b"x-wattshift-wh", b"%.6g" % (self.energy_j / J_PER_WH)))
        return found

    def comment(self) -> bytes:
        """Return all of it as a comment line of a stream."""
        parts = [*self.headers(), (b"x-wattshift-location", self.location.encode())]
        return b": %s\n\n" % b" ".join([b"%s=%s" % each for each in parts])

    def member(self) -> bytes:
        """Return all of it as a member of a JSON object."""
        values = {name.decode().removeprefix("x-wattshift-"): float(value) for name, value in self.headers()}
        return b'"wattshift":' + orjson.dumps({**values, "location": self.location})


class StreamReader:
    """Reads one stream; ``input_tokens`` and ``output_tokens``: as the stream stated them; None if it did not."""

    def __init__(
        self,
        footprint: Callable[[], Footprint],
        *,
        wants_usage: bool,
        hides_usage: bool = False,
        has_comment: bool = True,
        token_mark: bytes = b"",
        renamed: Renamed | None = None,
    ) -> None:
        self._footprint, self._wants_usage, self._hides_usage = footprint, wants_usage, hides_usage
        self._has_comment, self._token_mark, self._renamed = has_comment, token_mark, renamed
        self._held = bytearray()
        self._is_stated = False
        self.events = 0  #: Events with data so far, which is about the number of tokens
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.is_complete = False  #: Whether it came to its end
        self.has_failed = False  #: Whether the server reported a failure in it

    def feed(self, piece: bytes) -> bytes:
        """Return what can be passed on now: whole events."""
        if self._held or not piece.endswith(_ENDS):
            held = self._held
            seen = max(0, len(held) - 3)  # an end may begin in what was held back; the rest was looked through
            held += piece
            cut = max(place + len(mark) if (place := held.rfind(mark, seen)) >= 0 else 0 for mark in _ENDS)
            if not cut:
                if len(held) <= LONGEST_EVENT:
                    return b""
                self._held = bytearray()
                return bytes(held)
            piece = bytes(held[:cut])
            del held[:cut]
        if self._renamed is not None:
            piece = self._renamed.of(piece)
        if self._hides_usage and b'"usage"' in piece:
            for null in _NO_USAGE:  # in a text of the answer, its quotes would be escaped
                piece = piece.replace(null, b"")
        if DONE not in piece and b'"error"' not in piece and not _may_state_usage(piece):
            mark = self._token_mark
            self.events += piece.count(mark) if mark else piece.count(b"\ndata:") + piece.startswith(b"data:")
            return piece
        return b"".join(self._event(each) for each in _split(piece))

    def close(self) -> bytes:
        """Return what comes after the last piece."""
        left, self._held = bytes(self._held), bytearray()
        if left:
            left = self._event(left)
        if self._is_stated:
            return left
        self.is_complete = True
        self._is_stated = True
        if left and not left.endswith((b"\n\n", b"\r\n\r\n")):
            left += b"\n\n"
        return left + self._comment()

    def _comment(self) -> bytes:
        return self._footprint().comment() if self._has_comment else b""

    def _event(self, event: bytes) -> bytes:
        place = 0 if event.startswith(b"data:") else event.find(b"\ndata:") + 1
        if not place and not event.startswith(b"data:"):
            return event
        if event.startswith((DONE, b"data:[DONE]")):
            self.is_complete = True
            if self._is_stated:
                return event
            self._is_stated = True
            return self._comment() + event
        self.events += event.count(self._token_mark) if self._token_mark else 1
        if b'"usage"' not in event and b'"error"' not in event:
            return event
        body = event[place + 5 :].strip()
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            return event
        said = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        answer = said.get("response")
        in_answer = cast("dict[str, Any]", answer).get("error") if isinstance(answer, dict) else None
        self.has_failed |= bool(said.get("error") or in_answer) or said.get("type") == "error"
        given, output = tokens_of(said)
        self.input_tokens = self.input_tokens if given is None else given
        self.output_tokens = self.output_tokens if output is None else output
        if self._token_mark or not isinstance(said.get("usage"), dict):
            return event
        document = cast("dict[str, Any]", found)
        has_choices = bool(document.get("choices"))
        self.events -= not has_choices
        if self._hides_usage and "choices" in document:
            del document["usage"]
            return b"data: " + orjson.dumps(document) + b"\n\n" if has_choices else b""
        if not self._wants_usage or has_choices:
            return event
        self._is_stated = True
        at = event.rindex(b"}")
        return event[:at] + b"," + self._footprint().member() + event[at:]


def _may_state_usage(piece: bytes) -> bool:
    found = piece.count(b'"usage"')
    return bool(found) and found != piece.count(b'"usage":null') + piece.count(b'"usage": null')


def _split(piece: bytes) -> list[bytes]:
    """Return whole events, each with the empty line that ends it."""
    found: list[bytes] = []
    at = 0
    while at < len(piece):
        ends = [(piece.find(mark, at), len(mark)) for mark in _ENDS]
        ends = [(place, size) for place, size in ends if place >= 0]
        if not ends:
            found.append(piece[at:])
            break
        place, size = min(ends)
        found.append(piece[at : place + size])
        at = place + size
    return found
