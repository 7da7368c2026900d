"""Which of several models that share requests by weight gets the next one."""

from collections.abc import Mapping
from zlib import crc32

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, are spread evenly over 0 .. 1, however many there are."""


def point_of(session: str | None, count: int) -> float:
    """Return the point, 0 .. 1, of the ``count``-th request; the same for all requests of a session."""
    return count * GOLDEN % 1.0 if session is None else crc32(session.encode()) / 2**32


def share_at(weights: Mapping[str, float], at: float) -> str | None:
    """Return whose share the point ``at`` lies in, 0 .. 1; None if there are none."""
    left, found = at * sum(weights.values()), None
    for name, weight in weights.items():
        found = name
        left -= weight
        if left < 0:
            break
    return found
