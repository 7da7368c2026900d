"""The carbon service whole, on a real database and a clock that the test moves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx

from carbon_service.app import create_app
from carbon_service.poller import Poller
from carbon_service.providers.protocol import DAY_S, Provider
from carbon_service.repository import Repository
from carbon_service.service import CarbonService
from carbon_service.settings import Settings
from carbon_service.zones import Source, build_zones
from services.contracts.identity import Identity, Role
from services.core.domain.carbon import Signal
from tests.support.tokens import headers_for

TOKEN = "a-token-of-sixteen-and-more"
NOW_S = datetime(2026, 3, 1, 9, 40, tzinfo=UTC).timestamp()


@dataclass
class Now:
    """The real clock, as far as the service can tell."""

    s: float = NOW_S

    def __call__(self) -> float:
        """Return the time, UTC seconds."""
        return self.s


def settings(**chosen: object) -> Settings:
    """Return settings with a token, and what the test chooses; nothing is read from the environment's ``CARBON_``.

    Nothing is learned unless the test chooses so: when that is done is up to a background task.
    """
    return Settings(WATTSHIFT_SERVICE_TOKEN=TOKEN, **{"learn_forecasts": False} | chosen)  # type: ignore[arg-type]


@dataclass
class Bench:
    """One provider's zone with store, poller and service."""

    source: Source
    poller: Poller
    service: CarbonService
    repository: Repository
    now: Now

    async def poll(self) -> None:
        """Take one turn."""
        await self.poller.poll(self.source)


def a_bench(
    provider: Provider, zone: str, repository: Repository, now: Now, signal: Signal | None = None, **keep: float
) -> Bench:
    """Return a bench for one zone."""
    zones = build_zones({provider.name: provider}, {zone: [provider.name]}, signal or provider.signals[0])
    poller = Poller(repository, settings().model_copy(update={"backfill_s": 7 * DAY_S} | keep), now)
    return Bench(
        zones.find(zone, None), poller, CarbonService(zones, repository, now, {}, priced=False), repository, now
    )


@asynccontextmanager
async def running(database_url: str, now: Now, **chosen: object) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the running app once it is ready."""
    app = create_app(settings(DATABASE_URL=database_url, **chosen), now)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        anybody = Identity(tenant_id="t", role=Role.USER, key_id="k")
        headers = headers_for("carbon", anybody, root=TOKEN)
        async with httpx.AsyncClient(transport=transport, base_url="http://carbon", headers=headers) as client:
            deadline_s = time.monotonic() + 60  # seconds enough on a machine that is busy with other things
            while (await client.get("/readyz")).status_code != 200:
                assert time.monotonic() < deadline_s, "not ready within 60 s"
                await asyncio.sleep(0.01)
            yield client
