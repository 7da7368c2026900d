"""The grid as policies see it, from the carbon service, with a stated fallback when it does not answer."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from services.contracts.carbon import IntensityOutlook
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError

log = Log(__name__)


class CarbonWatch:
    """Keeps the last outlook; asks for a newer one at most every ``refresh_s``."""

    def __init__(
        self, client: ServiceClient, zone: str, *, refresh_s: float, window_s: float, default_gco2_per_kwh: float
    ) -> None:
        self._client = client
        self._zone = zone
        self._refresh_s = refresh_s
        self._window_s = window_s
        self._default = default_gco2_per_kwh
        self._known: CarbonOutlook | None = None
        self._asked_s = -np.inf

    async def outlook(self, now_s: float) -> CarbonOutlook:
        """Return the grid around ``now_s``.

        Without an answer it is the last outlook, marked stale; without any ever, a flat curve, marked stale.
        """
        if time.monotonic() - self._asked_s >= self._refresh_s:
            self._asked_s = time.monotonic()
            try:
                self._known = await self._ask()
            except ProblemError as error:
                log.warning("carbon.unknown", zone=self._zone, error=error.detail)
                self._known = self._known and replace(self._known, stale=True)
        if self._known is None:
            curve = CarbonCurve(np.array([now_s]), np.array([self._default]), now_s + 86_400)
            return CarbonOutlook(self._zone, Signal.AVERAGE_DIRECT, curve, stale=True)
        return self._known

    async def _ask(self) -> CarbonOutlook:
        # Lengths in the grid's own seconds: a day is a day, however fast a recording is replayed.
        window = {"past_s": self._window_s, "ahead_s": self._window_s, "clock": "grid"}
        answer = await self._client.call(
            "GET", f"/v1/carbon/{self._zone}/outlook", IntensityOutlook, params=window, attempts=1, timeout_s=2
        )
        return answer.as_domain()
