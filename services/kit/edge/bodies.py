"""Read request bodies, and bound the memory that all of them hold together."""

from __future__ import annotations

from services.contracts.codes import ProblemCode
from services.kit.edge.exchange import ClientGoneError, Exchange
from services.kit.problems import ProblemError, body_too_large


class BodyReader:
    """Reads bodies while there is room for them."""

    def __init__(self, max_buffered_bytes: int) -> None:
        self._free = max_buffered_bytes

    async def read(self, exchange: Exchange, max_bytes: int) -> Body:
        """Return the body; the caller releases it.

        Raises:
            ProblemError: 413 when it is larger than ``max_bytes``, by its announced length or as it grows; 503 when too
                many large ones are being read.
            ClientGoneError: The client closed its connection first.
        """
        announced = exchange.headers.get(b"content-length", b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
            raise body_too_large(max_bytes)
        body = Body(self)
        try:
            while True:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                if (piece := message.get("body", b"")) and body.add(piece) > max_bytes:
                    raise body_too_large(max_bytes)
                if not message.get("more_body", False):
                    return body
        except BaseException:
            body.release()
            raise

    def take(self, count: int) -> None:
        if count > self._free:
            detail = "Too many large requests at once."
            raise ProblemError(503, ProblemCode.UNAVAILABLE, detail, headers={"retry-after": "1"})
        self._free -= count

    def give_back(self, count: int) -> None:
        self._free += count


class Body:
    """The bytes of a request body, counted while they are held."""

    __slots__ = ("_counted", "_pieces", "_reader")

    def __init__(self, reader: BodyReader) -> None:
        self._reader = reader
        self._pieces: list[bytes] = []
        self._counted = 0

    @property
    def content(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def add(self, piece: bytes) -> int:
        """Append a piece; return how many bytes there are now."""
        self._reader.take(len(piece))
        self._counted += len(piece)
        self._pieces.append(piece)
        return self._counted

    def release(self) -> None:
        self._reader.give_back(self._counted)
        self._counted = 0
        self._pieces.clear()
