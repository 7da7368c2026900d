"""What is kept free of a disk, so that what must be written down still can be."""

from __future__ import annotations

LARGEST_SHARE = 0.1


def reserve_of(total_bytes: int, wanted_bytes: int) -> int:
    """Return how many bytes of a file system stay free: what is wanted, of a small one a tenth at most."""
    return min(wanted_bytes, int(total_bytes * LARGEST_SHARE))
