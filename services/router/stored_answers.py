"""Ids of answers that model servers store: those of the Responses API end with a mark.

A server keeps answers for itself, so a request with ``previous_response_id`` must reach the server of that answer; and
it keeps those of all tenants together, so that only who got an answer may continue it. The mark is signed, so that
every router process can check it, also one that was started later, and none has to remember anything. A server knows
its answers by their ids without marks.
"""

import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import orjson

from services.router.fleet import Server
from services.router.kinds import Renamed
from services.router.openai import DoorError

FIELD = "previous_response_id"
_ANSWERED = re.compile(rb'"id"\s*:\s*"(resp_[\w-]{1,200})"')
_MARK = re.compile(r"-s[0-9a-f]{24}", re.ASCII)
_MARK_LENGTH = 26


class StoredAnswers:
    """Marks the ids of answers, and knows those that it marked."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Take the keys that sign marks, newest first: all router processes have the same."""
        self._keys = keys

    def mark(self, answer_id: str, server_id: str, tenant_id: str, key: bytes | None = None) -> str:
        """Return what a tenant knows the id of a server's answer to end with."""
        signed = orjson.dumps([answer_id, server_id, tenant_id])
        return f"-s{crc32(server_id.encode()):08x}{hmac.digest(key or self._keys[0], signed, 'sha256').hex()[:16]}"

    def server_of(self, fields: dict[str, Any], servers: Iterable[Server], tenant_id: str) -> str | None:
        """Return the id of the server that has the answer which a request continues; None if it continues none.

        Raises:
            DoorError: None of the servers has an answer with this id for the tenant.
        """
        given = fields.get(FIELD)
        if given is None:
            return None
        if isinstance(given, str) and _MARK.fullmatch(given, max(len(given) - _MARK_LENGTH, 0)):
            answer_id, mark = own_id(given), given[-_MARK_LENGTH:]
            for server in servers:
                if mark.startswith(f"-s{crc32(server.id.encode()):08x}") and any(
                    hmac.compare_digest(mark, self.mark(answer_id, server.id, tenant_id, key)) for key in self._keys
                ):
                    return server.id
        raise DoorError(404, "previous_response_not_found", f"There is no answer {str(given)[:200]!r}.", param=FIELD)


def own_id(given: str) -> str:
    """Return the id of an answer as its server knows it."""
    return given[:-_MARK_LENGTH]


class Marked(Renamed):
    """Marks the ids in an answer, besides giving its model the name by which it was asked for."""

    __slots__ = ("_id", "_mark_of", "_marked", "_previous")

    def __init__(self, name: bytes, fields: dict[str, Any], mark_of: Callable[[str], str]) -> None:
        """Take the model's name as JSON, what was asked, and what the id of an answer is to end with."""
        super().__init__(name)
        self._mark_of = mark_of
        self._id = self._marked = b""
        given = fields.get(FIELD)
        self._previous = (orjson.dumps(own_id(given)), orjson.dumps(given)) if isinstance(given, str) else None

    def of(self, piece: bytes) -> bytes:
        """Return a piece of an answer, which splits no event, with the names and ids that the client knows."""
        piece = super().of(piece)
        if not self._id and (found := _ANSWERED.search(piece)) is not None:
            self._id = b'"%s"' % found[1]
            self._marked = b'"%s%s"' % (found[1], self._mark_of(found[1].decode(errors="replace")).encode())
        if self._id:
            piece = piece.replace(self._id, self._marked)
        if self._previous is not None:
            piece = piece.replace(*self._previous)
        return piece
