"""The grids as policies see them, from the carbon service, with a defined fallback if it does not answer."""

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

import numpy as np

from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Measured, Signal
from services.kit.carbon import Carbon
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

_SAID_AT = 2  #: The failure in a row that is logged: the first is usual at a start, further ones say no more


class CarbonWatch:
    """Knows the last outlook of each zone; asks for a newer one at most every ``refresh_s``."""

    def __init__(
        self, carbon: Carbon, default_zone: str, *, refresh_s: float, window_s: float, default_gco2_per_kwh: float
    ) -> None:
        self._carbon = carbon
        self._default_zone = default_zone
        self._refresh_s = refresh_s
        self._window_s = window_s
        self._default = default_gco2_per_kwh
        self._known: dict[str, CarbonOutlook] = {}
        self._asked_s: dict[str, float] = {}
        self._missed: dict[str, int] = {}
        self._made_at: dict[str, datetime | None] = {}

    async def outlooks(self, zones: Iterable[str], now_s: float) -> tuple[CarbonOutlook, ...]:
        """Return the grids of the zones around ``now_s``, ordered by name; without zones, that of the default one.

        All use one signal. Without an answer, a zone gets its last outlook, marked stale; if it never had one, or if
        the answer uses another signal than the first zone's, it gets a flat curve, marked stale.
        """
        wanted = sorted(set(zones)) or [self._default_zone]
        due = [zone for zone in wanted if time.monotonic() - self._asked_s.get(zone, -math.inf) >= self._refresh_s]
        await asyncio.gather(*map(self._refresh, due))
        signal = next((self._known[zone].signal for zone in wanted if zone in self._known), Signal.AVERAGE_DIRECT)
        return tuple(self._outlook(zone, signal, now_s) for zone in wanted)

    def _outlook(self, zone: str, signal: Signal, now_s: float) -> CarbonOutlook:
        known = self._known.get(zone)
        if known is not None and known.signal == signal:
            return known
        curve = CarbonCurve(np.array([now_s]), np.array([self._default]), now_s + 86_400, np.array([True]))
        return CarbonOutlook(zone, signal, curve, stale=True)

    async def _refresh(self, zone: str) -> None:
        self._asked_s[zone] = time.monotonic()
        try:
            self._known[zone] = await self._ask(zone)
            self._missed[zone] = 0
        except ProblemError as error:
            self._missed[zone] = self._missed.get(zone, 0) + 1
            if self._missed[zone] == _SAID_AT:
                log.warning("carbon.unknown", zone=zone, error=error.detail)
            if zone in self._known:
                self._known[zone] = replace(self._known[zone], stale=True)

    async def _ask(self, zone: str) -> CarbonOutlook:
        answer = await self._carbon.outlook(zone, past_s=self._window_s, ahead_s=self._window_s)
        self._made_at[zone] = answer.forecast_generated_at
        return answer.as_domain()

    def forecast_made_at(self, zone: str) -> datetime | None:
        """Return when the forecast in use was made; None if that is unknown."""
        return self._made_at.get(zone)

    async def past_mean(self, zone: str, signal: str, start_s: float, end_s: float) -> float | None:
        """Return the mean intensity of a zone over past seconds, weighted by time, gCO2/kWh; None if unknown."""
        past = await self.past(zone, signal, start_s, end_s) if end_s > start_s else None
        return past.mean(start_s, end_s) if past else None

    async def past(self, zone: str, signal: str, start_s: float, end_s: float) -> Measured | None:
        """Return what is known of a zone's intensities over past seconds; None if the carbon service does not say."""
        try:
            history = await self._carbon.history(zone, start_s, end_s, signal)
        except ProblemError as error:
            log.warning("carbon.history_unknown", zone=zone, error=error.detail)
            return None
        return history.as_domain() if history.points else None
