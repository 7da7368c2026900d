"""How much of a disk is kept free, so that what must be written still can be."""

LARGEST_SHARE = 0.1


def reserve_of(total_bytes: int, wanted_bytes: int) -> int:
    """Return how many bytes of a file system to keep free: the wanted number, but at most a tenth of a small one."""
    return min(wanted_bytes, int(total_bytes * LARGEST_SHARE))
