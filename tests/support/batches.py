"""What a worker on batches asks: where lines may go, how clean it will be there, and what a key may do."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from services.contracts.identity import NO_KEY_LIMITS, KeyLimits
from services.contracts.routing import RoutedServer, RoutingTable
from services.serving.carbon import Forecasts, Grid, Points
from services.serving.routing import Routing
from tests.support.routers import MODEL


class Table(Routing):
    """Knows two model servers."""

    def __init__(self, *places: str) -> None:
        self.zones = {place: (place, None) for place in places}
        self.servers = [
            RoutedServer(
                id=place,
                url="http://x",
                location=place,
                state="ready",
                tenant_id="acme",
                models=[MODEL],
                capacity=4,
                gco2_per_kwh=100.0,
            )
            for place in places
        ]

    async def table(self) -> RoutingTable:
        return RoutingTable(made_at=datetime.now(UTC), pools=[], servers=self.servers)


class Known(Forecasts):
    """Has the forecasts that a test gives it."""

    def __init__(self, **points: Points) -> None:
        self.points = points

    async def of(self, wanted: Iterable[Grid]) -> dict[Grid, Points]:
        return {grid: self.points[grid[0]] for grid in wanted if grid[0] in self.points}


async def unlimited(_: str) -> KeyLimits:
    return NO_KEY_LIMITS
