"""Serving's requests to the carbon service."""

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import ClassVar, Generic, TypeVar

from services.contracts.batches import WINDOW_S
from services.contracts.carbon import CurrentIntensity, curve_of
from services.contracts.codes import ProblemCode
from services.contracts.invalid import no_such_zone
from services.contracts.serving import PlaceIntensity, PoolPlace, PoolSpec
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S
from services.core.domain.signal import Signal
from services.kit.carbon import Carbon
from services.kit.http import client_of, new_session
from services.kit.logging import Log
from services.kit.problems import ProblemError, invalid
from services.serving.planning.problem import intensity_of
from services.serving.settings import ServingSettings

log = Log(__name__)

T = TypeVar("T")

UNANSWERED_S = 3.0  #: How long after it did not answer the carbon service is asked again


class CarbonZones:
    """The grid zones that the carbon service knows."""

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon

    async def signals(self) -> dict[str, set[Signal]] | None:
        """Return the zones with their signals; None if the carbon service does not answer."""
        try:
            found = await self._carbon.zones()
        except ProblemError:
            return None
        return {zone.zone: set(zone.signals) for zone in found.items}

    async def check(self, named: Mapping[str, tuple[str, Signal | None]]) -> None:
        """Refuse zones and signals that do not exist.

        If the carbon service does not answer, nothing is refused, and mistakes show in plans instead.

        Args:
            named: Zones with their signals (None for the default), by where the request names them.

        Raises:
            ProblemError: 422 if there is no such zone or signal.
        """
        zones = await self.signals() if named else None
        if zones is None:
            return
        for at, (zone, signal) in named.items():
            if zone not in zones:
                raise invalid(f"{at}/zone", no_such_zone(zone, zones), ProblemCode.UNKNOWN_ZONE)
            if signal is not None and signal not in zones[zone]:
                raise invalid(f"{at}/signal", f"Zone {zone} has {', '.join(sorted(zones[zone]))}, not {signal}.")


Grid = tuple[str, str | None]  #: A zone and a signal; None for its default
Points = list[tuple[float, float, float]]  #: Start and end, UTC seconds, and gCO2/kWh


class _Kept(Generic[T]):
    """What the carbon service last said of each zone and signal; it is kept while there is nothing newer."""

    age_s: ClassVar[float]  #: How long it is used before the carbon service is asked again

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon
        self._known: dict[Grid, tuple[float, T | None]] = {}

    async def _ask(self, zone: str, signal: str | None) -> T | None:
        raise NotImplementedError

    async def of(self, wanted: Iterable[Grid]) -> dict[Grid, T]:
        """Return what is known of these; all that is out of date is asked for at once."""
        grids = {*wanted}
        found = await asyncio.gather(*(self._latest(*each) for each in grids))
        return {grid: each for grid, each in zip(grids, found, strict=True) if each is not None}

    async def _latest(self, zone: str, signal: str | None) -> T | None:
        due_s, known = self._known.get((zone, signal), (-math.inf, None))
        if time.monotonic() >= due_s:
            try:
                found = await self._ask(zone, signal)
            except ProblemError:
                found = None
            except ValueError as error:  # it says what cannot be true: one zone stops no other
                log.warning("carbon.impossible", zone=zone, signal=signal, error=str(error))
                found = None
            age_s, known = (UNANSWERED_S, known) if found is None else (self.age_s, found)
            self._known[zone, signal] = time.monotonic() + age_s, known
        return known


class Intensities(_Kept[CurrentIntensity]):
    """The carbon intensities in force; one that cannot be renewed is marked as stale by its own age."""

    age_s = 30.0

    async def _ask(self, zone: str, signal: str | None) -> CurrentIntensity:
        return await self._carbon.current(zone, signal)


class Forecasts(_Kept[Points]):
    """The intensities ahead, for as long as a batch may take."""

    age_s = 300.0

    async def _ask(self, zone: str, signal: str | None) -> Points:
        found = await self._carbon.forecast(zone, WINDOW_S + 3_600.0, signal)
        return [(each.start_at.timestamp(), each.end_at.timestamp(), each.gco2_per_kwh) for each in found.points]


class Baselines(_Kept[float]):
    """The mean intensity of each zone over the last seven days, by the grid's clock."""

    age_s = 600.0

    async def _ask(self, zone: str, signal: str | None) -> float | None:
        outlook = await self._carbon.outlook(zone, past_s=7 * 86_400.0, ahead_s=3_600, signal=signal)
        past = [point for point in outlook.points if point.end_at <= outlook.now]
        return curve_of(past).mean(past[0].start_at.timestamp(), past[-1].end_at.timestamp()) if past else None


async def place_intensities(
    settings: ServingSettings, spec: PoolSpec, from_s: float, now_s: float
) -> dict[str, PlaceIntensity]:
    """Return each place's mean intensities over the steps of a plan that begins at ``from_s``.

    Durations are in real seconds, like those of requests: in a replay the grid's clock runs faster.

    Raises:
        ProblemError: The carbon service does not answer.
        DomainError: It does not have the requested values.
    """
    horizon_s = from_s - now_s + (spec.plan_steps + 1) * STEP_S
    async with new_session(tls=settings.tls) as session:
        carbon = Carbon(client_of(session, settings, "carbon", timeout_s=settings.carbon_timeout_s))

        async def ask(place: PoolPlace) -> PlaceIntensity:
            try:
                found = await carbon.forecast(place.zone, horizon_s, place.signal)
                return intensity_of(found, from_s, spec.plan_steps)
            except ProblemError as error:
                if error.status >= 500:
                    raise
                raise DomainError(f"Place {place.name}, zone {place.zone}: {error.detail}") from error

        found = await asyncio.gather(*(ask(place) for place in spec.places))
    return {place.name: each for place, each in zip(spec.places, found, strict=True)}
