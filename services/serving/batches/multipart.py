"""Forms with a file (``multipart/form-data``, RFC 7578), read as they arrive: only a piece is in memory at a time."""

import re
from collections.abc import AsyncGenerator, AsyncIterator

from services.contracts.codes import ProblemCode
from services.kit.problems import ProblemError

_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?\bboundary="?([^";]{1,70})"?', re.IGNORECASE)
_NAMED = re.compile(rb'\b(name|filename)="((?:[^"\\]|\\.)*)"')
LONGEST_HEAD = 8_192


async def read_parts(content_type: str, body: AsyncIterator[bytes]) -> AsyncGenerator[tuple[str, str | None, bytes]]:
    """Yield a form's fields in pieces, at least one each: the field's name, its file name if any, and the piece.

    Raises:
        ProblemError: 400 if it is not such a form, or ends before its end.
    """
    match = _BOUNDARY.match(content_type)
    if match is None:
        raise _bad("The body must be multipart/form-data with a boundary.")
    mark = b"\r\n--" + match[1].encode()
    held = bytearray(b"\r\n")  # the first boundary begins a line, too
    name, filename, is_in_part = "", None, False
    async for piece in body:
        held += piece
        while True:
            if not is_in_part:  # before the head of a part
                start, end = held.find(mark), held.find(b"\r\n\r\n")
                if start >= 0 and held.startswith(b"--", start + len(mark)):
                    return
                if start < 0 or end < 0:
                    if len(held) > LONGEST_HEAD:
                        raise _bad("A part's head is too long.")
                    break
                said = {found[1]: found[2].decode(errors="replace") for found in _NAMED.finditer(held[start:end])}
                name, filename = said.get(b"name", ""), said.get(b"filename")
                is_in_part = True
                del held[: end + 4]
                yield name, filename, b""
            at = held.find(mark)
            size = at if at >= 0 else max(0, len(held) - len(mark))  # a mark may have begun
            if size:
                yield name, filename, bytes(held[:size])
                del held[:size]
            if at < 0:
                break
            is_in_part = False
    raise _bad("The form ends before its last boundary.")


def _bad(detail: str) -> ProblemError:
    return ProblemError(400, ProblemCode.INVALID_REQUEST, detail)
