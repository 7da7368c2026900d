"""Files of carbon intensity: their columns, units and signals."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.core.domain.carbon import Signal
from services.core.domain.signal import impossible
from services.core.domain.units import G_PER_KWH_PER_LB_PER_MWH
from services.simulator.raw import RawSeries, ReadReport, TraceFormatError
from services.simulator.readers.text import NO_ZONE, date_s, first_lines, has_zone, header_of, number, open_text, table

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


SIGNALS = {
    "direct": Signal.AVERAGE_DIRECT,
    "lifecycle": Signal.AVERAGE_LIFECYCLE,
    "marginal": Signal.MARGINAL,
    **{signal.value: signal for signal in Signal},
}

POUNDS = {
    "watttime": ("WattTime", "point_time", "value"),
    "pjm": ("PJM", "datetime_beginning_utc", "marginal_co2_rate"),
}  #: Kinds of file of lb CO2/MWh: their maker, and the columns of time and rate

LEAST_MEDIAN, MOST_MEDIAN = 1.0, 2_000.0  #: gCO2/kWh; grids are seldom cleaner or dirtier for most of the time


@dataclass(frozen=True)
class Columns:
    """The columns of a file.

    Attributes:
        time, value: Names of the columns.
        zone, estimated: Names of these columns, if there are any.
    """

    format: str  #: Name of the kind of file
    time: str
    value: str
    scale: float | None = None  #: Factor from the value to gCO2/kWh; None: as the column's name says
    signal: Signal | None = None  #: What the values measure, if the kind of file determines it
    zone: str = ""
    estimated: str = ""
    note: str = ""  #: A note for readers of the report


def columns_of(header: Sequence[str], signal: Signal) -> Columns | None:
    """Return the columns of a file with this header; None for an unknown kind."""
    lower = {name.lower(): name for name in header}
    time = lower.get("datetime (utc)", "")
    family = [name for key, name in lower.items() if key.startswith("carbon intensity gco") and key.endswith(")")]
    if time and family:
        ends = ("(direct)",) if signal is Signal.AVERAGE_DIRECT else ("(life cycle)", "(lca)")
        value = next((name for name in family if name.lower().endswith(ends)), "")
        if signal is Signal.MARGINAL or not value:
            raise TraceFormatError(f"a file of Electricity Maps has no {signal.value} intensity; pick another signal")
        found = next((lower[key] for key in lower if key.startswith(("data estimated", "estimated"))), "")
        return Columns("electricity-maps", time, value, 1.0, signal, lower.get("zone id", ""), found)
    if "datetime" in lower and "carbon_intensity_production_avg" in lower:
        value = lower["carbon_intensity_production_avg"]
        return Columns("eso", lower["datetime"], value, 1.0, Signal.AVERAGE_DIRECT)
    if time and any(key.startswith("actual carbon intensity") for key in lower):
        value = next(name for key, name in lower.items() if key.startswith("actual carbon intensity"))
        return Columns("eso", time, value, 1.0, Signal.AVERAGE_DIRECT)
    if "oootime" in lower and len(header) > 1:
        return Columns("watttime", lower["oootime"], header[1], signal=Signal.MARGINAL)
    for kind, (maker, at, rate) in POUNDS.items():
        if at in lower and rate in lower:
            note, scale = f"{maker}'s lb CO2/MWh converted", G_PER_KWH_PER_LB_PER_MWH
            return Columns(kind, lower[at], lower[rate], scale, Signal.MARGINAL, note=note)
    if "utc time" in lower and "carbon_intensity" in lower:
        return Columns("plain", lower["utc time"], lower["carbon_intensity"])
    if len(header) == 2 and any(word in header[0].lower() for word in ("time", "date", "hour")):
        return Columns("plain", header[0], header[1])
    return None


def read_grid(path: Path, signal: Signal, *, zone: str | None = None) -> RawSeries:
    """Return the whole series of a file.

    Args:
        path: The file, gzipped or not.
        signal: Which one to read if the file has several; for a plain file, what its values are.
        zone: Keep only this zone's rows (``pnode_name`` in PJM's files); also the name of a series that has none.

    Raises:
        TraceFormatError: There is no such file, its kind is unknown, it has another signal than the requested one, or
            nothing in it is usable.
    """
    header = header_of(first_lines(path))
    columns = columns_of(header, signal)
    if columns is None:
        raise TraceFormatError(
            f"{path} is not a known carbon file (columns {', '.join(header[:6])}); known: Electricity Maps, ESO, "
            "WattTime, PJM, or two columns of time and intensity"
        )
    report = ReadReport(path.name, columns.format)
    if columns.signal is not None and columns.signal is not signal:
        raise TraceFormatError(f"{path.name} measures {columns.signal.value}, not {signal.value}: ask for that signal")
    scale, note = (columns.scale, columns.note) if columns.scale is not None else scale_of(columns.value)
    if note:
        report.note(note)
    found: dict[float, float] = {}
    zones: set[str] = set()
    estimated = 0
    place = columns.zone or ("pnode_name" if columns.format == "pjm" else "")
    with open_text(path) as lines:
        for line, row in table(lines, (columns.time, columns.value), report, named=True):
            named = row.get(place, "") if place else ""
            if zone is not None and named and named != zone:
                report.drop(line, "of another zone")
                continue
            if columns.format == "plain" and "utc" not in columns.time.lower() and not has_zone(row[columns.time]):
                report.note(NO_ZONE)
            try:
                time_s, value = date_s(row[columns.time]), number(row[columns.value], columns.value)
            except ValueError as error:
                report.drop(line, str(error))
                continue
            if not np.isfinite(value):
                report.drop(line, "no value")
            elif why := impossible(value, scale, signal):
                report.drop(line, why)
            elif time_s in found:
                report.drop(line, "a time that occurred before")
            else:
                found[time_s] = value * scale
                estimated += row.get(columns.estimated, "").strip().lower() == "true"
                zones |= {named} - {""}
    if len(zones) > 1:
        raise TraceFormatError(f"{path.name} holds several zones ({', '.join(sorted(zones)[:5])}): name one")
    if not found:
        raise TraceFormatError("no value can be used; " + "; ".join(report.sentences()))
    report.kept = len(found)
    if estimated:
        report.note(f"{estimated} values are estimates of the provider ({100 * estimated / len(found):.1f} %)")
    if not LEAST_MEDIAN <= (median := float(np.median(list(found.values())))) <= MOST_MEDIAN:
        report.note(f"the median is {median:.3g} gCO2/kWh: is the unit the right one?")
    times = np.array(sorted(found))
    name = next(iter(zones), zone or path.name.split(".")[0])
    return RawSeries(name, signal, times, np.array([found[time] for time in times]), report)
