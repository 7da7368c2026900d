"""The hourly generation by source of each balancing authority of the United States, and what flows between them: EIA's
API v2, form EIA-930."""

from collections.abc import AsyncIterator

from pydantic import SecretStr

from carbon_service.providers.entry import LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.mix import STORED, UNKNOWN, Mix, MixProvider
from carbon_service.providers.protocol import DAY_S, Feed, field, instant_s, number, rows, written

BASE_URL = "https://api.eia.gov/v2"
HOUR_S, HOUR = 3600.0, "%Y-%m-%dT%H"
ROWS_PER_PAGE, PAGES = 5_000, 20  #: The API gives no more rows at once
SOURCES = {
    **{"COL": "coal", "NG": "gas", "NUC": "nuclear", "OIL": "oil", "WAT": "hydro", "GEO": "geothermal"},
    **{"SUN": "solar", "SNB": "solar", "WND": "wind", "WNB": "wind", "BAT": STORED, "PS": STORED, "UES": STORED},
}
FEED = Feed(
    zone_name="",
    attribution="U.S. Energy Information Administration, Form EIA-930 (generation, interchange); factors of IPCC AR5",
    step_s=HOUR_S,
    max_age_s=36 * HOUR_S,  # authorities report sources by the morning of the next day
    poll_interval_s=HOUR_S,
    history_s=90 * DAY_S,
    revision_s=2 * DAY_S,
)


class EiaSettings(LiveSettings):
    """Prefix ``CARBON_EIA_``."""

    url: str = BASE_URL
    key: SecretStr


class Eia(MixProvider[EiaSettings]):
    """Zones ``US-...-CODE`` by the code of their balancing authority, such as ``US-CAL-CISO``."""

    name = "eia"
    recent_s = 2 * DAY_S

    def __init__(self, settings: EiaSettings, context: ProviderContext) -> None:
        super().__init__(FEED, settings, context, RateLimit(60, 60.0))
        self._key = settings.key.get_secret_value()

    def area(self, zone: str) -> str | None:
        """Return the code of the balancing authority."""
        country, *regions = zone.split("-")
        return regions[-1] if country == "US" and len(regions) == 2 else None

    async def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        hours: dict[float | None, dict[str, float]] = {}
        for at_s, row in await self._rows("fuel-type-data", "respondent", area, start_s, end_s):
            source, value = SOURCES.get(str(field(row, "fueltype")), UNKNOWN), number(field(row, "value"))
            mix = hours.setdefault(at_s, {})
            if value is not None:
                mix[source] = mix.get(source, 0.0) + value
        for at_s, mix in hours.items():
            yield Mix(at_s, mix)

    async def inflows(self, area: str, start_s: float, end_s: float) -> dict[str, dict[float, float]]:
        """Return what flows in from each authority beside it, by its own meters."""
        flows: dict[str, dict[float, float]] = {}
        for at_s, row in await self._rows("interchange-data", "fromba", area, start_s, end_s):
            value = number(field(row, "value"))
            if at_s is not None and value is not None:
                flows.setdefault(str(field(row, "toba")), {})[at_s] = max(0.0, -value)
        return flows

    async def _rows(
        self, data: str, facet: str, area: str, start_s: float, end_s: float
    ) -> list[tuple[float | None, object]]:
        """Return rows with the beginning of the hour that each is of, which the API names by its end, in UTC."""
        params: dict[str, str | int] = {
            **{"api_key": self._key, "frequency": "hourly", "data[0]": "value", f"facets[{facet}][0]": area},
            **{"start": written(start_s, HOUR), "end": written(end_s + HOUR_S, HOUR), "length": ROWS_PER_PAGE},
            **{"sort[0][column]": "period", "sort[0][direction]": "asc"},
        }
        found: list[tuple[float | None, object]] = []
        for page in range(PAGES):
            answer = await self._client.get(
                f"/electricity/rto/{data}/data/", {**params, "offset": page * ROWS_PER_PAGE}, cache_s=60.0
            )
            new = rows(answer, "response", "data")
            ends = (instant_s(f"{field(row, 'period')}:00:00+00:00") for row in new)
            found += [(None if end is None else end - HOUR_S, row) for end, row in zip(ends, new, strict=True)]
            if len(new) < ROWS_PER_PAGE:
                break
        return found


ENTRY = ProviderEntry("eia", EiaSettings, Eia)
