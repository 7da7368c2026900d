"""What a carbon intensity measures, and which values it can have."""

from enum import StrEnum


class Signal(StrEnum):
    """What an intensity measures. Values of different signals are never mixed or compared."""

    AVERAGE_DIRECT = "average_direct"
    AVERAGE_LIFECYCLE = "average_lifecycle"
    MARGINAL = "marginal"


MOST_GCO2_PER_KWH = 100_000.0
"""A hundred times what the dirtiest power plant emits, and room enough for marginal rates in a congested grid."""


def impossible(value: float, scale: float, signal: Signal) -> str:
    """Return why no grid can have such an intensity; empty if one can.

    Emissions are not negative unless they are avoided emissions, so only a marginal intensity may be. Providers write
    -999, -9999 or more nines where they have no value.

    Args:
        value: As the provider wrote it.
        scale: Factor that converts it to gCO2/kWh.
        signal: What it measures.
    """
    if not abs(value * scale) <= MOST_GCO2_PER_KWH:
        return f"beyond {MOST_GCO2_PER_KWH:,.0f} gCO2/kWh, as no grid is"
    if value <= -999 and set(f"{-value:g}") == {"9"}:
        return "a number that stands for no value"
    return "an average intensity below 0" if value < 0 and signal is not Signal.MARGINAL else ""
