"""Ids that sort by the time they were made, and the time itself."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in _ALPHABET for low in _ALPHABET]  # two characters at a time: half the steps
_SHIFTS = range(120, -1, -10)
_lock = threading.Lock()
_last = 0


def utc_now() -> datetime:
    """Return now, timezone-aware."""
    return datetime.now(UTC)


def new_id(prefix: str) -> str:
    """Return ``prefix`` and 26 characters that sort by time of creation: 48 bits of milliseconds, 80 random bits.

    Ids made by one process are strictly increasing, so that a page of jobs is in the order of submission.
    """
    global _last
    with _lock:
        value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big") >> 1
        value = _last = max(value, _last + 1)
    return f"{prefix}_{''.join([_PAIRS[value >> shift & 1_023] for shift in _SHIFTS])}"
