"""How full a disk is: below a reserve, nothing new that needs room is started, so that running work can be recorded."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.contracts.codes import ProblemCode
from services.kit.problems import ProblemError

LARGEST_SHARE = 0.1
_RECOVERED = 1.25
RESERVE_FILES = 10_000
"""Files (inodes) that are to stay free where a file system counts them; of a small one a tenth at most."""


def reserve_of(total_bytes: int, wanted_bytes: int) -> int:
    """Return how many bytes of a file system to keep free: the wanted number, but at most a tenth of a small one."""
    return min(wanted_bytes, int(total_bytes * LARGEST_SHARE))


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The current free space of a file system."""

    free_bytes: int  #: How much this process may still write
    reserve_bytes: int
    free_files: int = 0  #: How many files (inodes) this process may still create
    reserve_files: int = 0  #: How many of those are kept free; 0 if the file system does not count them

    @property
    def is_low(self) -> bool:
        """Whether a reserve has been touched."""
        return self.free_bytes < self.reserve_bytes or self.free_files < self.reserve_files

    @property
    def has_recovered(self) -> bool:
        """Whether there is again enough room beyond the reserves that work will not stop again at once."""
        return self.free_bytes >= self.reserve_bytes * _RECOVERED and self.free_files >= self.reserve_files * _RECOVERED

    def sentence(self) -> str:
        """Return the sentence that operators read while a reserve is touched, without its subject."""
        if self.free_files < self.reserve_files * _RECOVERED and self.free_bytes >= self.reserve_bytes:
            free = f"{self.free_files:,} files (inodes) can still be made"
            return f"is nearly full: {free}, and {self.reserve_files:,} are to stay free."
        free, reserve = (amount / 2**20 for amount in (self.free_bytes, self.reserve_bytes))
        return f"is nearly full: {free:,.0f} MiB are free, and {reserve:,.0f} MiB are to stay free."


def disk_space(folder: Path, reserve_bytes: int) -> DiskSpace:
    """Return how full the file system of a folder is.

    Args:
        reserve_bytes: What must stay free; on a small file system a tenth at most. 0 watches nothing.

    Raises:
        OSError: The file system cannot be queried.
    """
    found = os.statvfs(folder)
    return DiskSpace(
        found.f_bavail * found.f_frsize,
        reserve_of(found.f_blocks * found.f_frsize, reserve_bytes),
        found.f_favail,
        reserve_of(found.f_files, RESERVE_FILES) if reserve_bytes else 0,
    )


class DiskWatch:
    """Whether a folder's disk is too full to start anything on it; once it was, until there is clearly room again.

    Args:
        folder: On the disk; None if it is not known, and nothing is watched.
        reserve_bytes: What must stay free; on a small file system a tenth at most.
    """

    def __init__(self, folder: Path | None, reserve_bytes: int) -> None:
        self._folder, self._reserve_bytes = folder, reserve_bytes
        self._is_low = False

    def space(self) -> DiskSpace | None:
        """Return how full the disk is now; None if that is not known."""
        try:
            return disk_space(self._folder, self._reserve_bytes) if self._folder else None
        except OSError:
            return None

    def problem(self) -> str:
        """Return what is wrong, as ``DiskSpace.sentence``; empty while there is room."""
        found = self.space()
        self._is_low = found is not None and (found.is_low or (self._is_low and not found.has_recovered))
        return found.sentence() if found is not None and self._is_low else ""

    def check(self, what: str) -> None:
        """Return if something that needs room may start.

        Args:
            what: Whose disk it is, as the first words of the message.

        Raises:
            ProblemError: 503, there is no room for it now.
        """
        if problem := self.problem():
            detail = f"{what} {problem} Nothing new is accepted until there is room; what runs goes on."
            raise ProblemError(503, ProblemCode.UNAVAILABLE, detail, headers={"Retry-After": "30"})
