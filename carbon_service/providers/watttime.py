"""WattTime, API v3: five-minute marginal (and average) emission rates, with forecasts. lb/MWh become g/kWh here."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import httpx
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
    number,
    readings,
    rows,
    series,
    written,
)
from carbon_service.settings import Pairs, Signals
from services.contracts.schema import said
from services.core.domain.carbon import Signal
from services.core.domain.units import G_PER_KWH_PER_LB_PER_MWH

BASE_URL = "https://api.watttime.org"
REGIONS = {"US-CAL-CISO": "CAISO_NORTH"}
SIGNAL_TYPES = {Signal.MARGINAL: "co2_moer", Signal.AVERAGE_DIRECT: "co2_aoer"}
UNITS = "lbs_co2_per_mwh"
FORM = "%Y-%m-%dT%H:%M:%S+00:00"
STEP_S = 300.0
LONGEST_RANGE_S = 30 * DAY_S
TOKEN_S = 28 * 60.0  # it is good for 30 minutes
LONGEST_HORIZON_H = 72


class WattTimeSettings(LiveSettings):
    """Prefix ``CARBON_WATTTIME_``."""

    url: str = BASE_URL
    username: str
    password: SecretStr
    regions: Pairs = said("WattTime's region of each zone.", default=REGIONS)
    signals: Annotated[Signals, AfterValidator(among(SIGNAL_TYPES))] = (Signal.MARGINAL,)


class WattTime(LiveProvider[WattTimeSettings]):
    """Zones mapped to WattTime regions. Only CAISO_NORTH is available to accounts without a subscription."""

    name = "watttime"

    def __init__(self, settings: WattTimeSettings, context: ProviderContext) -> None:
        super().__init__(settings, context, RateLimit(3000, 300.0))
        self.signals = settings.signals
        self._pacing = context.pacing
        self._credentials = httpx.BasicAuth(settings.username, settings.password.get_secret_value())
        self._login, self._login_limit = asyncio.Lock(), RateLimit(100, 300.0)
        self._token, self._token_until_s = "", 0.0

    def feed(self, zone: str) -> Feed | None:
        region = self._settings.regions.get(zone)
        if region is None:
            return None
        return Feed(
            zone_name=f"WattTime region {region}",
            attribution="WattTime, https://watttime.org; used under the terms of the account's plan",
            step_s=STEP_S,
            max_age_s=6 * STEP_S,
            poll_interval_s=STEP_S,
            history_s=LONGEST_RANGE_S,
            revision_s=self.recent_s,
            forecast_interval_s=2 * STEP_S,
            forecast_max_age_s=3600.0,
        )

    async def history(self, zone: str, signal: Signal, start_s: float, end_s: float) -> Series:
        """Return the five-minute values of the range, at most those of its last 30 days, as one request gives them."""
        start_s = max(start_s, end_s - LONGEST_RANGE_S)
        span = {"start": written(start_s, FORM), "end": written(end_s, FORM)}
        found = _read(await self._get("/v3/historical", zone, signal, span))
        return Series(tuple(point for point in found.points if start_s <= point.start_s < end_s), found.skipped)

    async def forecast(self, zone: str, signal: Signal, horizon_s: float) -> tuple[ForecastIssue, ...]:
        """Return the forecast of up to 72 hours."""
        hours = min(LONGEST_HORIZON_H, max(24, -(-int(horizon_s) // 3600)))
        answer = await self._get("/v3/forecast", zone, signal, {"horizon_hours": hours}, cache_s=STEP_S)
        generated_s = instant_s(field(answer, "meta", "generated_at"))
        return _read(answer).issued(self._now_s() if generated_s is None else generated_s)

    async def _get(
        self, path: str, zone: str, signal: Signal, params: Mapping[str, str | int], cache_s: float = 0.0
    ) -> Any:
        query = {"region": self._settings.regions[zone], "signal_type": SIGNAL_TYPES[signal], **params}
        token = await self._valid_token()
        try:
            return await self._client.get(path, query, headers=_bearer(token), cache_s=cache_s)
        except ProviderError as error:
            if error.status != 401:
                raise
        token = await self._valid_token(refused=token)
        return await self._client.get(path, query, headers=_bearer(token), cache_s=cache_s)

    async def _valid_token(self, refused: str = "") -> str:
        """Return a token that is not ``refused``; one login serves all who wait for it."""
        async with self._login:
            now_s = self._pacing.monotonic_s()
            if not self._token or self._token == refused or now_s >= self._token_until_s:
                answer = await self._client.get("/login", auth=self._credentials, limit=self._login_limit)
                token = field(answer, "token")
                if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
                    raise ProviderError("/login: the answer has no token")
                self._token, self._token_until_s = token, now_s + TOKEN_S
            return self._token


ENTRY = ProviderEntry("watttime", WattTimeSettings, WattTime)


def _read(answer: Any) -> Series:
    values = readings(rows(answer, "data"), "point_time", "value", scale=G_PER_KWH_PER_LB_PER_MWH)
    return series(values, _checked_step_s(answer))


def _checked_step_s(answer: Any) -> float:
    """Return how long a value holds, after checking that the values are in the unit we convert from."""
    units = field(answer, "meta", "units")
    if units != UNITS:
        raise ProviderError(f"WattTime answered in {str(units)[:40]!r}, not in {UNITS}")
    period_s = number(field(answer, "meta", "data_point_period_seconds"))
    return period_s if period_s and 0 < period_s <= 3600 else STEP_S


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
