"""The Carbon Intensity API of Great Britain's system operator: half-hours, measured and forecast, no key."""

from carbon_service.providers.entry import LiveProvider, LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import (
    Feed,
    ForecastIssue,
    Series,
    field,
    instant_s,
    readings,
    rows,
    series,
    written,
)
from services.core.domain.carbon import Signal

BASE_URL = "https://api.carbonintensity.org.uk"
MINUTE = "%Y-%m-%dT%H:%MZ"
ACTUAL, FORECAST = ("from", "intensity", "actual"), ("from", "intensity", "forecast")
HALF_HOUR_S = 1800.0
LONGEST_RANGE_S = 13 * 86_400.0  # the documented limit is 14 days, counted in whole half-hours
FEED = Feed(
    zone_name="Great Britain",
    attribution="Carbon Intensity API, National Energy System Operator (NESO), CC BY 4.0",
    step_s=HALF_HOUR_S,
    max_age_s=3 * HALF_HOUR_S,
    poll_interval_s=300.0,
    history_s=LONGEST_RANGE_S,
    revision_s=6 * HALF_HOUR_S,
    forecast_interval_s=HALF_HOUR_S,
    forecast_max_age_s=4 * HALF_HOUR_S,
)


class UkSettings(LiveSettings):
    """Prefix ``CARBON_UK_``."""

    url: str = BASE_URL


class UkCarbonIntensity(LiveProvider[UkSettings]):
    """Zone ``GB``, average direct intensity: the operator counts what power stations emit, not their life cycle."""

    name = "uk"

    def __init__(self, settings: UkSettings, context: ProviderContext) -> None:
        super().__init__(settings, context, RateLimit(60, 60.0), {"accept": "application/json"})

    def feed(self, zone: str) -> Feed | None:
        return FEED if zone == "GB" else None

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the current half-hour: its forecast, marked as estimated, until the measured value is published."""
        found = rows(await self._client.get("/intensity", cache_s=60.0), "data")
        both = zip(readings(found, *ACTUAL), readings(found, *FORECAST), strict=True)
        best = ((at_s, guess if value is None else value, value is None) for (at_s, value, _), (_, guess, _) in both)
        return series(best, HALF_HOUR_S)

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the measured half-hours that begin in the range, at most those of the last 13 days."""
        start_s = max(start_s, end_s - LONGEST_RANGE_S)
        answer = await self._client.get(f"/intensity/{written(start_s, MINUTE)}/{written(end_s, MINUTE)}")
        now_s = self._now_s()
        ended = [row for row in rows(answer, "data") if (instant_s(field(row, "to")) or 0.0) <= now_s]
        return series(readings(ended, *ACTUAL, within=(start_s, end_s)), HALF_HOUR_S)  # neighbours come, too

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return the operator's forecast of the next 48 hours, dated now because it does not say when it was made."""
        now_s = self._now_s()
        answer = await self._client.get(f"/intensity/{written(now_s, MINUTE)}/fw48h", cache_s=300.0)
        return series(readings(rows(answer, "data"), *FORECAST), HALF_HOUR_S).issued(now_s)


ENTRY = ProviderEntry("uk", UkSettings, UkCarbonIntensity)
