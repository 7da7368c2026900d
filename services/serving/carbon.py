"""What serving asks the carbon service."""

from __future__ import annotations

from services.contracts.carbon import ZoneList
from services.core.domain.carbon import Signal
from services.kit.http import ServiceClient
from services.kit.problems import ProblemError


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
