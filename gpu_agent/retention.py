"""What is kept of ended ranks, and for how long."""

import time
from contextlib import suppress
from pathlib import Path

from gpu_agent import trees
from gpu_agent.ranks import RankFolder
from services.kit.logging import Log

log = Log(__name__)

GENERATIONS_KEPT_S = 30 * 86_400  #: Commands older than this are no longer delivered


def clean(allocations: Path, generations: Path, age_s: float, total_bytes: int, lacking_bytes: int = 0) -> int:
    """Remove folders of ended and settled ranks: the expired ones, then the oldest until the rest fits.

    Args:
        age_s: How long a folder is kept.
        lacking_bytes: What the disk lacks of its reserve: this much is removed in any case.

    Returns:
        The number of folders removed.
    """
    settled = sorted(_settled(allocations))
    now = time.time()
    kept = sum(size for _, size, _ in settled)
    most = min(total_bytes, kept - lacking_bytes) if lacking_bytes > 0 else total_bytes
    removed = 0
    for ended_at, size, path in settled:
        if now - ended_at <= age_s and kept <= most:
            break
        trees.remove(path)
        kept -= size
        removed += 1
    with suppress(OSError):
        for path in generations.iterdir():
            if now - path.stat().st_mtime > GENERATIONS_KEPT_S:
                path.unlink()
    if removed:
        log.info("retention.removed", folders=removed, kept_bytes=kept)
    return removed


def _settled(allocations: Path) -> list[tuple[float, int, Path]]:
    """Return, for each settled rank, when it ended, its size on disk, and its folder."""
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in allocations.iterdir():
            with suppress(OSError):
                if RankFolder(path).is_released():
                    found.append((path.stat().st_mtime, trees.disk_bytes(path), path))
    return found
