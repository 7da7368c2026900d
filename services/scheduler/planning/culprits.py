"""Which jobs no round can be held with: one that nobody foresaw must not stop a whole cluster."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

Unit = TypeVar("Unit")

MOST = 8  #: Found one by one; if rounds still fail, all that came after them are left out with them


async def culprits(units: Sequence[Unit], passes: Callable[[Sequence[Unit]], Awaitable[bool]]) -> Sequence[Unit] | None:
    """Return units without which a check passes; None if it fails without any of them, too.

    Each is found by halving: the first with which the check fails, beside those before it that were not left out.

    Args:
        units: In order: of units that fail only together, the later is left out.
        passes: The check; asked once, and some log2(n_units) times for each that is found.
    """
    if not await passes([]):
        return None
    found, good, rest = list[Unit](), list[Unit](), [*units]
    while not await passes([*good, *rest]):
        if len(found) == MOST:
            return [*found, *rest]
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await passes([*good, *rest[:middle]]) else (low, middle)
        good, found, rest = [*good, *rest[:low]], [*found, rest[low]], rest[high:]
    return found
