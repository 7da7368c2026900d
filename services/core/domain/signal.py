"""What a carbon intensity measures."""

from __future__ import annotations

from enum import StrEnum


class Signal(StrEnum):
    """What an intensity measures. Values of different signals are never mixed or compared."""

    AVERAGE_DIRECT = "average_direct"
    AVERAGE_LIFECYCLE = "average_lifecycle"
    MARGINAL = "marginal"
