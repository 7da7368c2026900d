"""A rank's output: read by offset, and kept within a size limit while the rank continues to write."""

import ctypes
import os
import stat
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gpu_agent import shim
from gpu_agent.shim import ORDER_RECORD as RECORD

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


@dataclass(frozen=True)
class LogPiece:
    """A piece of a stream: ``data`` begins at ``offset``; ``size`` is that of the whole stream so far."""

    data: bytes
    offset: int
    size: int

    @property
    def next_offset(self) -> int:
        return self.offset + len(self.data)


def open_regular(path: Path, access: int = os.O_RDONLY) -> int | None:
    """Open a file that another process writes; return None if it is missing or not a regular file.

    A job may put anything where its files are expected: a pipe there must not block the agent.
    """
    try:
        descriptor = os.open(path, access | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def read_piece(path: Path, offset: int, limit: int) -> LogPiece:
    """Return up to ``limit`` bytes from ``offset``; a negative offset counts from the end.

    If older output was discarded, the piece begins at what remains.
    """
    descriptor = open_regular(path)
    if descriptor is None:
        return LogPiece(b"", 0, 0)
    try:
        size = os.fstat(descriptor).st_size
        offset = max(size + offset, 0) if offset < 0 else min(offset, size)
        offset = _first_kept(descriptor, offset, size)
        return LogPiece(os.pread(descriptor, limit, offset), offset, size)
    finally:
        os.close(descriptor)


def read_both(folder: Path, offset: int, limit: int, *, is_over: bool) -> LogPiece:
    """Return up to ``limit`` bytes of both streams together, in the order in which they were written.

    Offsets count the bytes of both streams; a negative one counts from the end. Output that the shim has not put in
    order yet is not shown; once the rank is over it comes last, standard output first.

    Args:
        is_over: Whether nothing of the rank can write any more.
    """
    with ExitStack() as until_read:

        def opened(name: str) -> int | None:
            descriptor = open_regular(folder / name)
            if descriptor is not None:
                until_read.callback(os.close, descriptor)
            return descriptor

        streams = [opened(shim.STDOUT), opened(shim.STDERR)]
        order = _Order(opened(shim.ORDER), streams, is_over=is_over)
        offset = max(order.size + offset, 0) if offset < 0 else min(offset, order.size)
        pieces: list[bytes] = []
        for stream, start, length in order.segments(offset):
            descriptor = streams[stream]
            if descriptor is None:
                break
            first = min(_first_kept(descriptor, start, start + length), start + length)
            data = os.pread(descriptor, min(start + length - first, limit), first)
            gone = length if not data else first - start  # discarded, or truncated by the job
            if gone and pieces:
                break  # the next piece begins after it
            offset += gone
            if data:
                pieces.append(data)
            limit -= len(data)
            if limit <= 0 or gone + len(data) < length:
                break
        return LogPiece(b"".join(pieces), offset, order.size)


def offset_since(folder: Path, stream: str, since_s: float) -> int | None:
    """Return where a stream's output since a time begins, of ``both`` too; None if no times were recorded."""
    descriptor = open_regular(folder / shim.TIMES)
    if descriptor is None:
        return None
    with open(descriptor, "rb") as file:
        data = file.read(shim.TIMES_RECORDS * shim.TIMES_RECORD.size)
    whole = len(data) // shim.TIMES_RECORD.size * shim.TIMES_RECORD.size
    records: list[tuple[float, int, int, int]] = list(shim.TIMES_RECORD.iter_unpack(data[:whole]))
    if not records:
        return None
    # Not by bisection: while the shim thins them out, newer ones may come before older ones.
    before = max((record for record in records if record[0] <= since_s), default=(0.0, 0, 0, 0))
    return before[1:][("stdout", "stderr", "both").index(stream)]


class _Order:
    """The order of the streams as the shim recorded it; the format is that of ``shim.Order``.

    A rank whose shim recorded none, because an earlier release started it, shows standard output first.
    """

    def __init__(self, descriptor: int | None, streams: Sequence[int | None], *, is_over: bool) -> None:
        self._descriptor = descriptor
        self._count = 0 if descriptor is None else os.fstat(descriptor).st_size // RECORD.size
        self._last = self._read_last()
        self._end = self._last[0]
        shown = (0, 1) if is_over else (0,) if descriptor is None else ()
        rests = [(stream, self._known(stream), streams[stream]) for stream in shown]
        self._rest = [
            (stream, known, max(os.fstat(file).st_size - known, 0)) for stream, known, file in rests if file is not None
        ]
        self.size = self._end + sum(length for _, _, length in self._rest)
        """Bytes of both streams together."""

    def segments(self, offset: int) -> Iterator[tuple[int, int, int]]:
        """Yield stream, first byte and length of each part of the output from ``offset`` on."""
        number = bisect_right(range(self._count), offset, key=lambda each: self._record(each)[0])
        before = self._record(number - 1)[0]
        for each in range(number, self._count):
            end, place = self._record(each)
            yield place % 2, place // 2 - (end - max(before, offset)), end - max(before, offset)
            before = end
        for stream, known, length in self._rest:
            skipped = max(offset - before, 0)
            if length > skipped:
                yield stream, known + skipped, length - skipped
            before += length

    def _record(self, number: int) -> tuple[int, int]:
        """Return a record; (0, 0) before the first. The last one may grow meanwhile: its first reading counts."""
        if number < 0 or self._descriptor is None:
            return 0, 0
        if number == self._count - 1:
            return self._last
        return RECORD.unpack(os.pread(self._descriptor, RECORD.size, number * RECORD.size))

    def _read_last(self) -> tuple[int, int]:
        """Return the last record, read until two readings agree, because it may be changing."""
        if self._descriptor is None or not self._count:
            return 0, 0
        data = b""
        while data != (again := os.pread(self._descriptor, RECORD.size, (self._count - 1) * RECORD.size)):
            data = again
        return RECORD.unpack(data)

    def _known(self, stream: int) -> int:
        """Return how many bytes of a stream are in order."""
        places = (self._record(number)[1] for number in reversed(range(self._count)))
        return next((place // 2 for place in places if place % 2 == stream), 0)


def trim(path: Path, keep_bytes: int) -> bool:
    """Discard older output of a stream of more than ``keep_bytes``, down to half of that; offsets stay as they are."""
    descriptor = open_regular(path, os.O_RDWR) if sys.platform == "linux" else None
    if descriptor is None:
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_blocks * 512 <= keep_bytes:
            return False
        block = status.st_blksize
        length = max(status.st_size - keep_bytes // 2, 0) // block * block
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        return fallocate(descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, 0, length) == 0
    finally:
        os.close(descriptor)


def _first_kept(descriptor: int, offset: int, size: int) -> int:
    if offset >= size or not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # the file system does not know holes, or the rest is one
        return offset
