"""The hourly generation by source of each balancing authority of the United States: EIA's API v2, form EIA-930."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime

import httpx
from pydantic import SecretStr

from carbon_service.providers.entry import ProviderEntry, ProviderSettings
from carbon_service.providers.http import Pacing, ProviderClient, RateLimit
from carbon_service.providers.mix import STORED, UNKNOWN, Mix, MixProvider
from carbon_service.providers.protocol import DAY_S, Feed
from carbon_service.providers.readings import field, instant_s, number, rows

BASE_URL = "https://api.eia.gov/v2"
HOUR_S = 3600.0
ROWS_PER_PAGE, PAGES = 5_000, 20  #: The API gives no more rows at once
SOURCES = {
    **{"COL": "coal", "NG": "gas", "NUC": "nuclear", "OIL": "oil", "WAT": "hydro", "GEO": "geothermal"},
    **{"SUN": "solar", "SNB": "solar", "WND": "wind", "WNB": "wind", "BAT": STORED, "PS": STORED, "UES": STORED},
}
FEED = Feed(
    zone_name="",
    attribution="U.S. Energy Information Administration, Form EIA-930; factors of IPCC AR5",
    step_s=HOUR_S,
    max_age_s=36 * HOUR_S,  # authorities report sources by the morning of the next day
    poll_interval_s=HOUR_S,
    history_s=90 * DAY_S,
    revision_s=2 * DAY_S,
)


class Eia(MixProvider):
    """Zones ``US-...-CODE`` by the code of their balancing authority, such as ``US-CAL-CISO``."""

    name = "eia"
    recent_s = 2 * DAY_S

    def __init__(
        self, http: httpx.AsyncClient, now_s: Callable[[], float], pacing: Pacing, key: str, base_url: str = BASE_URL
    ) -> None:
        super().__init__(FEED, now_s)
        self._key = key
        self._client = ProviderClient(http, base_url, pacing, RateLimit(60, 60.0))

    def area(self, zone: str) -> str | None:
        """Return the code of the balancing authority."""
        country, *regions = zone.split("-")
        return regions[-1] if country == "US" and len(regions) == 2 else None

    async def mixes(self, area: str, start_s: float, end_s: float) -> AsyncIterator[Mix]:
        """Yield the hours, which the API names by their end, in UTC."""
        params: dict[str, str | int] = {
            **{"api_key": self._key, "frequency": "hourly", "data[0]": "value", "facets[respondent][0]": area},
            **{"start": _hour(start_s), "end": _hour(end_s + HOUR_S), "length": ROWS_PER_PAGE},
            **{"sort[0][column]": "period", "sort[0][direction]": "asc"},
        }
        hours: dict[object, dict[str, float]] = {}
        for page in range(PAGES):
            answer = await self._client.get(
                "/electricity/rto/fuel-type-data/data/", {**params, "offset": page * ROWS_PER_PAGE}, cache_s=60.0
            )
            found = rows(answer, "response", "data")
            for row in found:
                source, value = SOURCES.get(str(field(row, "fueltype")), UNKNOWN), number(field(row, "value"))
                mix = hours.setdefault(str(field(row, "period")), {})
                if value is not None:
                    mix[source] = mix.get(source, 0.0) + value
            if len(found) < ROWS_PER_PAGE:
                break
        for period, mix in hours.items():
            end = instant_s(f"{period}:00:00+00:00")
            yield Mix(None if end is None else end - HOUR_S, mix)


class EiaSettings(ProviderSettings):
    """Prefix ``CARBON_EIA_``."""

    url: str = BASE_URL
    key: SecretStr


ENTRY = ProviderEntry(
    "eia",
    EiaSettings,
    lambda settings, context: Eia(
        context.http, context.now_s, context.pacing, settings.key.get_secret_value(), settings.url
    ),
)


def _hour(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%dT%H}"
