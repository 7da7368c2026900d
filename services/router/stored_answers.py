"""Ids of answers that model servers store: in those of the Responses API, a mark says which server has it.

A server keeps answers for itself, so a request with ``previous_response_id`` must reach the server of that answer. The
mark is at the end of the id, so that every router process can read it, also one that was started later, and none has to
remember anything. A server knows its answers by their ids without marks.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from zlib import crc32

import orjson

from services.router.fleet import Server
from services.router.kinds import Renamed

FIELD = "previous_response_id"
_ANSWERED = re.compile(rb'"id"\s*:\s*("resp_[\w-]{1,200}")')
_MARKED = re.compile(r"resp_[\w-]{1,200}-s[0-9a-f]{8}", re.ASCII)


@lru_cache(maxsize=4_096)
def mark_of(server_id: str) -> str:
    """Return what the ids of a server's answers end with."""
    return f"-s{crc32(server_id.encode()):08x}"


def server_of(fields: dict[str, Any], servers: Iterable[Server]) -> str | None:
    """Return the id of the server that has the answer which a request continues; None where no server has it."""
    given = fields.get(FIELD)
    if not isinstance(given, str) or _MARKED.fullmatch(given) is None:
        return None
    return next((each.id for each in servers if given.endswith(mark_of(each.id))), None)


def own_id(given: str, server_id: str) -> str:
    """Return the id of an answer as its server knows it."""
    return given.removesuffix(mark_of(server_id))


class Marked(Renamed):
    """Marks the ids in an answer, besides giving its model the name by which it was asked for."""

    __slots__ = ("_id", "_mark", "_previous")

    def __init__(self, name: bytes, server_id: str, fields: dict[str, Any]) -> None:
        """Take the model's name as JSON, the server that answers, and what it was asked."""
        super().__init__(name)
        self._mark = mark_of(server_id).encode() + b'"'
        self._id = b""
        given = fields.get(FIELD)
        self._previous = orjson.dumps(given) if isinstance(given, str) and given.endswith(mark_of(server_id)) else b""

    def of(self, piece: bytes) -> bytes:
        """Return a piece of an answer, which splits no event, with the names and ids that the client knows."""
        piece = super().of(piece)
        if not self._id and (found := _ANSWERED.search(piece)) is not None:
            self._id = found[1]
        if self._id:
            piece = piece.replace(self._id, self._id[:-1] + self._mark)
        if self._previous:
            piece = piece.replace(self._previous[: -len(self._mark)] + b'"', self._previous)
        return piece
