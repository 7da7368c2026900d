"""Ids that sort by the time they were made, and the time itself."""

from __future__ import annotations

import os
import threading
import time
from datetime import UTC, datetime

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
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
    text = ""
    for _ in range(26):
        text = _ALPHABET[value & 31] + text
        value >>= 5
    return f"{prefix}_{text}"
