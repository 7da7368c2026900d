"""What the grid emitted while energy was used.

The carbon service's outlook, which is history and forecast as one step curve, is kept per zone. The service is asked
again when an interval ends after the time for which the known outlook was made, so that energy is priced with the
newest values; an interval from before the outlook is priced from the service's history. If the service does not answer,
the last curve known is used, then the last intensity that the ledger used in that zone; both are marked as estimated.
Without even that, the node is asked to send the interval again later; if the carbon service has no such zone, the node
is told so.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from services.contracts.carbon import IntensityPoint, OutlookPoint, curve_of
from services.contracts.codes import ProblemCode
from services.contracts.engines import ZoneOutlook, ZoneStep
from services.core.domain.carbon import CarbonCurve, Signal
from services.kit.carbon import Carbon
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable

log = Log(__name__)

MAX_STEPS = 1_000  #: Of an outlook that is told to others

_A_DAY_EITHER_WAY = {"past_s": 86_400.0, "ahead_s": 86_400.0}
"""The forecast prices energy while the carbon service does not answer."""


class Origin(NamedTuple):
    """Where an intensity comes from; None if not known."""

    provider: str | None = None  #: Who gave it
    kind: str | None = None  #: The kind of the least certain value in its mean: one of ``KINDS``
    fetched_at: datetime | None = None  #: When the newest of those values was fetched, or learned


UNKNOWN_ORIGIN = Origin()

KINDS = ("measured", "estimated", "held", "provider", "learned", "persistence", "last_used")
"""From the most certain kind to the least: as in ``contracts.carbon.OutlookPoint``, ``estimated`` by the provider
itself, and the last intensity that the ledger used."""


@dataclass(frozen=True, slots=True)
class Intensity:
    """An intensity that was in force over an interval."""

    gco2_per_kwh: float  #: Mean over the interval, weighted by time
    signal: Signal  #: What it measures
    estimated: bool  #: Whether any part of it was forecast, held over, or estimated by the provider
    origin: Origin = field(default_factory=lambda: UNKNOWN_ORIGIN, compare=False)  #: Where it comes from


@dataclass(frozen=True, slots=True)
class KnownCurve:
    """The known curve of a zone."""

    curve: CarbonCurve  #: Measured steps, and estimates where nothing was measured
    signal: Signal  #: What the values measure
    made_for_s: float  #: Until when, UTC seconds, the curve was up to date
    origins: Sequence[Origin] = ()  #: (n,) the origin of each step; empty if unknown

    def during(self, start_s: float, end_s: float) -> Intensity:
        """Return the mean over ``[start_s, end_s)``, UTC seconds."""
        curve = self.curve
        origin = self._origin(start_s, end_s)
        return Intensity(curve.mean(start_s, end_s), self.signal, curve.is_estimated(start_s, end_s), origin)

    def _origin(self, start_s: float, end_s: float) -> Origin:
        if not self.origins:
            return UNKNOWN_ORIGIN
        first = self.curve.step_at(start_s)
        last = max(first, self.curve.step_at(math.nextafter(end_s, start_s)))
        if first == last:
            return self.origins[first]
        used = self.origins[first : last + 1]
        kind = max((each.kind or "" for each in used), key=KINDS.index)
        fetched = [each.fetched_at for each in used if each.fetched_at is not None]
        return Origin(used[0].provider, kind, max(fetched, default=None))


def origins_of(provider: str, points: Sequence[IntensityPoint]) -> list[Origin]:
    """Return where each step of the points' curve comes from; a gap has the value before it, as an estimate."""
    origins: list[Origin] = []
    for before, point in zip((None, *points), points, strict=False):
        if before is not None and before.end_at < point.start_at:
            origins.append(Origin(provider, "estimated", before.fetched_at))
        origins.append(Origin(provider, _kind(point), point.fetched_at))
    return origins


def _kind(point: IntensityPoint) -> str:
    kind = point.kind if isinstance(point, OutlookPoint) else "measured"
    return "estimated" if kind == "measured" and point.is_estimated else kind


LastUsed = Callable[[str], Awaitable["Intensity | None"]]  #: Returns the last intensity the ledger used in a zone


