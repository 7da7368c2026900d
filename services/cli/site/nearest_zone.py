"""The grid zone of a machine, by its time zone, and the best free source of that zone's carbon intensity."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOCALTIME = Path("/etc/localtime")
ZONES = {
    **{"Europe/London": "GB", "Europe/Paris": "FR", "Europe/Copenhagen": "DK-DK1,DK-DK2", "Europe/Berlin": "DE"},
    **{"Europe/Vienna": "AT", "Europe/Sarajevo": "BA", "Europe/Brussels": "BE", "Europe/Sofia": "BG"},
    **{"Europe/Zurich": "CH", "Europe/Prague": "CZ", "Europe/Tallinn": "EE", "Europe/Madrid": "ES"},
    **{"Europe/Helsinki": "FI", "Europe/Athens": "GR", "Europe/Zagreb": "HR", "Europe/Budapest": "HU"},
    **{"Europe/Dublin": "IE", "Europe/Rome": "IT", "Europe/Vilnius": "LT", "Europe/Riga": "LV"},
    **{"Europe/Amsterdam": "NL", "Europe/Oslo": "NO-NO1,NO-NO2,NO-NO3,NO-NO4,NO-NO5", "Europe/Warsaw": "PL"},
    **{"Europe/Lisbon": "PT", "Europe/Bucharest": "RO", "Europe/Belgrade": "RS", "Europe/Bratislava": "SK"},
    **{"Europe/Ljubljana": "SI", "Europe/Stockholm": "SE,SE-SE1,SE-SE2,SE-SE3,SE-SE4"},
    **{"America/Los_Angeles": "US-CAL-CISO,US-NW-BPAT,US-CAL-LDWP", "America/Phoenix": "US-SW-AZPS,US-SW-SRP"},
    **{"America/Denver": "US-NW-PSCO,US-NW-PACE", "America/Chicago": "US-MIDW-MISO,US-TEX-ERCO,US-CENT-SWPP"},
    **{
        "America/New_York": "US-MIDA-PJM,US-NY-NYIS,US-NE-ISNE,US-CAR-DUK,US-FLA-FPL",
        "America/Detroit": "US-MIDW-MISO",
    },
    **{"Australia/Sydney": "AU-NSW", "Australia/Brisbane": "AU-QLD", "Australia/Adelaide": "AU-SA"},
    **{"Australia/Hobart": "AU-TAS", "Australia/Melbourne": "AU-VIC"},
}
"""The zones of a time zone, the likeliest first. Time zones with an older name are not in it."""
ENTSOE = (
    *("entsoe", "the last one to three hours, and a forecast; forecasts are our own"),
    *("CARBON_ENTSOE_TOKEN", "https://transparency.entsoe.eu"),
)
SOURCES = {
    "GB": ("uk", "life-cycle intensity"),
    "FR": ("eco2mix", "imports and a forecast; forecasts are our own"),
    "DK-": ("energinet", "life-cycle intensity"),
    "AU-": ("aemo", "life-cycle intensity, panels on roofs, imports and a forecast"),
    "US-": (
        *("eia", "up to a day of the past, and a forecast; forecasts are our own"),
        *("CARBON_EIA_KEY", "https://www.eia.gov/opendata/register.php"),
    ),
}
"""The best free source of zones by how their names begin, and what it lacks and needs; ``ENTSOE`` has the others."""


@dataclass(frozen=True)
class Choice:
    """What is proposed for a machine."""

    time_zone: str
    zone: str
    others: tuple[str, ...]  #: Further zones of the time zone
    provider: str  #: Its name in ``CARBON_PROVIDERS``
    lacks: str
    variable: str = ""  #: The variable that it needs; empty if none
    free_at: str = ""  #: Where that is given for free

    def lines(self) -> list[str]:
        said = [f"zone {self.zone}, by this machine's time zone {self.time_zone}"]
        if self.others:
            said[0] += f" (also in it: {', '.join(self.others)}; `wattshift up --zone ZONE` takes another)"
        said.append(f"carbon intensity from {self.provider}, free; what it lacks: {self.lacks}")
        return said


def time_zone_of(environment: Mapping[str, str] = os.environ, localtime: Path = LOCALTIME) -> str:
    """Return the name of this machine's time zone, such as Europe/Berlin; empty if it is not known."""
    name = environment.get("TZ", "").removeprefix(":")
    if not name:
        _, _, name = str(localtime.resolve()).partition("zoneinfo/")
    return name


def choice_of(time_zone: str) -> Choice | None:
    """Return what is proposed in a time zone; None if no zone of it has a free source."""
    zone, *others = ZONES.get(time_zone, "").split(",")
    if not zone:
        return None
    found = next((source for beginning, source in SOURCES.items() if zone.startswith(beginning)), ENTSOE)
    return Choice(time_zone, zone, tuple(others), *found)
