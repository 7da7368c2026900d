"""How far a sum in the ledger can be from the truth: the half-width of its 90 % interval.

Errors are taken to be normal and relative to the figure, with the half-widths below. Amounts that share an error are
summed before they are squared, so that the half-width of a total is less than the sum of its parts'. An error is shared
by everything that one node metered, by everything that was modelled or configured (one model, one configuration), and
by everything priced with one zone's intensities. PUE is a stated figure, and exact. docs/method.md gives the reasons.
"""

from collections import defaultdict
from collections.abc import Iterable
from math import fsum, sqrt
from typing import NamedTuple

METERED = 0.05
"""NVML, ``nvmlDeviceGetPowerUsage``: within 5 % of the current power draw. RAPL is taken to be no worse."""
MODELLED = 0.30  #: The GHG Protocol's guidance on uncertainty ranks figures by accuracy: high 5 %, good 15 %, fair 30 %
PUBLISHED = 0.15  #: A carbon intensity that its provider measured; ``GUESSED``: it was estimated, held or forecast
GUESSED = 0.30


class Cell(NamedTuple):
    """What one node in one zone contributes to a sum; ``guessed_gco2`` was not priced by a measured intensity."""

    node_id: str
    zone: str
    energy_j: float
    modelled_j: float
    carbon_gco2: float
    guessed_gco2: float


class HalfWidths(NamedTuple):
    """Half-widths of 90 % intervals."""

    energy_j: float
    carbon_gco2: float


def half_widths(cells: Iterable[Cell]) -> HalfWidths:
    """Return how far the sums of energy and emissions can be from the truth, 9 times out of 10.

    Source: propagation of independent errors to first order, ``h(E)^2 = sum_n (h_m E_n)^2 + (h_s E_s)^2``, with ``E_n``
    what node ``n`` metered and ``E_s`` what was modelled; emissions likewise, plus, for each zone, the square of the
    error of its intensities.
    """
    metered_j: dict[str, float] = defaultdict(float)
    metered_gco2: dict[str, float] = defaultdict(float)
    priced_gco2: dict[str, float] = defaultdict(float)
    modelled_j = modelled_gco2 = 0.0
    for node_id, zone, energy_j, of_it_modelled_j, carbon_gco2, guessed_gco2 in cells:
        of_it_gco2 = carbon_gco2 * of_it_modelled_j / energy_j if energy_j else 0.0
        metered_j[node_id] += METERED * (energy_j - of_it_modelled_j)
        metered_gco2[node_id] += METERED * (carbon_gco2 - of_it_gco2)
        modelled_j += MODELLED * of_it_modelled_j
        modelled_gco2 += MODELLED * of_it_gco2
        priced_gco2[zone] += PUBLISHED * (carbon_gco2 - guessed_gco2) + GUESSED * guessed_gco2
    return HalfWidths(
        energy_j=_together(modelled_j, *metered_j.values()),
        carbon_gco2=_together(modelled_gco2, *metered_gco2.values(), *priced_gco2.values()),
    )


def _together(*independent: float) -> float:
    return sqrt(fsum(each * each for each in independent))
