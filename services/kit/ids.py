"""Ids that sort by creation time, the time itself, and the name of this host."""

import os
import re
import socket
import threading
import time
from datetime import UTC, datetime

ID_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [high + low for high in ID_ALPHABET for low in ID_ALPHABET]  # two characters at a time: half the steps
_SHIFTS = range(120, -1, -10)
BLOCK_IDS = len(ID_ALPHABET) ** 3
_lock = threading.Lock()
_last = 0


def utc_now() -> datetime:
    """Return the current time, timezone-aware."""
    return datetime.fromtimestamp(time.time(), UTC)  # a simulation has another ``time.time``


def new_id(prefix: str) -> str:
    """Return ``prefix`` and 26 characters that sort by creation time: 48 bits of milliseconds, 80 random bits.

    Ids made by one process are strictly increasing, so that a page of jobs is in the order of submission.
    """
    global _last
    with _lock:
        value = _last = max(_now_and_random(), _last + 1)
    return _written(prefix, value)


def new_block_id(prefix: str) -> str:
    """Return an id that ends in three zeros and reserves the 32,768 ids that differ from it only there."""
    global _last
    with _lock:
        value = (max(_now_and_random(), _last + 1) + BLOCK_IDS - 1) // BLOCK_IDS * BLOCK_IDS
        _last = value + BLOCK_IDS - 1
    return _written(prefix, value)


def _now_and_random() -> int:
    return (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10), "big") >> 1


def _written(prefix: str, value: int) -> str:
    return f"{prefix}_{''.join([_PAIRS[value >> shift & 1_023] for shift in _SHIFTS])}"


def host_name() -> str:
    """Return the name of this host, with characters replaced that a node's name may not have."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", socket.gethostname()).strip("-.")[:63] or "node"
