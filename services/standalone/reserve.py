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


class Reserve:
    """The file ``reserve`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "reserve"

    async def keep(self) -> None:
        """Fill and empty the file as the free space requires; never returns."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except OSError as error:
                log.warning("reserve.not_kept", error=str(error))
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Empty the file if the disk is almost full; fill it if there is plenty of room."""
        disk = os.statvfs(self._path.parent)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        size = min(LARGEST_BYTES, int(total * _SHARE))
        held = self._held()
        if held and free < min(LARGEST_BYTES, int(total * _FULL_SHARE)):
            os.truncate(self._path, 0)
            log.warning("reserve.given_up", bytes=held, why="the disk of the database is full")
        elif held < size and free > 3 * size and hasattr(os, "posix_fallocate"):
            self._fill(size)

    def _held(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _fill(self, size: int) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
