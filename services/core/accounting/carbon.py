"""From energy to emissions."""

from services.core.domain.errors import DomainError
from services.core.domain.units import J_PER_KWH


def carbon_gco2(energy_j: float, intensity_gco2_per_kwh: float, pue: float = 1.0) -> float:
    """Return the emissions of an amount of energy: ``energy * intensity * PUE``, gCO2.

    Args:
        energy_j: Energy at the device, joules, >= 0.
        intensity_gco2_per_kwh: Grid intensity while the energy was used; a marginal signal may be negative.
        pue: Facility energy over device energy, >= 1. GREEN section 9 leaves it at 1.

    Raises:
        DomainError: negative energy, or a PUE below 1.
    """
    if not energy_j >= 0:
        raise DomainError(f"energy is at least 0 J, not {energy_j}")
    if not pue >= 1:
        raise DomainError(f"a PUE is at least 1, not {pue}")
    return energy_j / J_PER_KWH * intensity_gco2_per_kwh * pue


def relative_change(value: float, base: float) -> float | None:
    """Return the change from a base to a figure, as a share of the base; None if the base is not above 0.

    With a negative base, as sums of marginal emissions can be, an increase would appear as a decrease.
    """
    return value / base - 1 if base > 0 else None


def percent_change(value: float, base: float) -> str:
    """Return ``relative_change`` as a signed percentage, and ``-`` where there is none."""
    changed = relative_change(value, base)
    if changed is None or changed != changed:
        return "-"
    percent = round(100 * changed, 1)
    return f"{percent:+.1f} %" if percent else "0.0 %"
