"""One intensity for every zone and hour: for a site that is billed by a contract and not by its grid."""

from __future__ import annotations

from carbon_service.providers.entry import ProviderContext, ProviderEntry, ProviderSettings
from carbon_service.providers.protocol import DAY_S, Feed, ForecastIssue, Point, Series
from services.core.domain.carbon import Signal

HOUR_S = 3_600.0


class FlatSettings(ProviderSettings):
    """Prefix ``CARBON_FLAT_``."""

    gco2_per_kwh: float


class FlatGrid:
    """Knows every zone, whole hours of it, and no forecast: the service's own continues the past."""

    name = "flat"
    signals = (Signal.AVERAGE_DIRECT,)

    def __init__(self, settings: FlatSettings, context: ProviderContext) -> None:
        self._gco2_per_kwh = settings.gco2_per_kwh
        self._now_s = context.now_s

    def feed(self, zone: str) -> Feed | None:
        """Return what there is for any zone."""
        return Feed(
            zone_name=zone,
            attribution="by contract",
            step_s=HOUR_S,
            max_age_s=2 * HOUR_S,
            poll_interval_s=300.0,
            history_s=30 * DAY_S,
        )

    def grid_s(self, zone: str, time_s: float) -> float:
        """Return ``time_s``: this grid is live."""
        return time_s

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the hour in force."""
        start_s = self._now_s() // HOUR_S * HOUR_S
        return Series((Point(start_s, start_s + HOUR_S, self._gco2_per_kwh),))

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the hours that begin in ``[start_s, end_s)``."""
        first, last = (int(-(-time_s // HOUR_S)) for time_s in (start_s, end_s))
        hours = (HOUR_S * hour for hour in range(first, last))
        return Series(tuple(Point(begins_s, begins_s + HOUR_S, self._gco2_per_kwh) for begins_s in hours))

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return none."""
        return ()


ENTRY = ProviderEntry("flat", FlatSettings, FlatGrid)
