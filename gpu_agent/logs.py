"""A rank's output: read by offset, and kept within a size while the rank goes on writing."""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


@dataclass(frozen=True)
class LogPiece:
    """Some of a stream: ``data`` begins at ``offset``; ``size`` is that of the whole stream so far."""

    data: bytes
    offset: int
    size: int

    @property
    def next_offset(self) -> int:
        """The offset at which the next piece begins."""
        return self.offset + len(self.data)


def open_regular(path: Path) -> int | None:
    """Open a file that another process writes; None if it is missing or not a regular file.

    A job may put anything where its files are expected: a pipe there must not block the agent.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return descriptor


def read_piece(path: Path, offset: int, limit: int) -> LogPiece:
    """Return up to ``limit`` bytes from ``offset``; a negative offset counts from the end.

    If older output was discarded, the piece begins at what is left.
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


def trim(path: Path, keep_bytes: int) -> bool:
    """Discard the older half of a stream that has more than ``keep_bytes``; offsets stay as they are."""
    if sys.platform != "linux":
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_blocks * 512 <= keep_bytes:
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
