"""A job's output: in large pieces that are requested again where a connection broke, from its end, or line by line."""

import re
import time
from collections.abc import Iterable, Iterator
from typing import Any

from services.cli.client import Gateway
from services.cli.commands import EXIT_UNAVAILABLE, CliError

PIECE_BYTES = 1 << 20
LAST_LINES = 10  #: Lines of a failed job's standard error that are shown beside why it failed
_LAST_BYTES = 1 << 14
_TRIES = 6


def pieces(gateway: Gateway, job_id: str, stream: str, generation: int | None, offset: int = 0) -> Iterator[bytes]:
    """Yield the output that a job has so far, from an offset on."""
    from services.contracts.nodes import LOG_NEXT_OFFSET_HEADER

    while (answer := _piece(gateway, job_id, stream, generation, offset, PIECE_BYTES)).content:
        yield answer.content
        offset = int(answer.headers.get(LOG_NEXT_OFFSET_HEADER, offset + len(answer.content)))


def start(
    gateway: Gateway, job_id: str, stream: str, generation: int | None, tail: int | None, since: str | None
) -> int:
    """Return the offset at which output begins: its last lines, or what was written since a time, or the less of both.

    Raises:
        CliError: There is no output, or it is unknown when it was written.
    """
    from services.contracts.nodes import LOG_OFFSET_HEADER

    begin = 0 if tail is None else start_of_last(gateway, job_id, stream, generation, tail)
    if since is None:
        return begin
    answer = _piece(gateway, job_id, stream, generation, 0, 1, since=since)
    return max(begin, int(answer.headers.get(LOG_OFFSET_HEADER, 0)))


def start_of_last(gateway: Gateway, job_id: str, stream: str, generation: int | None, lines: int) -> int:
    """Return the offset at which the last lines of a job's output begin."""
    from services.contracts.nodes import LOG_OFFSET_HEADER, LOG_SIZE_HEADER

    size = int(_piece(gateway, job_id, stream, generation, 0, 1).headers.get(LOG_SIZE_HEADER, 0))
    start, found, is_at_end = size, 0, True
    while lines and start > 0:
        begin = max(start - PIECE_BYTES, 0)
        answer = _piece(gateway, job_id, stream, generation, begin, start - begin)
        begin = max(begin, int(answer.headers.get(LOG_OFFSET_HEADER, begin)))
        data = answer.content[: max(start - begin, 0)]
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


def followed(gateway: Gateway, job_id: str, stream: str, generation: int, offset: int = 0) -> Iterator[bytes]:
    """Yield a gang's output as it comes, from an offset on, until the gang ends."""
    from services.contracts.nodes import LOG_OFFSET_HEADER

    tries = 0
    while True:
        where = {"stream": stream, "generation": generation, "offset": offset, "limit": PIECE_BYTES}
        try:
            with gateway.stream(f"/v1/jobs/{job_id}/logs", follow="true", **where) as answer:
                offset = int(answer.headers.get(LOG_OFFSET_HEADER, offset))
                for chunk in answer.iter_bytes():
                    offset, tries = offset + len(chunk), 0
                    yield chunk
                return
        except CliError as error:
            tries += 1
            if error.exit_code != EXIT_UNAVAILABLE or tries == _TRIES:
                raise
            time.sleep(0.5 * 2**tries)


def last_lines(gateway: Gateway, job: dict[str, Any]) -> list[str]:
    """Return the last lines of a failed job's standard error; none if it wrote none, or if they are unavailable."""
    from services.contracts.nodes import LOG_SIZE_HEADER

    if job["state"] != "failed" or not job["generation"]:
        return []
    try:
        size = int(_piece(gateway, job["id"], "stderr", None, 0, 1, tries=1).headers.get(LOG_SIZE_HEADER, 0))
        begin = max(size - _LAST_BYTES, 0)
        found = _piece(gateway, job["id"], "stderr", None, begin, _LAST_BYTES, tries=1).content
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


def _piece(
    gateway: Gateway,
    job_id: str,
    stream: str,
    generation: int | None,
    offset: int,
    limit: int,
    tries: int = _TRIES,
    since: str | None = None,
) -> Any:
    path = f"/v1/jobs/{job_id}/logs"
    where = {"stream": stream, "offset": offset, "limit": limit, "generation": generation, "since": since}
    for attempt in range(tries):
        try:
            return gateway.text(path, **where)
        except CliError as error:
            if error.exit_code != EXIT_UNAVAILABLE or attempt + 1 == tries:
                raise
            time.sleep(0.5 * 2**attempt)
    raise AssertionError("unreachable")
