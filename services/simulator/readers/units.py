"""The unit of carbon intensity that a column's name states."""

import re
import unicodedata

from services.core.domain.units import G_PER_KWH_PER_LB_PER_MWH
from services.simulator.raw import TraceFormatError

G_PER = {
    **dict.fromkeys(("g", "gr", "gram", "grams", "gramme", "grammes"), 1.0),
    **dict.fromkeys(("kg", "kgs", "kilogram", "kilograms"), 1_000.0),
    **dict.fromkeys(("lb", "lbs", "pound", "pounds"), 1_000 * G_PER_KWH_PER_LB_PER_MWH),
    **dict.fromkeys(("t", "tonne", "tonnes"), 1_000_000.0),
}
KWH_PER = {"kwh": 1.0, "mwh": 1_000.0, "gwh": 1_000_000.0}
OTHERS = frozenset(
    (
        *("mg", "ug", "mt", "kt", "gt", "oz", "ounce", "ounces", "ton", "tons", "mol", "share", "ratio"),
        *("w", "kw", "mw", "gw", "wh", "twh", "j", "kj", "mj", "gj", "tj", "btu", "mmbtu", "therm", "therms", "kcal"),
        *("%", "percent", "pct", "$", "€", "£", "usd", "eur", "gbp"),
    )
)
"""Words of other units, the ton among them, which has three sizes."""
NO_UNIT = "{name!r} states no unit: taken as gCO2/kWh"

_CO2 = re.compile(r"(?:co2|carbon dioxide)(?:[-_ ]?e(?:q(?:uiv(?:alents?)?)?)?)?(?![a-z])|co2|co(?![a-z])")
_WORD = re.compile(r"[a-z]+|[%$€£]")


def scale_of(name: str) -> tuple[float, str]:
    """Return the factor from a column's values to gCO2/kWh, and a note for people, empty if that is the stated unit.

    Raises:
        TraceFormatError: The name states another unit than g, kg, lb or t per kWh, MWh or GWh.
    """
    plain = unicodedata.normalize("NFKC", name).lower()
    plain = re.sub(r"metric[-_ ]tons?", " tonnes ", plain)
    is_of_co2 = re.search(r"(?<![a-z])(?:kg|lbs?|[gt])(?=co)", plain) is not None
    words = _WORD.findall(re.sub(r"per(?=[kmgt]?wh)", " per ", _CO2.sub(" ", plain)))
    has_others = not OTHERS.isdisjoint(words) and len(words) > 1  # MT alone is Malta
    masses = [word for word in words if word in G_PER and (len(word) > 1 or is_of_co2 or "wh" in plain)]
    energies = [word for word in words if word in KWH_PER]
    if len(masses) == len(energies) == 1 and not has_others:
        scale = G_PER[masses[0]] / KWH_PER[energies[0]]
        return scale, "" if scale == 1 else f"{name}: converted to gCO2/kWh, times {scale:.6g}"
    # Grams alone, and no more than "per kWh", leave nothing else to take them for.
    if not has_others and {G_PER[each] for each in masses} <= {1.0} and set(energies) <= {"kwh"}:
        return 1.0, f"the column {NO_UNIT.format(name=name)}"
    raise TraceFormatError(
        f"the column {name!r} states a unit that is not understood; give g, kg, lb or t per kWh, MWh or GWh"
    )
