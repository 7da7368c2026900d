"""Whether the database's clock can be trusted with leases: it may be set, like any host's."""

import math
import time
from collections.abc import Callable

from services.db import nodes
from services.db.database import Connection
from services.kit.logging import Log

log = Log(__name__)

MARGIN_SHARE = 0.1
LEAST_JUMP_S = 0.1
SLEW = 1e-3
"""What a clock may gain in a second while it is brought right without a jump: twice what the kernel permits."""


class DatabaseClock:
    """Compares the database's clock with this process's own, which cannot be set.

    If the database's clock is set forward, leases seem to be over that are not: until all of them are, none counts as
    over. If it is set back, leases seem longer than they are: they are made to end when they would have.

    What the clock did before this process looked is not known. Unless told otherwise, it is taken to have been set
    forward until then: no lease counts as over until the longest of those given before would be.
    """

    def __init__(
        self, margin_s: float, steady_s: Callable[[], float] | None = None, *, begins_unsure: bool = True
    ) -> None:
        """Begin without knowledge.

        Args:
            margin_s: How long leases must have been over before nodes are given up.
            steady_s: A clock that cannot be set; by default the machine's.
            begins_unsure: Whether the database's clock may have been set before the first reading.
        """
        self._margin_s, self._steady_s = margin_s, steady_s or time.monotonic
        self._least_jump_s = max(LEAST_JUMP_S, MARGIN_SHARE * margin_s)
        self._most_ahead_s = math.inf
        self._begins_unsure = begins_unsure
        self._read_at_s = self._unsure_until_s = -math.inf

    async def is_steady(self, connection: Connection) -> bool:
        """Read the database's clock, first in a transaction; return whether leases that it says are over really are."""
        asked_at_s = self._steady_s()
        await nodes.shorten_leases(connection)
        database_s, longest_s = await nodes.clock(connection)
        answered_at_s = self._steady_s()
        allowed_s = self._least_jump_s + SLEW * (answered_at_s - self._read_at_s)
        ahead_by_s = database_s - answered_at_s - self._most_ahead_s
        if self._begins_unsure:
            self._begins_unsure = False
            self._unsure_until_s = answered_at_s + longest_s + self._margin_s
        elif ahead_by_s > allowed_s:
            self._unsure_until_s = answered_at_s + longest_s + self._margin_s
            log.warning("database_clock.jumped", by_s=round(ahead_by_s, 1), wait_s=round(longest_s + self._margin_s, 1))
        self._most_ahead_s, self._read_at_s = database_s - asked_at_s, answered_at_s
        return answered_at_s >= self._unsure_until_s
