"""The grids as policies see them, from the carbon service, with a defined fallback if it does not answer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from services.contracts.carbon import IntensityHistory, IntensityOutlook, IntensityPoint
from services.core.domain.arrays import Floats
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)

PAGE_POINTS, MOST_PAGES = 10_000, 4
LEAST_COVERED = 0.9
"""A mean over the past is unknown where intensities are known for less than this share of it."""


@dataclass(frozen=True, slots=True)
class Past:
    """Measured intensities of a zone, which may have gaps.

    Attributes:
        edges_s: (2n,) UTC seconds, where each of n measured steps begins and ends, in order.
        known_s: (2n,) Seconds measured until there.
        integral: (2n,) Of the intensity until there, (gCO2/kWh) s; it stands still in gaps.
    """

    edges_s: Floats
    known_s: Floats
    integral: Floats

    @classmethod
    def of(cls, points: Sequence[IntensityPoint]) -> Past | None:
        """Return measured steps, oldest first; None without any."""
        if not points:
            return None
        edges = np.array([[each.start_at.timestamp(), each.end_at.timestamp()] for each in points])
        lengths = edges[:, 1] - edges[:, 0]
        grams = lengths * np.array([each.gco2_per_kwh for each in points])
        columns = [np.column_stack([np.cumsum(each) - each, np.cumsum(each)]).ravel() for each in (lengths, grams)]
        return cls(edges.ravel(), *columns)

    def mean(self, start_s: float, end_s: float) -> float | None:
        """Return the mean over ``[start_s, end_s)``, gCO2/kWh; None where too little of it was measured."""
        window = [start_s, end_s]
        seconds, total = (
            float(np.diff(np.interp(window, self.edges_s, each))[0]) for each in (self.known_s, self.integral)
        )
        return total / seconds if seconds > 0 and seconds >= LEAST_COVERED * (end_s - start_s) else None


class CarbonWatch:
    """Knows the last outlook of each zone; asks for a newer one at most every ``refresh_s``."""

    def __init__(
        self,
        client: ServiceClient,
        default_zone: str,
        *,
        refresh_s: float,
        window_s: float,
        default_gco2_per_kwh: float,
    ) -> None:
        self._client = client
        self._default_zone = default_zone
        self._refresh_s = refresh_s
        self._window_s = window_s
        self._default = default_gco2_per_kwh
        self._known: dict[str, CarbonOutlook] = {}
        self._asked_s: dict[str, float] = {}
        self._made_at: dict[str, datetime | None] = {}

    async def outlooks(self, zones: Iterable[str], now_s: float) -> tuple[CarbonOutlook, ...]:
        """Return the grids of the zones around ``now_s``, in order of their names; without zones the default one's.

        All are of one signal. Without an answer a zone's is its last outlook, marked stale; without any ever, or where
        the answer is of another signal than the first zone's, a flat curve, marked stale.
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
        except ProblemError as error:
            log.warning("carbon.unknown", zone=zone, error=error.detail)
            if zone in self._known:
                self._known[zone] = replace(self._known[zone], stale=True)

    async def _ask(self, zone: str) -> CarbonOutlook:
        # Lengths in the grid's own seconds: a day is a day, however fast a recording is replayed.
        window = {"past_s": self._window_s, "ahead_s": self._window_s, "clock": "grid"}
        answer = await self._client.call(
            "GET", f"/v1/carbon/{zone}/outlook", IntensityOutlook, params=window, attempts=1, timeout_s=2
        )
        self._made_at[zone] = answer.forecast_generated_at
        return answer.as_domain()

    def forecast_made_at(self, zone: str) -> datetime | None:
        """Return when the forecast that is in use was made; None if that is unknown."""
        return self._made_at.get(zone)

    async def past_mean(self, zone: str, signal: str, start_s: float, end_s: float) -> float | None:
        """Return the mean intensity of a zone over past seconds, weighted by time, gCO2/kWh; None if unknown."""
        past = await self.past(zone, signal, start_s, end_s) if end_s > start_s else None
        return past.mean(start_s, end_s) if past else None

    async def past(self, zone: str, signal: str, start_s: float, end_s: float) -> Past | None:
        """Return what is known of a zone's intensities over past seconds; None if the carbon service does not say."""
        period = {
            name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in (("start", start_s), ("end", end_s))
        }
        params: dict[str, str | int] = {**period, "signal": signal, "limit": PAGE_POINTS}
        points: list[IntensityPoint] = []
        for _ in range(MOST_PAGES):
            try:
                page = await self._client.call(
                    "GET", f"/v1/carbon/{zone}/history", IntensityHistory, params=params, attempts=1, timeout_s=2
                )
            except ProblemError as error:
                log.warning("carbon.history_unknown", zone=zone, error=error.detail)
                return None
            points += page.points
            if page.next_cursor is None:
                return Past.of(points)
            params["cursor"] = page.next_cursor
        return None
