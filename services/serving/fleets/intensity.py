"""The carbon intensity that a fleet's savings are compared with."""

from __future__ import annotations

import time

import numpy as np

from services.contracts.apps import FleetSpec
from services.contracts.carbon import IntensityOutlook
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError

PAST_S = 7 * 86_400.0
KEPT_S = 600.0


class Baselines:
    """The mean intensity of each zone's last seven days, by the grid's clock."""

    def __init__(self, carbon: ServiceClient) -> None:
        self._carbon = carbon
        self._known: dict[tuple[str, str | None], tuple[float, float]] = {}

    async def of(self, fleet: FleetSpec) -> float | None:
        """Return the intensity in gCO2/kWh: the fleet's own, else the mean; None where nothing is known."""
        if fleet.baseline_gco2_per_kwh is not None:
            return fleet.baseline_gco2_per_kwh
        key = fleet.zone, fleet.signal and str(fleet.signal)
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0] + KEPT_S:
            return known[1]
        params: dict[str, str | float] = {"past_s": PAST_S, "ahead_s": 3_600, "clock": "grid"}
        if key[1] is not None:
            params["signal"] = key[1]
        try:
            outlook = await self._carbon.call(
                "GET", f"/v1/carbon/{fleet.zone}/outlook", IntensityOutlook, params=params, attempts=1
            )
        except ProblemError:
            return None if known is None else known[1]
        past = [point.gco2_per_kwh for point in outlook.points if point.end_at <= outlook.now]
        if not past:
            return None if known is None else known[1]
        self._known[key] = time.monotonic(), float(np.mean(past))
        return self._known[key][1]
