"""Requests of serving to the carbon service."""

from __future__ import annotations

import asyncio

from services.contracts.carbon import IntensityForecast, ZoneList
from services.contracts.serving import PlaceIntensity, PoolPlace, PoolSpec
from services.core.domain.errors import DomainError
from services.core.domain.serving import STEP_S
from services.core.domain.signal import Signal
from services.kit.http import ServiceClient, new_session
from services.kit.problems import ProblemError
from services.kit.tokens import outgoing
from services.serving.planning.problem import intensity_of
from services.serving.settings import ServingSettings


class CarbonZones:
    """The grid zones that the carbon service knows."""

    def __init__(self, carbon: ServiceClient) -> None:
        self._carbon = carbon

    async def signals(self) -> dict[str, set[Signal]] | None:
        """Return the zones with their signals; None while the carbon service does not answer."""
        try:
            found = await self._carbon.call("GET", "/v1/carbon/zones", ZoneList, attempts=2)
        except ProblemError:
            return None
        return {zone.zone: set(zone.signals) for zone in found.items}


async def place_intensities(
    settings: ServingSettings, spec: PoolSpec, from_s: float, now_s: float
) -> dict[str, PlaceIntensity]:
    """Return the means over the steps of a plan from ``from_s`` on, by place.

    Durations are in real seconds, as those of requests are: in a replay the grid's clock runs faster.

    Raises:
        ProblemError: The carbon service does not answer.
        DomainError: It does not have the requested values.
    """
    horizon_s = from_s - now_s + (spec.plan_steps + 1) * STEP_S
    async with new_session(tls=settings.tls) as session:
        carbon = ServiceClient(
            session,
            settings.carbon_url,
            "The carbon service",
            tokens=outgoing(settings.credential, "carbon"),
            timeout_s=settings.carbon_timeout_s,
        )

        async def ask(place: PoolPlace) -> PlaceIntensity:
            params: dict[str, str | float] = {"horizon_s": horizon_s, "clock": "real"}
            if place.signal is not None:
                params["signal"] = str(place.signal)
            try:
                path = f"/v1/carbon/{place.zone}/forecast"
                return intensity_of(
                    await carbon.call("GET", path, IntensityForecast, params=params), from_s, spec.plan_steps
                )
            except ProblemError as error:
                if error.status >= 500:
                    raise
                raise DomainError(f"Place {place.name}, zone {place.zone}: {error.detail}") from error

        found = await asyncio.gather(*(ask(place) for place in spec.places))
    return {place.name: each for place, each in zip(spec.places, found, strict=True)}
