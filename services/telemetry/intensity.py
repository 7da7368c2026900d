"""What the grid emitted while energy was used.

The carbon service's outlook, history and forecast as one step curve, is kept per zone. It is asked again when an
interval ends after the moment the kept one was made for, so that energy is priced with values as fresh as there are; an
interval older than the outlook reaches back is priced from the service's history. Where the service does not answer,
the last curve known stays in force, then the last intensity the ledger used in that zone; both are marked as estimated.
Without even that, the node is told to send the interval again later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from services.contracts.carbon import IntensityHistory, IntensityOutlook, IntensityPoint
from services.contracts.problems import ProblemCode
from services.core.domain.carbon import Signal
from services.kit.http import ServiceClient
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable

log = Log(__name__)

MAX_HISTORY_PAGES = 20

_A_DAY_EITHER_WAY: dict[str, str | int | float] = {"past_s": 86_400, "ahead_s": 86_400, "clock": "grid"}
"""The forecast is what prices energy while the carbon service is away."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Intensity:
    """An intensity that was in force over an interval.

    Attributes:
        gco2_per_kwh: Mean over the interval, weighted by time.
        signal: What it measures.
        estimated: Whether any part of it was forecast, held over, or estimated by the provider.
    """

    gco2_per_kwh: float
    signal: Signal
    estimated: bool


@dataclass(frozen=True)
class StepCurve:
    """Intensities as contiguous steps, with what is estimated of them.

    Attributes:
        edges_s: (n + 1,) UTC seconds, ascending; step ``i`` lasts from ``edges_s[i]`` to ``edges_s[i + 1]``.
        values: (n,) gCO2/kWh.
        estimated: (n,) whether the step is anything but a measurement.
        signal: What the values measure.
        made_for_s: Until when, UTC seconds, the curve was up to date.
    """

    edges_s: Floats
    values: Floats
    estimated: NDArray[np.bool_]
    signal: Signal
    made_for_s: float

    @property
    def start_s(self) -> float:
        """Where the first step begins."""
        return float(self.edges_s[0])

    def mean(self, start_s: float, end_s: float) -> Intensity:
        """Return the time-weighted mean over ``[start_s, end_s)``.

        Outside the curve its first and last value hold, as estimates. An empty interval has the value at its start.
        """
        clipped = np.clip(self.edges_s, start_s, end_s)
        weights = np.diff(clipped)
        weights[0] += max(0.0, min(end_s, self.edges_s[0]) - start_s)
        weights[-1] += max(0.0, end_s - max(start_s, self.edges_s[-1]))
        total = float(weights.sum())
        beyond = bool(start_s < self.edges_s[0] or max(start_s, end_s) > self.edges_s[-1])
        if total <= 0:
            at = int(np.clip(np.searchsorted(self.edges_s, start_s, side="right") - 1, 0, self.values.size - 1))
            return Intensity(float(self.values[at]), self.signal, bool(self.estimated[at]) or beyond)
        estimated = bool(self.estimated[weights > 0].any()) or beyond
        return Intensity(float(weights @ self.values) / total, self.signal, estimated)


def curve_of_outlook(outlook: IntensityOutlook) -> StepCurve:
    """Return the outlook's steps; only measured ones that the provider did not estimate count as known."""
    points = outlook.points
    edges = [point.start_at.timestamp() for point in points] + [points[-1].end_at.timestamp()]
    return StepCurve(
        edges_s=np.array(edges, dtype=np.float64),
        values=np.array([point.gco2_per_kwh for point in points], dtype=np.float64),
        estimated=np.array([point.is_estimated or point.kind != "measured" for point in points], dtype=np.bool_),
        signal=outlook.signal,
        made_for_s=outlook.now.timestamp(),
    )


