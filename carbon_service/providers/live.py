"""What providers of live grids share: their client, the grid's clock, and the newest of a short history."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from carbon_service.providers.entry import ProviderContext, ProviderSettings
from carbon_service.providers.http import ProviderClient, RateLimit
from carbon_service.providers.protocol import ForecastIssue, Series
from services.core.domain.carbon import Signal


class LiveSettings(ProviderSettings):
    """Settings of a provider that is asked over HTTP; its subclass gives the address a default."""

    url: str


L = TypeVar("L", bound=LiveSettings)


class LiveProvider(Generic[L]):
    """A provider that is asked over HTTP; the subclass has ``feed`` and ``history``."""

    name = ""
    signals: tuple[Signal, ...] = (Signal.AVERAGE_DIRECT,)
    recent_s = 2 * 3600.0  #: How far back ``latest`` looks

    def __init__(
        self, settings: L, context: ProviderContext, limit: RateLimit, headers: Mapping[str, str] = {}
    ) -> None:
        self._settings = settings
        self._now_s = context.now_s
        self._client = ProviderClient(context.http, settings.url, context.pacing, limit, headers)

    def grid_s(self, zone: str, time_s: float) -> float:
        """Return ``time_s``: this grid is live."""
        return time_s

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the newest interval of the last while."""
        now_s = self._now_s()
        recent = await self.history(zone, signal, now_s - self.recent_s, now_s)
        return Series(recent.points[-1:], recent.skipped)

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the intervals of the range."""
        raise NotImplementedError

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return no forecast: unless a subclass has one, the provider publishes none."""
        return ()
