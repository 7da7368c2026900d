"""What is kept of ended ranks, and for how long."""

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from gpu_agent import trees
from gpu_agent.ranks import RankFolder
from gpu_agent.sources import remove_sources
from services.kit.logging import Log

log = Log(__name__)

GENERATIONS_KEPT_S = 30 * 86_400  #: Commands older than this are no longer delivered
GENERATIONS_EVERY_S = 3_600.0


class Retention:
    """The folders of ended and settled ranks. Nothing is written there any more: each is looked into and measured once.

    A node of short jobs keeps tens of thousands of them.
    """

    def __init__(self, allocations: Path, generations: Path) -> None:
        self._allocations, self._generations = allocations, generations
        self._generations_at_s = -math.inf
        self._settled: dict[str, tuple[float, int]] = {}
        """When each ended, and its size on disk, by name; those that ended first come first."""

    def clean(self, age_s: float, total_bytes: int, lacking_bytes: int = 0) -> int:
        """Remove the expired folders, and then the oldest until the rest fits; return how many.

        Args:
            age_s: How long a folder is kept.
            lacking_bytes: What the disk lacks of its reserve: this much is removed in any case.
        """
        self._look()
        now = time.time()
        kept = sum(size for _, size in self._settled.values())
        most = min(total_bytes, kept - lacking_bytes) if lacking_bytes > 0 else total_bytes
        removed: list[str] = []
        for name, (ended_at, size) in self._settled.items():
            if now - ended_at <= age_s and kept <= most:
                break
            trees.remove(self._allocations / name)
            kept -= size
            removed.append(name)
        for name in removed:
            del self._settled[name]
        if time.monotonic() - self._generations_at_s > GENERATIONS_EVERY_S:
            self._generations_at_s = time.monotonic()
            with suppress(OSError):
                for path in self._generations.iterdir():
                    if now - path.stat().st_mtime > GENERATIONS_KEPT_S:
                        path.unlink()
        if removed:
            log.info("retention.removed", folders=len(removed), kept_bytes=kept)
        return len(removed)

    def _look(self) -> None:
        """Find the ranks that have been settled since the last look, and remove the files of their gangs."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._allocations)
        new: dict[str, tuple[float, int]] = {}
        for name in names:
            path = self._allocations / name
            if name not in self._settled and RankFolder(path).is_released():
                with suppress(OSError):
                    ended_at = path.stat().st_mtime
                    remove_sources(path)
                    new[name] = ended_at, trees.disk_bytes(path)
        there = {*names}
        known = {name: of for name, of in self._settled.items() if name in there}
        self._settled = known | dict(sorted(new.items(), key=lambda each: each[1]))
