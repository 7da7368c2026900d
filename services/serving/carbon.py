"""Serving's requests to the carbon service."""

import asyncio
import time
from collections.abc import Iterable, Mapping

from services.contracts.apps import FleetSpec
from services.contracts.carbon import CurrentIntensity, curve_of
from services.contracts.codes import ProblemCode
from services.contracts.invalid import no_such_zone
from services.contracts.serving import PlaceIntensity, PoolPlace, PoolSpec
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S
from services.core.domain.signal import Signal
from services.kit.carbon import Carbon
from services.kit.http import client_of, new_session
from services.kit.problems import ProblemError, invalid
from services.serving.planning.problem import intensity_of
from services.serving.settings import ServingSettings

INTENSITY_AGE_S = 30.0  #: How long an intensity is used before the carbon service is asked again
BASELINE_S, BASELINE_AGE_S = 7 * 86_400.0, 600.0


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


class Intensities:
    """The carbon intensities in force, by zone and signal, as the carbon service last stated them."""

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon
        self._known: dict[tuple[str, str | None], tuple[float, CurrentIntensity | None]] = {}

    async def of(self, wanted: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], CurrentIntensity]:
        """Return the known intensities; one that cannot be renewed is kept, and marked as stale by its own age."""
        now_s = time.monotonic()
        keys = set(wanted)
        due = [key for key in keys if self._known.get(key, (0.0, None))[0] <= now_s]
        await asyncio.gather(*(self._renew(key, now_s) for key in due))
        return {key: found for key in keys if (found := self._known[key][1]) is not None}

    async def _renew(self, key: tuple[str, str | None], now_s: float) -> None:
        zone, signal = key
        known = self._known.get(key, (0.0, None))[1]
        try:
            known = await self._carbon.current(zone, signal)
            self._known[key] = (now_s + INTENSITY_AGE_S, known)
        except ProblemError:
            self._known[key] = (now_s + INTENSITY_AGE_S / 10, known)


class Baselines:
    """The mean intensity of each zone over the last seven days, by the grid's clock."""

    def __init__(self, carbon: Carbon) -> None:
        self._carbon = carbon
        self._known: dict[tuple[str, str | None], tuple[float, float]] = {}

    async def of(self, fleet: FleetSpec) -> float | None:
        """Return the baseline in gCO2/kWh: the fleet's own, or else the mean; None if nothing is known."""
        if fleet.baseline_gco2_per_kwh is not None:
            return fleet.baseline_gco2_per_kwh
        key = fleet.zone, fleet.signal and str(fleet.signal)
        known = self._known.get(key)
        if known is not None and time.monotonic() < known[0] + BASELINE_AGE_S:
            return known[1]
        try:
            outlook = await self._carbon.outlook(fleet.zone, past_s=BASELINE_S, ahead_s=3_600, signal=key[1])
        except ProblemError:
            return None if known is None else known[1]
        past = [point for point in outlook.points if point.end_at <= outlook.now]
        if not past:
            return None if known is None else known[1]
        mean = curve_of(past).mean(past[0].start_at.timestamp(), past[-1].end_at.timestamp())
        self._known[key] = time.monotonic(), mean
        return self._known[key][1]


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
                found = await carbon.forecast(place.zone, horizon_s, "real", place.signal)
                return intensity_of(found, from_s, spec.plan_steps)
            except ProblemError as error:
                if error.status >= 500:
                    raise
                raise DomainError(f"Place {place.name}, zone {place.zone}: {error.detail}") from error

        found = await asyncio.gather(*(ask(place) for place in spec.places))
    return {place.name: each for place, each in zip(spec.places, found, strict=True)}
