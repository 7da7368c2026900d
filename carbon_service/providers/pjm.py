"""PJM's marginal emission rates (Data Miner 2): what the marginal units of a pricing node emit.

Negative rates are real: relieving a congested line can let a cleaner unit displace a dirtier one. They are kept.
lb/MWh become g/kWh here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Literal
from zoneinfo import ZoneInfo

import httpx
from pydantic import Field, SecretStr

from carbon_service.providers.entry import ProviderContext, ProviderEntry, ProviderSettings
from carbon_service.providers.http import Pacing, ProviderClient, RateLimit
from carbon_service.providers.protocol import DAY_S, Feed, ForecastIssue, Series
from carbon_service.providers.readings import field, instant_s, number, rows, series
from carbon_service.values import Numbers
from services.core.domain.carbon import Signal
from services.core.domain.units import G_PER_KWH_PER_LB_PER_MWH

BASE_URL = "https://api.pjm.com/api/v1"
PNODES = {"US-MIDA-PJM": 1}  # the pricing node of the whole regional transmission organisation
EASTERN = ZoneInfo("America/New_York")
ROWS_PER_PAGE = 50_000
PAGES = 10
RECENT_S = 2 * 3600.0
FEEDS: dict[str, tuple[str, float]] = {
    "fivemin": ("/fivemin_marginal_emissions", 300.0),
    "hourly": ("/hourly_marginal_emissions", 3600.0),
}


class Pjm:
    """Zones mapped to pricing nodes. PJM has no forecast for them."""

    name = "pjm"
    signals = (Signal.MARGINAL,)

    def __init__(
        self,
        http: httpx.AsyncClient,
        now_s: Callable[[], float],
        pacing: Pacing,
        key: str,
        pnodes: Mapping[str, int] = PNODES,
        resolution: Literal["fivemin", "hourly"] = "fivemin",
        requests_per_minute: int = 6,
        base_url: str = BASE_URL,
        rows_per_page: int = ROWS_PER_PAGE,
    ) -> None:
        self._now_s = now_s
        self._rows_per_page = rows_per_page
        self._pnodes = dict(pnodes)
        self._path, self._step_s = FEEDS[resolution]
        limit = RateLimit(requests_per_minute, 60.0)
        self._client = ProviderClient(http, base_url, pacing, limit, {"Ocp-Apim-Subscription-Key": key})

    def feed(self, zone: str) -> Feed | None:
        """Return the feed of a zone with a known pricing node."""
        node = self._pnodes.get(zone)
        if node is None:
            return None
        return Feed(
            zone_name=f"PJM pricing node {node}",
            attribution="PJM Data Miner 2, marginal emission rates; redistribution needs a PJM membership",
            step_s=self._step_s,
            max_age_s=max(12 * 300.0, 3 * self._step_s),
            poll_interval_s=300.0,
            history_s=30 * DAY_S,
            revision_s=RECENT_S,
        )

    def grid_s(self, zone: str, time_s: float) -> float:
        """Return ``time_s``: this grid is live."""
        return time_s

    async def latest(self, zone: str, signal: Signal) -> Series:
        """Return the newest value of the last two hours."""
        now_s = self._now_s()
        recent = await self.history(zone, signal, now_s - RECENT_S, now_s)
        return Series(recent.points[-1:], recent.skipped)

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the intervals of the range."""
        # Filtering by UTC is not offered. An hour more on both sides covers the hour that autumn repeats.
        span = f"{_eastern(start_s - 3600)}to{_eastern(end_s + 3600)}"
        found: list[Any] = []
        for page in range(PAGES):
            params: dict[str, str | int] = {
                "pnode_id": self._pnodes[zone],
                "datetime_beginning_ept": span,
                "fields": "datetime_beginning_utc,pnode_id,marginal_co2_rate",
                "rowCount": self._rows_per_page,
                "startRow": page * self._rows_per_page + 1,
            }
            answer = await self._client.get(self._path, params)
            batch = rows(answer, "items") if isinstance(answer, dict) else rows(answer)
            found += batch
            if len(batch) < self._rows_per_page:
                break
        return _read(found, self._step_s, start_s, end_s)

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return no forecast: PJM publishes none of these rates."""
        return ()


class PjmSettings(ProviderSettings):
    """Prefix ``CARBON_PJM_``."""

    url: str = BASE_URL
    key: SecretStr
    pnodes: Numbers = Field(default=PNODES, description="PJM's pricing node of each zone.")
    resolution: Literal["fivemin", "hourly"] = "fivemin"
    requests_per_minute: int = Field(default=6, ge=1, le=600, description="6 without a PJM membership, 600 with.")


def _build(settings: PjmSettings, context: ProviderContext) -> Pjm:
    return Pjm(
        context.http,
        context.now_s,
        context.pacing,
        settings.key.get_secret_value(),
        settings.pnodes,
        settings.resolution,
        settings.requests_per_minute,
        settings.url,
    )


ENTRY = ProviderEntry("pjm", PjmSettings, _build)


def _read(found: list[Any], step_s: float, start_s: float, end_s: float) -> Series:
    readings: list[tuple[float | None, float | None, bool]] = []
    for row in found:
        at_s = instant_s(field(row, "datetime_beginning_utc"))
        rate = number(field(row, "marginal_co2_rate"))
        if at_s is None or start_s <= at_s < end_s:
            readings.append((at_s, None if rate is None else rate * G_PER_KWH_PER_LB_PER_MWH, False))
    return series(readings, step_s)


def _eastern(time_s: float) -> str:
    at = datetime.fromtimestamp(time_s, EASTERN)
    return f"{at:%m/%d/%Y %H:%M}"
