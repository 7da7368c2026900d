"""Keeps what electricity costs: day-ahead prices of providers or files, with tariffs, stored by the hour."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from carbon_service.providers.protocol import DAY_S, ProviderError
from carbon_service.repository import Repository
from carbon_service.zones import ZoneConfigError
from services.core.domain.units import S_PER_HOUR
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.kit.tariffs import Tariff, Tariffs, by_hour, priced, read_hours, read_tariffs

log = Log(__name__)

INTERVAL_S = 900.0
AHEAD_S = 4 * DAY_S  #: How far ahead tariffs are stored; as far as ``joint`` may look
LONGEST_GAP_S = 31 * DAY_S  #: The most that is filled in after the service was away


@runtime_checkable
class PriceProvider(Protocol):
    """A provider that has day-ahead prices, too."""

    async def prices(self, area: str, currency: str, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Return instants, UTC seconds, and the price from each on, per kWh; empty if there are none.

        Args:
            area: A zone, or the provider's own name of an area.

        Raises:
            ProviderError: It has no such area or currency, or gave no usable answer.
        """
        ...


class PriceWatch:
    """Fetches and stores prices; ``run`` repeats it until cancelled."""

    def __init__(
        self,
        repository: Repository,
        path: Path,
        providers: Mapping[str, object],
        retention_s: float,
        now_s: Callable[[], float],
    ) -> None:
        self._repository, self._path, self._providers = repository, path, providers
        self._retention_s, self._now_s = retention_s, now_s

    async def run(self) -> None:
        """Keep all zones' prices until cancelled; what fails is logged and tried again."""
        await repeat(self.keep, INTERVAL_S, failed="prices.failed", traceback=True)

    async def keep(self) -> None:
        """Store what the file, which is read again, and its providers say now; a zone that fails leaves others be."""
        tariffs = read_tariffs(self._path)
        for zone, tariff in tariffs.zones.items():
            try:
                await self._keep(zone, tariff, tariffs.currency)
            except (ProviderError, ValueError) as error:
                log.warning("prices.unknown", zone=zone, error=str(error))
        await self._repository.prune_prices(self._now_s() - self._retention_s)

    async def _keep(self, zone: str, tariff: Tariff, currency: str) -> None:
        now_s = self._now_s()
        known_s = await self._repository.priced_until_s(zone)
        start_s = now_s - DAY_S if known_s is None else max(now_s - LONGEST_GAP_S, min(now_s, known_s))
        hours = [hour * S_PER_HOUR for hour in range(int(start_s // S_PER_HOUR), int((now_s + AHEAD_S) // S_PER_HOUR))]
        day_ahead: dict[float, float] = {}
        if tariff.day_ahead:
            name, _, area = tariff.day_ahead.partition(":")
            provider = self._providers.get(name)
            if isinstance(provider, PriceProvider):
                day_ahead = by_hour(await provider.prices(area or zone, currency, hours[0], hours[-1] + S_PER_HOUR))
            else:
                day_ahead = await asyncio.to_thread(read_hours, self._path.parent / tariff.day_ahead)
        found = priced(tariff, hours, day_ahead)
        if found:
            await self._repository.save_prices(zone, currency, found, tariff.demand_per_kw_month, now_s)


def providers_named(tariffs: Tariffs, path: Path, zones: tuple[str, ...], known: Mapping[str, object]) -> set[str]:
    """Return the providers that day-ahead prices come from.

    Raises:
        ZoneConfigError: The file prices a zone that is not served, or names neither a provider nor a file.
    """
    named: set[str] = set()
    for zone, tariff in tariffs.zones.items():
        if zone not in zones:
            raise ZoneConfigError(f"CARBON_PRICES_FILE: it prices {zone}, which CARBON_ZONES does not name")
        name = (tariff.day_ahead or "").partition(":")[0]
        if name in known:
            named.add(name)
        elif name and not (path.parent / str(tariff.day_ahead)).is_file():
            raise ZoneConfigError(f"CARBON_PRICES_FILE: {zone}: {tariff.day_ahead} is no provider, and no file there")
    return named
