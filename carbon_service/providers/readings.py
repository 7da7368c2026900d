"""Points from a provider's answer: values that are not a finite number at a valid instant are rejected and counted."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from carbon_service.providers.protocol import Point, ProviderError, Series


def instant_s(value: Any) -> float | None:
    """Return an ISO 8601 instant as UTC seconds; without an offset it is taken as UTC. ``None`` for anything else."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def number(value: Any) -> float | None:
    """Return a finite number, even if written as a decimal string; ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    return parsed if math.isfinite(parsed) else None


def rows(answer: Any, *path: str) -> list[Any]:
    """Return the list of rows at ``path`` of an answer; ``ProviderError`` if there is no list there."""
    found = answer
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, list):
        raise ProviderError(f"the answer has no list at {'.'.join(path) or 'its root'}")
    return found


def field(row: Any, *path: str) -> Any:
    """Return the value at ``path`` of a row; ``None`` if there is none."""
    found = row
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


Reading = tuple[float | None, float | None, bool]
"""When an interval begins (UTC seconds), its value, whether it is estimated; ``None`` for a value that is refused."""


def series(readings: Iterable[Reading], step_s: float) -> Series:
    """Return readings as points in chronological order; of two at one instant, the later in the answer counts.

    An interval ends where the next begins, but lasts no longer than ``step_s``: a gap stays a gap, and a step that is
    shorter than usual stays short.
    """
    found: dict[float, tuple[float, bool]] = {}
    skipped = 0
    for start_s, value, is_estimated in readings:
        if start_s is None or value is None:
            skipped += 1
        else:
            found[start_s] = (value, is_estimated)
    starts = sorted(found)
    ends = [min(start + step_s, following) for start, following in pairwise(starts)]
    ends += [start + step_s for start in starts[-1:]]
    return Series(tuple(Point(start, end, *found[start]) for start, end in zip(starts, ends, strict=True)), skipped)
