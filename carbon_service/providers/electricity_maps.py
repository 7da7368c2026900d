"""Electricity Maps, API v3: hourly average intensity of most of the world, direct or over the life cycle."""

import math
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, SecretStr

from carbon_service.providers.entry import LiveProvider, LiveSettings, ProviderContext, ProviderEntry, among
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import (
    DAY_S,
    Feed,
    ForecastIssue,
    ProviderError,
    Series,
    field,
    instant_s,
    readings,
    rows,
    series,
    written,
)
from carbon_service.settings import Signals
from services.core.domain.carbon import Signal

BASE_URL = "https://api.electricitymaps.com/v3"
HOUR_S = 3600.0
FORM = "%Y-%m-%dT%H:%M:%SZ"
LONGEST_RANGE_S = 10 * DAY_S
LONGEST_HORIZON_H = 72
FACTORS = {Signal.AVERAGE_LIFECYCLE: "lifecycle", Signal.AVERAGE_DIRECT: "direct"}
REFUSED = frozenset({401, 403, 404})
FEED = Feed(
    zone_name="",
    attribution="Electricity Maps, https://www.electricitymaps.com; used under the terms of the token's plan",
    step_s=HOUR_S,
    max_age_s=3 * HOUR_S,
    poll_interval_s=900.0,
    history_s=LONGEST_RANGE_S,
    revision_s=DAY_S / 2,
    forecast_interval_s=HOUR_S,
    forecast_max_age_s=3 * HOUR_S,
)


class ElectricityMapsSettings(LiveSettings):
    """Prefix ``CARBON_ELECTRICITY_MAPS_``."""

    url: str = BASE_URL
    token: SecretStr
    signals: Annotated[Signals, AfterValidator(among(FACTORS))] = (Signal.AVERAGE_DIRECT, Signal.AVERAGE_LIFECYCLE)


class ElectricityMaps(LiveProvider[ElectricityMapsSettings]):
    """Any zone key of Electricity Maps. Forecasts and more than a day of history need a commercial plan."""

    name = "electricity_maps"

    def __init__(self, settings: ElectricityMapsSettings, context: ProviderContext) -> None:
        super().__init__(settings, context, RateLimit(60, 60.0), {"auth-token": settings.token.get_secret_value()})
        self.signals = settings.signals
        self._forecasts = True

    def feed(self, zone: str) -> Feed | None:
        """Return the feed that every zone has; without forecasts once the provider has refused one to this token."""
        return replace(FEED, zone_name=zone, forecast_interval_s=FEED.forecast_interval_s if self._forecasts else None)

    async def latest(self, zone: str, signal: Signal) -> Series:
        return _read([await self._get("latest", zone, signal, cache_s=60.0)])

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the hours of the range: the last 24 with any plan, up to 10 days with a commercial one."""
        if start_s < self._now_s() - DAY_S - HOUR_S:
            start_s = max(start_s, end_s - LONGEST_RANGE_S)
            try:
                first, last = written(start_s, FORM), written(end_s, FORM)
                past = await self._get("past-range", zone, signal, start=first, end=last)
                return _read(rows(past, "data"), start_s, end_s)
            except ProviderError as error:
                if error.status not in REFUSED:
                    raise
        recent = await self._get("history", zone, signal, cache_s=60.0)
        return _read(rows(recent, "history"), start_s, end_s)

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return the forecast of up to 72 hours; empty if the token's plan has none, which is then remembered."""
        hours = min(LONGEST_HORIZON_H, max(24, -(-int(horizon_s) // 86_400) * 24))
        try:
            answer = await self._get("forecast", zone, signal, cache_s=300.0, horizonHours=hours)
        except ProviderError as error:
            if error.status not in REFUSED:
                raise
            self._forecasts = False
            return ()
        generated_s = instant_s(field(answer, "updatedAt"))
        return _read(rows(answer, "forecast")).issued(self._now_s() if generated_s is None else generated_s)

    async def _get(self, what: str, zone: str, signal: Signal, *, cache_s: float = 0.0, **more: str | int) -> Any:
        # Without the last parameter a zone that does not resolve is answered with the zone of our own IP address.
        params = {"zone": zone, "emissionFactorType": FACTORS[signal], "shouldUseFallbackCallerLookup": "false", **more}
        answer = await self._client.get(f"/carbon-intensity/{what}", params, cache_s=cache_s)
        answered = field(answer, "zone")
        if answered != zone:
            raise ProviderError(f"asked for zone {zone}, Electricity Maps answered for {str(answered)[:40]!r}")
        return answer


ENTRY = ProviderEntry("electricity_maps", ElectricityMapsSettings, ElectricityMaps)


def _read(found: list[Any], start_s: float = -math.inf, end_s: float = math.inf) -> Series:
    columns = ("datetime", "carbonIntensity")
    return series(readings(found, *columns, within=(start_s, end_s), estimated="isEstimated"), HOUR_S)
