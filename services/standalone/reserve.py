"""Disk space reserved for PostgreSQL, for when nobody else has left it any.

A file beside the database holds blocks that nobody else can take. When the disk is almost full, the file is emptied,
so that heartbeats and the ends of jobs can still be stored; when there is room again, it is filled again.
"""

import asyncio
import os
from pathlib import Path

from services.kit.logging import Log

log = Log(__name__)

LARGEST_BYTES = 256 << 20
_SHARE, _FULL_SHARE = 0.05, 0.02
_LOOK_S = 1.0


async def keep(folder: Path) -> None:
    """Fill and empty the file ``reserve`` in a folder as the free space requires; never returns."""
    while True:
        try:
            await asyncio.to_thread(look, folder)
        except OSError as error:
            log.warning("reserve.not_kept", error=str(error))
        await asyncio.sleep(_LOOK_S)


def look(folder: Path) -> None:
    """Empty the file if the disk is almost full; fill it if there is plenty of room."""
    disk, file = os.statvfs(folder), folder / "reserve"
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    size = min(LARGEST_BYTES, int(total * _SHARE))
    held = file.stat().st_size if file.exists() else 0
    if held and free < min(LARGEST_BYTES, int(total * _FULL_SHARE)):
        os.truncate(file, 0)
        log.warning("reserve.given_up", bytes=held, why="the disk of the database is full")
    elif held < size and free > 3 * size and hasattr(os, "posix_fallocate"):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
