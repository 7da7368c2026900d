"""A job's output: in large pieces that are requested again where a connection broke, from its end, or line by line."""

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.cli.client import AWAY_S, AWAY_TRIES, Gateway, say_away
from services.cli.commands import EXIT_UNAVAILABLE, CliError
from wattshift import UnreachableError

PIECE_BYTES = 1 << 20
LAST_LINES = 10  #: Lines of a failed job's standard error that are shown beside why it failed
_LAST_BYTES = 1 << 14
_TRIES = 6


class Piece(NamedTuple):
    """A piece of output, with the offsets at which it and the next one begin, and the size of all output."""

    content: bytes
    offset: int
    next_offset: int
    size: int


@dataclass(frozen=True)
class JobOutput:
    """One stream of a job's output, or ``both``: that of one of its gangs, by default the newest."""

    gateway: Gateway
    job_id: str
    stream: str
    generation: int | None = None

    def pieces(self, offset: int) -> Iterator[bytes]:
        """Yield the output that there is so far, from an offset on."""
        while (piece := self.piece(offset, PIECE_BYTES)).content:
            yield piece.content
            offset = piece.next_offset

    def start(self, tail: int | None, since: str | None) -> int:
        """Return where output begins: its last lines, or what was written since a time, or the less of both.

        Raises:
            CliError: There is no output, or it is unknown when it was written.
        """
        begin = 0 if tail is None else self._start_of_last(tail)
        return begin if since is None else max(begin, self.piece(0, 1, since=since).offset)

    def _start_of_last(self, lines: int) -> int:
        start, found, is_at_end = self.piece(0, 1).size, 0, True
        while lines and start > 0:
            wanted = max(start - PIECE_BYTES, 0)
            piece = self.piece(wanted, start - wanted)
            begin = max(wanted, piece.offset)
            data = piece.content[: max(start - begin, 0)]
            end = len(data) - (is_at_end and data.endswith(b"\n"))
            is_at_end = False
            while (at := data.rfind(b"\n", 0, end)) >= 0:
                found, end = found + 1, at
                if found == lines:
                    return begin + at + 1
            if not data or begin >= start:
                break  # what is before that is kept no more
            start = begin
        return start

    def followed(self, offset: int) -> Iterator[bytes]:
        """Yield the gang's output as it comes, from an offset on, until the gang ends."""
        from services.contracts.nodes import LOG_OFFSET_HEADER

        tries = [0, 0]
        while True:
            where = {"stream": self.stream, "generation": self.generation, "offset": offset, "limit": PIECE_BYTES}
            try:
                with self.gateway.stream(f"/v1/jobs/{self.job_id}/logs", follow="true", **where) as answer:
                    offset = int(answer.headers.get(LOG_OFFSET_HEADER, offset))
                    for chunk in answer.iter_bytes():
                        offset, tries = offset + len(chunk), [0, 0]
                        yield chunk
                    return
            except CliError as error:
                is_away = isinstance(error.__cause__, UnreachableError)  # and not the node alone
                tries[is_away] += 1
                if error.exit_code != EXIT_UNAVAILABLE or tries[is_away] == (AWAY_TRIES if is_away else _TRIES):
                    raise
                if is_away and tries[is_away] == 1:
                    say_away(error)
                time.sleep(AWAY_S if is_away else 0.5 * 2 ** tries[is_away])

    def piece(self, offset: int, limit: int, *, tries: int = _TRIES, since: str | None = None) -> Piece:
        """Return up to ``limit`` bytes from an offset on, or what was written ``since`` a time."""
        from services.contracts.nodes import LOG_NEXT_OFFSET_HEADER, LOG_OFFSET_HEADER, LOG_SIZE_HEADER

        where = {"stream": self.stream, "generation": self.generation, "offset": offset, "limit": limit, "since": since}
        tried = 0
        while True:
            try:
                answer = self.gateway.text(f"/v1/jobs/{self.job_id}/logs", **where)
                defaults = {LOG_OFFSET_HEADER: offset, LOG_NEXT_OFFSET_HEADER: offset + len(answer.content)}
                places = (defaults | {LOG_SIZE_HEADER: 0}).items()
                return Piece(answer.content, *(int(answer.headers.get(name, default)) for name, default in places))
            except CliError as error:
                tried += 1
                if error.exit_code != EXIT_UNAVAILABLE or tried == tries:
                    raise
                time.sleep(0.25 * 2**tried)


def last_lines(gateway: Gateway, job: dict[str, Any]) -> list[str]:
    """Return the last lines of a failed job's standard error; none if it wrote none, or if they are unavailable."""
    if job["state"] != "failed" or not job["generation"]:
        return []
    errors = JobOutput(gateway, job["id"], "stderr")
    try:
        begin = max(errors.piece(0, 1, tries=1).size - _LAST_BYTES, 0)
        found = errors.piece(begin, _LAST_BYTES, tries=1).content
    except CliError:
        return []
    return found.decode(errors="backslashreplace").splitlines()[-LAST_LINES:]


def lines_with(chunks: Iterable[bytes], pattern: str | None) -> Iterator[bytes]:
    """Yield the lines of some output that match a regular expression; all of the output if there is none."""
    if pattern is None:
        yield from chunks
        return
    wanted, rest = re.compile(pattern.encode()), b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if found := [line + b"\n" for line in lines if wanted.search(line)]:
            yield b"".join(found)
    if rest and wanted.search(rest):
        yield rest + b"\n"
