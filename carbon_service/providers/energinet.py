"""Denmark by five minutes: Energinet's CO2 emission of consumption, imports included, and its forecast; no key."""

from dataclasses import replace
from typing import Any

import orjson

from carbon_service.providers.entry import LiveProvider, LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import (
    DAY_S,
    Feed,
    ForecastIssue,
    ProviderError,
    Series,
    readings,
    rows,
    series,
    written,
)
from services.core.domain.carbon import Signal

BASE_URL = "https://api.energidataservice.dk/dataset"
MINUTE = "%Y-%m-%dT%H:%M"
AREAS = {"DK-DK1": "DK1", "DK-DK2": "DK2"}
STEP_S, ZONE_S = 300.0, 2 * 3600.0  #: Ranges are asked for wider by Denmark's distance from UTC, and cut here
FEED = Feed(
    zone_name="",
    attribution="Energinet, Energi Data Service (CO2Emis, CO2EmisProg), CC BY 4.0",
    step_s=STEP_S,
    max_age_s=3600.0,
    poll_interval_s=STEP_S,
    history_s=30 * DAY_S,
    revision_s=DAY_S,
    forecast_interval_s=3600.0,
    forecast_max_age_s=6 * 3600.0,
)


class EnerginetSettings(LiveSettings):
    """Prefix ``CARBON_ENERGINET_``."""

    url: str = BASE_URL


class Energinet(LiveProvider[EnerginetSettings]):
    """Zones ``DK-DK1`` and ``DK-DK2``."""

    name = "energinet"

    def __init__(self, settings: EnerginetSettings, context: ProviderContext) -> None:
        super().__init__(settings, context, RateLimit(30, 60.0))

    def feed(self, zone: str) -> Feed | None:
        return replace(FEED, zone_name=f"Denmark, {AREAS[zone]}") if zone in AREAS else None

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        return await self._read("CO2Emis", zone, start_s, end_s)

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return Energinet's own forecast, which reaches to the end of the next day at most."""
        now_s = self._now_s()
        found = await self._read("CO2EmisProg", zone, now_s - now_s % STEP_S, now_s + horizon_s)
        return found.issued(now_s)

    async def prices(self, area: str, currency: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return the day-ahead prices of a zone, or of another price area such as ``SE3``, in EUR or DKK.

        Raises:
            ProviderError: They are asked for in another currency, or the answer has no rows.
        """
        if currency not in ("EUR", "DKK"):
            raise ProviderError(f"energinet has prices in EUR and DKK, not in {currency}")
        found = await self._rows("DayAheadPrices", AREAS.get(area, area), "TimeUTC", start_s, end_s)
        read = readings(found, "TimeUTC", f"DayAheadPrice{currency}")
        return [(at, value / 1_000.0) for at, value, _ in read if at is not None and value is not None]

    async def _rows(self, what: str, area: str, column: str, start_s: float, end_s: float) -> list[Any]:
        params: dict[str, str | int] = {
            **{"start": written(start_s - ZONE_S, MINUTE), "end": written(end_s + ZONE_S, MINUTE), "limit": 0},
            **{"filter": orjson.dumps({"PriceArea": [area]}).decode(), "sort": f"{column} ASC"},
        }
        return rows(await self._client.get(f"/{what}", params), "records")

    async def _read(self, what: str, zone: str, start_s: float, end_s: float) -> Series:
        found = await self._rows(what, AREAS[zone], "Minutes5UTC", start_s, end_s)
        return series(readings(found, "Minutes5UTC", "CO2Emission", within=(start_s, end_s)), STEP_S)


ENTRY = ProviderEntry("energinet", EnerginetSettings, Energinet)