def curve_of_history(points: list[IntensityPoint], signal: Signal) -> StepCurve:
    """Return measured steps, oldest first, as a curve; in a gap the value before it is held, as an estimate.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("a curve needs at least one point")
    edges: list[float] = []
    values: list[float] = []
    estimated: list[bool] = []
    end_s = points[0].start_at.timestamp()
    for point in points:
        start_s = point.start_at.timestamp()
        if values and start_s > end_s:
            edges.append(end_s)
            values.append(values[-1])
            estimated.append(True)
        edges.append(start_s)
        values.append(point.gco2_per_kwh)
        estimated.append(point.is_estimated)
        end_s = point.end_at.timestamp()
    return StepCurve(
        np.array([*edges, end_s]), np.array(values), np.array(estimated, dtype=np.bool_), signal, made_for_s=end_s
    )


LastUsed = Callable[[str], Awaitable["Intensity | None"]]
"""Returns the last intensity the ledger used in a zone."""


class IntensitySource:
    """Intensities by zone and time, from the carbon service and what is remembered of it."""

    def __init__(
        self, carbon: ServiceClient, last_used: LastUsed, *, signal: Signal | None = None, refresh_s: float = 1.0
    ) -> None:
        self._carbon = carbon
        self._last_used = last_used
        self._params: dict[str, str | int | float] = {"signal": signal.value} if signal else {}
        self._refresh_s = refresh_s
        self._curves: dict[str, StepCurve] = {}
        self._asked: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def during(self, zone: str, start_s: float, end_s: float) -> Intensity:
        """Return the mean intensity of ``zone`` over ``[start_s, end_s)``, UTC seconds.

        Raises:
            ProblemError: 503, nothing at all is known of the zone.
        """
        curve = await self._current(zone, end_s)
        if curve is None:
            found = await self._last_used(zone)
            if found is None:
                raise unavailable("The carbon service")
            return Intensity(found.gco2_per_kwh, found.signal, estimated=True)
        if start_s < curve.start_s and (older := await self._older(zone, start_s, end_s, curve)) is not None:
            return older
        return curve.mean(start_s, end_s)

    async def _current(self, zone: str, end_s: float) -> StepCurve | None:
        async with self._locks.setdefault(zone, asyncio.Lock()):
            curve = self._curves.get(zone)
            if curve is not None and curve.made_for_s >= end_s:
                return curve
            if time.monotonic() - self._asked.get(zone, -1e9) < self._refresh_s:
                return curve
            self._asked[zone] = time.monotonic()
            try:
                outlook = await self._carbon.call(
                    "GET",
                    f"/v1/carbon/{zone}/outlook",
                    IntensityOutlook,
                    params={**self._params, **_A_DAY_EITHER_WAY},
                    attempts=2,
                    timeout_s=3,
                )
            except ProblemError as error:
                log.warning("carbon.unavailable", zone=zone, code=error.problem_code, detail=error.detail)
                return curve
            self._curves[zone] = curve_of_outlook(outlook)
            return self._curves[zone]

    async def _older(self, zone: str, start_s: float, end_s: float, curve: StepCurve) -> Intensity | None:
        """Return the mean over an interval that begins before ``curve``, or None where there is no history of it."""
        params: dict[str, str | int | float] = {
            **self._params,
            "start": datetime.fromtimestamp(start_s - 3_600, UTC).isoformat(),
            "end": datetime.fromtimestamp(max(end_s, start_s + 1), UTC).isoformat(),
        }
        points: list[IntensityPoint] = []
        try:
            for _ in range(MAX_HISTORY_PAGES):
                page = await self._carbon.call(
                    "GET", f"/v1/carbon/{zone}/history", IntensityHistory, params=params, attempts=2, timeout_s=3
                )
                if page.signal != curve.signal:
                    return None
                points += page.points
                if page.next_cursor is None:
                    break
                params["cursor"] = page.next_cursor
        except ProblemError as error:
            if error.problem_code is ProblemCode.UNAVAILABLE:
                raise
            log.warning("carbon.no_history", zone=zone, start_s=start_s, code=error.problem_code)
            return None
        overlapping = [point for point in points if point.end_at.timestamp() > start_s]
        return curve_of_history(overlapping, curve.signal).mean(start_s, end_s) if overlapping else None
