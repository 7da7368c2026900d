"""PJM's marginal emission rates (Data Miner 2): what the marginal units of a pricing node emit.

Negative rates are real: relieving a congested line can let a cleaner unit displace a dirtier one. They are kept.
lb/MWh become g/kWh here.
"""

from typing import Any, Literal
from zoneinfo import ZoneInfo

from pydantic import SecretStr

from carbon_service.providers.entry import LiveProvider, LiveSettings, ProviderContext, ProviderEntry
from carbon_service.providers.http import RateLimit
from carbon_service.providers.protocol import DAY_S, Feed, Series, readings, rows, series, written
from carbon_service.settings import Numbers
from services.contracts.schema import said
from services.core.domain.carbon import Signal
from services.core.domain.units import G_PER_KWH_PER_LB_PER_MWH

BASE_URL = "https://api.pjm.com/api/v1"
PNODES = {"US-MIDA-PJM": 1}  # the pricing node of the whole regional transmission organisation
EASTERN, FORM = ZoneInfo("America/New_York"), "%m/%d/%Y %H:%M"
ROWS_PER_PAGE = 50_000
PAGES = 10
FEEDS: dict[str, tuple[str, float]] = {
    "fivemin": ("/fivemin_marginal_emissions", 300.0),
    "hourly": ("/hourly_marginal_emissions", 3600.0),
}


class PjmSettings(LiveSettings):
    """Prefix ``CARBON_PJM_``."""

    url: str = BASE_URL
    key: SecretStr
    pnodes: Numbers = said("PJM's pricing node of each zone.", default=PNODES)
    resolution: Literal["fivemin", "hourly"] = "fivemin"
    requests_per_minute: int = said("6 without a PJM membership, 600 with.", default=6, ge=1, le=600)


class Pjm(LiveProvider[PjmSettings]):
    """Zones mapped to pricing nodes. PJM has no forecast for them."""

    name = "pjm"
    signals = (Signal.MARGINAL,)

    def __init__(self, settings: PjmSettings, context: ProviderContext) -> None:
        limit, key = RateLimit(settings.requests_per_minute, 60.0), settings.key.get_secret_value()
        super().__init__(settings, context, limit, {"Ocp-Apim-Subscription-Key": key})
        self._path, self._step_s = FEEDS[settings.resolution]

    def feed(self, zone: str) -> Feed | None:
        node = self._settings.pnodes.get(zone)
        if node is None:
            return None
        return Feed(
            zone_name=f"PJM pricing node {node}",
            attribution="PJM Data Miner 2, marginal emission rates; redistribution needs a PJM membership",
            step_s=self._step_s,
            max_age_s=max(12 * 300.0, 3 * self._step_s),
            poll_interval_s=300.0,
            history_s=30 * DAY_S,
            revision_s=self.recent_s,
        )

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        # Filtering by UTC is not offered. An hour more on both sides covers the hour that autumn repeats.
        span = "to".join(written(time_s, FORM, EASTERN) for time_s in (start_s - 3600, end_s + 3600))
        found: list[Any] = []
        for page in range(PAGES):
            params: dict[str, str | int] = {
                "pnode_id": self._settings.pnodes[zone],
                "datetime_beginning_ept": span,
                "fields": "datetime_beginning_utc,pnode_id,marginal_co2_rate",
                "rowCount": ROWS_PER_PAGE,
                "startRow": page * ROWS_PER_PAGE + 1,
            }
            answer = await self._client.get(self._path, params)
            batch = rows(answer, "items") if isinstance(answer, dict) else rows(answer)
            found += batch
            if len(batch) < ROWS_PER_PAGE:
                break
        columns, scale = ("datetime_beginning_utc", "marginal_co2_rate"), G_PER_KWH_PER_LB_PER_MWH
        return series(readings(found, *columns, scale=scale, within=(start_s, end_s)), self._step_s)


ENTRY = ProviderEntry("pjm", PjmSettings, Pjm)
