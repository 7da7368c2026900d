"""The scheduler's composition root: ``python -m services.scheduler.app``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import FunctionType

import asyncpg
from fastapi import FastAPI

from services.core.domain.errors import WattshiftError
from services.core.policies.registry import build_policy
from services.db.database import CONNECTION_ERRORS, Database
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.carbon import Carbon
from services.kit.http import client_of, new_session
from services.kit.plugins import load_plugins
from services.kit.policies import load_policies
from services.kit.redis import check_answers, connect
from services.kit.settings import exit_with, settings_or_exit
from services.kit.tasks import end_tasks
from services.scheduler import (
    endpoints,
    engine_endpoints,
    explaining_endpoints,
    grid_endpoints,
)
from services.scheduler.explaining.explanations import Explanations
from services.scheduler.explaining.reach import Judging
from services.scheduler.figures import show_figures
from services.scheduler.grid.openadr import OpenAdr
from services.scheduler.grid.orders import GridOrders
from services.scheduler.loop import Note, Scheduler
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.dry_run import DryRuns, LiveView
from services.scheduler.power.hooks import build_hook
from services.scheduler.reservations import Reservations
from services.scheduler.service import SchedulerService
from services.scheduler.settings import SchedulerSettings


def create_app(settings: SchedulerSettings) -> FastAPI:
    """Return the app; the decision loop runs as long as it does.

    Raises:
        PluginError: An installed package adds a policy that cannot be used.
        PolicyConfigError: The settings name a policy that does not exist.
        DomainError: Nodes cannot be powered as the settings specify.
    """
    load_policies()
    build_policy(settings.policy, {})
    hook = build_hook(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        database = await Database.open(settings.database_url, size=settings.pool_size, application_name="scheduler")
        redis = connect(settings.redis_url, settings)
        async with new_session(tls=settings.tls) as session:
            carbon = CarbonWatch(
                Carbon(client_of(session, settings, "carbon"), attempts=1, timeout_s=2),
                settings.zone,
                refresh_s=settings.carbon_refresh_s,
                window_s=settings.carbon_window_s,
                default_gco2_per_kwh=settings.default_intensity_gco2_per_kwh,
            )
            app.state.database = database
            app.state.redis = redis
            app.state.service = SchedulerService(database)
            app.state.grid_orders = GridOrders(database)
            view = LiveView(database, settings, carbon, hook)
            app.state.grid_judging = Judging(view)
            app.state.reservations = Reservations(database, view)
            app.state.dry_runs = DryRuns(database, view)
            simulator = client_of(session, settings, "simulator")
            app.state.explanations = Explanations(database, view, carbon, simulator)
            door = OpenAdr(settings, app.state.grid_orders)
            notes: list[Note | None] = [each.value() for each in load_plugins("wattshift.rounds", FunctionType)]
            app.state.scheduler = Scheduler(
                settings, database, redis, carbon, hook, door, next(filter(None, notes), None)
            )
            show_figures(app.state.metrics, database, redis, app.state.scheduler, settings)
            loop = asyncio.create_task(app.state.scheduler.run())
            yield
            await end_tasks([loop])
        await redis.aclose()
        await database.close()

    async def readiness() -> None:
        await app.state.database.ping()
        await check_answers(app.state.redis)
        app.state.scheduler.check_turns()

    app = create_service("Wattshift scheduler", settings, lifespan=lifespan, readiness=readiness)
    app.state.settings = settings
    app.state.power_hook = hook
    app.include_router(endpoints.router)
    app.include_router(explaining_endpoints.router)
    app.include_router(engine_endpoints.router)
    app.include_router(grid_endpoints.router)
    app.include_router(grid_endpoints.reservations)
    answer_unavailable(app, "The database", (*CONNECTION_ERRORS, TimeoutError, asyncpg.TooManyConnectionsError))
    return app


def main() -> None:
    """Run the scheduler until SIGTERM."""
    settings = settings_or_exit(SchedulerSettings, database=True)
    try:
        app = create_app(settings)
    except WattshiftError as error:
        exit_with(f"scheduler: {error}")
    serve(app, "scheduler", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
