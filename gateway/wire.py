"""Requests and answers at the level of ASGI: what the hot path can afford."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope, Send

from services.contracts.identity import REQUEST_ID_HEADER
from services.contracts.problems import MEDIA_TYPE, FieldError, ProblemCode
from services.kit.problems import ProblemError

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_REQUEST_ID_NAME = REQUEST_ID_HEADER.encode()
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")  # a job's output is text, whatever it looks like
_JSON_TYPE = re.compile(rb"application/(?:[a-z0-9!#$&^_.+-]+\+)?json", re.IGNORECASE)


class ClientGoneError(Exception):
    """The client closed its connection before it had sent its request."""


@dataclass(slots=True)
class Exchange:
    """One request, and what to send back with whatever is answered."""

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[bytes, bytes]
    request_id: bytes
    extra: list[Header]
    has_begun: bool = False

    @classmethod
    def open(cls, scope: Scope, receive: Receive, send: Send) -> Exchange:
        """Return the exchange for a request; a request id that is unusable is replaced."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(_REQUEST_ID_NAME, b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8).encode()
        return cls(scope, receive, send, headers, request_id, [(_REQUEST_ID_NAME, request_id), _NO_SNIFFING])

    @property
    def named_scope(self) -> Scope:
        """The request with its id among the headers, for an app that reads it there."""
        return {**self.scope, "headers": [*self.scope["headers"], (_REQUEST_ID_NAME, self.request_id)]}

    async def send_named(self, message: Message) -> None:
        """Send on behalf of an app that knows nothing of request ids."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            message["headers"] = [*message["headers"], *self.extra]
        await self.send(message)

    async def answer(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """Send a whole answer."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: Iterable[Header]) -> None:
        """Send status and headers; the body follows."""
        self.has_begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *self.extra]})

    async def refuse(self, problem: ProblemError) -> None:
        """Send a problem."""
        body = problem.document(self.request_id.decode()).model_dump_json(exclude_none=True).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in problem.headers.items()]
        await self.answer(problem.status, [(b"content-type", MEDIA_TYPE.encode()), *headers], body)


def check_json_type(content_type: bytes | None) -> None:
    """Raise ProblemError 415 unless the body is JSON in UTF-8."""
    media, _, parameters = (content_type or b"").partition(b";")
    charset = re.search(rb'charset\s*=\s*"?([^\s";]+)', parameters, re.IGNORECASE)
    if _JSON_TYPE.fullmatch(media.strip()) and (charset is None or charset[1].lower() in (b"utf-8", b"utf8")):
        return
    raise ProblemError(
        415,
        ProblemCode.UNSUPPORTED_MEDIA_TYPE,
        "The body must be JSON in UTF-8.",
        errors=[FieldError(pointer="#Content-Type", detail="Expected application/json.")],
    )


class BodyReader:
    """Reads bodies, and bounds what all of them hold in memory together."""

    def __init__(self, max_buffered_bytes: int) -> None:
        self._free = max_buffered_bytes

    async def read(self, exchange: Exchange, max_bytes: int) -> Body:
        """Return the body; the caller releases it.

        Raises:
            ProblemError: 413 when it is larger than ``max_bytes``, by what it announces or as it grows; 503 when too
                many large ones are being read.
            ClientGoneError: It never came.
        """
        announced = exchange.headers.get(b"content-length", b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
            raise _too_large(max_bytes)
        body = Body(self)
        try:
            while True:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                if (piece := message.get("body", b"")) and body.add(piece) > max_bytes:
                    raise _too_large(max_bytes)
                if not message.get("more_body", False):
                    return body
        except BaseException:
            body.release()
            raise

    def take(self, count: int) -> None:
        """Count bytes that are held from now on."""
        if count > self._free:
            raise ProblemError(
                503, ProblemCode.UNAVAILABLE, "Too many large requests at once.", headers={"retry-after": "1"}
            )
        self._free -= count

    def give_back(self, count: int) -> None:
        """Count bytes that are held no more."""
        self._free += count


class Body:
    """The bytes of a request's body, counted while they are held."""

    __slots__ = ("_counted", "_pieces", "_reader")

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._pieces: list[bytes] = []
        self._counted = 0

    @property
    def content(self) -> bytes:
        """The whole body."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def add(self, piece: bytes) -> int:
        """Append a piece; return how many bytes there are now."""
        self._reader.take(len(piece))
        self._counted += len(piece)
        self._pieces.append(piece)
        return self._counted

    def release(self) -> None:
        """Let go of the bytes."""
        self._reader.give_back(self._counted)
        self._counted = 0
        self._pieces.clear()


def _too_large(max_bytes: int) -> ProblemError:
    return ProblemError(413, ProblemCode.BODY_TOO_LARGE, f"The body is larger than {max_bytes} bytes.")
