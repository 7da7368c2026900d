"""The carbon service's composition root: ``python -m carbon_service.app``."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from carbon_service import carbon_aware, endpoints
from carbon_service.figures import show_figures
from carbon_service.learner import Learner
from carbon_service.poller import Poller
from carbon_service.prices import PriceWatch, providers_named
from carbon_service.providers.entry import ProviderContext
from carbon_service.providers.http import Pacing
from carbon_service.providers.protocol import Provider
from carbon_service.providers.registry import build_providers, known_providers, read_settings
from carbon_service.replay import Replay
from carbon_service.repository import Repository
from carbon_service.service import CarbonService
from carbon_service.settings import Settings
from carbon_service.zones import Zones, build_zones
from services.db.engine import create_engine, is_connection_error, ping
from services.db.figures import pool_of
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.logging import Log
from services.kit.plugins import PluginError
from services.kit.settings import exit_with, settings_or_exit
from services.kit.tariffs import read_tariffs
from services.kit.tasks import end_tasks

log = Log(__name__)

NowS = Callable[[], float]


def create_app(settings: Settings, now_s: NowS = time.time) -> FastAPI:
    """Return the app; it polls its providers while it runs.

    Args:
        now_s: The real clock, UTC seconds.

    Raises:
        ZoneConfigError: Zones, providers, their settings and signals contradict each other.
        PluginError: An installed package adds a provider that cannot be used.
    """
    entries = known_providers()
    chosen = read_settings(settings.sources, entries)
    if settings.prices_file is not None:
        pricing = providers_named(read_tariffs(settings.prices_file), settings.prices_file, settings.zones, entries)
        chosen |= read_settings({"of CARBON_PRICES_FILE": pricing}, entries)
    http = httpx.AsyncClient(headers={"user-agent": "wattshift"})
    pacing = Pacing(timeout_s=settings.provider_timeout_s)

    def zones_of(replay: Replay) -> tuple[Zones, dict[str, Provider]]:
        providers = build_providers(chosen, entries, ProviderContext(http, now_s, pacing, replay))
        return build_zones(providers, settings.sources, settings.default_signal), providers

    zones_of(Replay(0.0, 0.0, 1.0))  # refused before anything starts; where the replay stands, only the database knows
    engine = create_engine(settings.database_url, application_name="carbon")
    repository = Repository(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        replay = await _started(repository, settings, now_s)
        async with http:
            zones, providers = zones_of(replay)
            app.state.zones = zones
            priced, aliases = settings.prices_file is not None, settings.location_aliases
            app.state.carbon = CarbonService(zones, repository, now_s, aliases, priced)
            show_figures(app.state.metrics, zones, app.state.carbon)
            app.state.metrics.add("database", pool_of(engine))
            poller = Poller(repository, settings, now_s)
            tasks = [asyncio.create_task(poller.run(source)) for source in zones.sources]
            if settings.learn_forecasts:
                tasks.append(asyncio.create_task(Learner(repository, zones.sources, now_s).run()))
            if (path := settings.prices_file) is not None:
                watch = PriceWatch(repository, path, providers, settings.retention_s, now_s)
                tasks.append(asyncio.create_task(watch.run()))
            log.info("carbon.started", zones=",".join(settings.zones), speed=settings.replay_speed)
            yield
            await end_tasks(tasks)
        await engine.dispose()

    async def readiness() -> None:
        await ping(engine)
        zones: Zones = app.state.zones
        if waiting := [source.key.zone for source in zones.sources if not source.polled]:
            raise RuntimeError(f"{waiting[0]} has not been fetched yet")

    app = create_service("Wattshift carbon service", settings, lifespan=lifespan, readiness=readiness)
    app.include_router(endpoints.router)
    app.include_router(carbon_aware.router)
    answer_unavailable(app, "The database", (DBAPIError, PoolTimeoutError, OSError), is_so=is_connection_error)
    return app


async def _started(repository: Repository, settings: Settings, now_s: NowS) -> Replay:
    """Return the replay to continue with; wait up to half a minute for a database that is still starting."""
    deadline_s, start_at = time.monotonic() + 30, settings.replay_start
    while True:
        try:
            return await repository.start_replay(settings.replay_speed, start_at and start_at.timestamp(), now_s())
        except Exception as error:
            if not is_connection_error(error) or time.monotonic() > deadline_s:
                raise
            log.warning("database.waiting", error=str(error))
            await asyncio.sleep(1)


def main() -> None:
    """Run the service until SIGTERM; exit with one line for each error if the settings are invalid."""
    settings = settings_or_exit(Settings, database=True)
    try:
        app = create_app(settings)
    except (PluginError, ValueError) as error:
        exit_with(*(f"carbon service: {line}" for line in str(error).splitlines()))
    serve(app, "carbon", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
