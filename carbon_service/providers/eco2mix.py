"""France by the quarter of an hour: RTE's eCO2mix, published by ODRÉ; no key is needed."""

from collections.abc import AsyncIterator

from carbon_service.providers.entry import LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.mix import Mix, MixProvider, intensity
from carbon_service.providers.protocol import DAY_S, Feed, field, instant_s, number, rows, written
from services.core.domain.carbon import Signal

MINUTE = "%Y-%m-%dT%H:%M:00Z"
BASE_URL = "https://odre.opendatasoft.com/api/explore/v2.1"
PATH = "/catalog/datasets/eco2mix-national-tr/exports/json"
SOURCES = {
    **{"charbon": "coal", "gaz": "gas", "fioul": "oil", "nucleaire": "nuclear", "hydraulique": "hydro"},
    **{"eolien": "wind", "solaire": "solar", "bioenergies": "biomass"},
}
MOST_TIMES, MOST_APART = 2.0, 20.0
"""RTE's own direct intensity (which counts waste and biomass too) and ours may differ by this factor plus gCO2/kWh."""
FEED = Feed(
    zone_name="France",
    attribution="RTE, eCO2mix, by ODRÉ, Licence Ouverte 2.0; factors of IPCC AR5",
    step_s=1800.0,
    max_age_s=3 * 3600.0,
    poll_interval_s=900.0,
    history_s=30 * DAY_S,
    revision_s=DAY_S,
)


class Eco2mixSettings(LiveSettings):
    """Prefix ``CARBON_ECO2MIX_``."""

    url: str = BASE_URL


class Eco2mix(MixProvider[Eco2mixSettings]):
    """Zone ``FR``."""

    name = "eco2mix"

    def __init__(self, settings: Eco2mixSettings, context: ProviderContext) -> None:
        super().__init__(FEED, settings, context, RateLimit(30, 60.0))

    def area(self, zone: str) -> str | None:
        return "France" if zone == "FR" else None

    async def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        """Yield the steps that are known; those to come are rows without values."""
        names = ",".join(("date_heure", "taux_co2", *SOURCES))
        where = f"date_heure >= '{written(start_s, MINUTE)}' AND date_heure < '{written(end_s, MINUTE)}'"
        answer = await self._client.get(PATH, {"select": names, "where": where, "timezone": "UTC"}, cache_s=60.0)
        for row in rows(answer):
            read = ((source, number(field(row, name))) for name, source in SOURCES.items())
            power_mw = {source: mw for source, mw in read if mw is not None}
            if power_mw or not isinstance(row, dict):
                own, ours = number(field(row, "taux_co2")), intensity(power_mw, Signal.AVERAGE_DIRECT)[0]
                near = own is None or ours is None or max(own, ours) <= MOST_TIMES * min(own, ours) + MOST_APART
                yield Mix(instant_s(field(row, "date_heure")), power_mw, is_doubted=not near)


ENTRY = ProviderEntry("eco2mix", Eco2mixSettings, Eco2mix)
