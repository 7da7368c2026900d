"""Energy from the running counters of devices. Without NumPy: agents are installed without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from services.core.domain.errors import DomainError


def counter_energy_j(readings_j: Sequence[float]) -> float:
    """Return the energy between the first and the last reading of a counter that only ever grows, joules.

    A counter that falls was reset (a driver reload, a new host); what it shows since then is counted, what it lost is
    not.

    Args:
        readings_j: Readings in order of time; fewer than two give 0.

    Raises:
        DomainError: a reading is negative or not finite.
    """
    if not all(math.isfinite(reading) and reading >= 0 for reading in readings_j):
        raise DomainError("an energy counter reads finite joules >= 0")
    return sum((after - before if after >= before else after for before, after in pairwise(readings_j)), start=0.0)