class IntensitySource:
    """Intensities by zone and time, from the carbon service and its last answers.

    The ledger accounts by an average signal alone: where the carbon service's own is marginal, by the average direct.
    """

    def __init__(
        self, carbon: Carbon, last_used: LastUsed, *, signal: Signal | None = None, refresh_s: float = 1.0
    ) -> None:
        self._carbon, self._last_used = carbon, last_used
        self._signal, self._refresh_s = signal, refresh_s
        self._known: dict[str, KnownCurve] = {}
        self._asked: dict[str, float] = {}
        self._unknown: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def during(self, zone: str, start_s: float, end_s: float) -> Intensity:
        """Return the mean intensity of ``zone`` over ``[start_s, end_s)``, UTC seconds.

        Raises:
            ProblemError: 503 if nothing at all is known of the zone; ``unknown_zone`` if the carbon service
                has none of this name, which an operator may still add.
        """
        known = await self._current(zone, end_s)
        if known is None:
            found = await self._last_used(zone)
            if found is None:
                raise self._nothing_known(zone)
            return found
        if start_s < known.curve.start_s and (older := await self._older(zone, start_s, end_s, known)) is not None:
            return older.during(start_s, end_s)
        return known.during(start_s, end_s)

    def _nothing_known(self, zone: str) -> ProblemError:
        if (why := self._unknown.get(zone)) is None:
            return unavailable("The carbon service")
        detail = f"{why} The energy can be accounted for once CARBON_ZONES has the zone; send it again then."
        return ProblemError(503, ProblemCode.UNKNOWN_ZONE, detail, headers={"Retry-After": "1"})

    async def outlook(self, zone: str, now_s: float) -> ZoneOutlook | None:
        """Return what a zone is expected to emit from ``now_s`` (UTC seconds) on; None if nothing is known."""
        known = await self._current(zone, now_s)
        if known is None:
            return None
        curve, first = known.curve, known.curve.step_at(now_s)
        steps = zip(curve.times_s[first:].tolist(), curve.intensity_gco2_per_kwh[first:].tolist(), strict=True)
        points = [ZoneStep(start_at=datetime.fromtimestamp(at, UTC), gco2_per_kwh=value) for at, value in steps]
        return ZoneOutlook(zone=zone, signal=known.signal, steps=points[:MAX_STEPS])

    async def _current(self, zone: str, end_s: float) -> KnownCurve | None:
        async with self._locks.setdefault(zone, asyncio.Lock()):
            known = self._known.get(zone)
            if known is not None and known.made_for_s >= end_s:
                return known
            if time.monotonic() - self._asked.get(zone, -1e9) < self._refresh_s:
                return known
            self._asked[zone] = time.monotonic()
            try:
                outlook = await self._carbon.outlook(zone, signal=self._signal, **_A_DAY_EITHER_WAY)
                if outlook.signal is Signal.MARGINAL:
                    self._signal = Signal.AVERAGE_DIRECT
                    outlook = await self._carbon.outlook(zone, signal=self._signal, **_A_DAY_EITHER_WAY)
            except ProblemError as error:
                log.warning("carbon.unavailable", zone=zone, code=error.problem_code, detail=error.detail)
                if error.problem_code is ProblemCode.UNKNOWN_ZONE:
                    self._unknown[zone] = error.detail
                return known
            self._unknown.pop(zone, None)
            origins = origins_of(outlook.provider, outlook.points)
            self._known[zone] = KnownCurve(curve_of(outlook.points), outlook.signal, outlook.now.timestamp(), origins)
            return self._known[zone]

    async def _older(self, zone: str, start_s: float, end_s: float, known: KnownCurve) -> KnownCurve | None:
        """Return the history of an interval that begins before ``known``, or None if there is none."""
        try:  # from some time before, whose value holds where nothing was measured at the beginning
            history = await self._carbon.history(zone, start_s - 3_600, max(end_s, start_s + 1), self._signal)
        except ProblemError as error:
            if error.problem_code is ProblemCode.UNAVAILABLE:
                raise
            log.warning("carbon.no_history", zone=zone, start_s=start_s, code=error.problem_code)
            return None
        points = history.points
        if history.signal != known.signal or not points or points[-1].end_at.timestamp() <= start_s:
            return None
        return KnownCurve(history.as_domain().curve, known.signal, end_s, origins_of(history.provider, points))
