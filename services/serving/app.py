"""Serving's composition root: ``python -m services.serving.app``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from services.db.engine import create_engine, is_connection_error, ping
from services.db.sealing import Sealer
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.background.work_queue import Sweeper
from services.kit.carbon import Carbon
from services.kit.edge.keys import resolve_at
from services.kit.http import client_of, new_session
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.kit.settings import exit_with, settings_or_exit
from services.kit.tasks import end_tasks
from services.kit.tokens import outgoing
from services.serving import endpoints
from services.serving.batches import endpoints as batch_endpoints
from services.serving.batches.sending import Sender, limits_at
from services.serving.batches.service import Batches
from services.serving.batches.worker import BatchWorker
from services.serving.carbon import Baselines, CarbonZones, Forecasts, Intensities
from services.serving.clusters import Clusters
from services.serving.controller.controller import Controller
from services.serving.controller.probes import Prober, new_probe_session
from services.serving.controller.server_jobs import ServerJobs
from services.serving.fleets.planner import FleetPlanner
from services.serving.fleets.service import Apps, Fleets
from services.serving.planning.planner import EventWatch, Planner, PlanWorkers
from services.serving.planning.plans import Plans
from services.serving.repository import ServingRepository
from services.serving.repository.figures import show_figures
from services.serving.repository.plans import plan_repository
from services.serving.repository.set_back import EVERY_S
from services.serving.routing import Endpoints, Routing
from services.serving.service import Pools
from services.serving.settings import ServingSettings
from services.serving.solver import search_by
from services.serving.traffic import TrafficReports
from services.serving.upkeep import forget, rectify

log = Log(__name__)

FORM_BYTES = 64 * 1024  #: Of an upload, what is not the file
WORKERS_LOOK_S = 0.5
"""Time between checks for plans that wait for a worker; short, because an operator may be waiting for one."""


def create_app(settings: ServingSettings) -> FastAPI:
    """Return the app; while it runs, pools are planned and run as planned."""
    engine = create_engine(settings.database_url, application_name="serving")
    plan_rows = plan_repository(engine)
    repository = ServingRepository(engine)
    plans = Plans(repository, plan_rows, settings)
    traffic = TrafficReports(repository, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with (
            new_session(tls=settings.tls) as session,
            new_session(0, tls=settings.tls) as lines_session,
            new_probe_session() as probe_session,
        ):
            carbon = client_of(session, settings, "carbon", timeout_s=settings.carbon_timeout_s)
            admission = client_of(session, settings, "admission", timeout_s=5)
            optimizer = client_of(session, settings, "optimizer")
            prober = Prober(
                probe_session, timeout_s=settings.instance_probe_timeout_s, at_once=settings.instance_probes_at_once
            )
            zones = CarbonZones(Carbon(carbon, attempts=2))
            app.state.pools = Pools(repository, zones, plans, settings.plan_interval_s)
            app.state.traffic = traffic
            app.state.repository = repository
            app.state.sealer = sealer = Sealer(settings.secrets_key)
            app.state.fleets = Fleets(repository, zones)
            app.state.apps = Apps(repository, settings)
            app.state.endpoints = Endpoints(repository, settings, zones)
            app.state.clusters = Clusters(repository, settings)
            intensities = Intensities(Carbon(carbon, attempts=1, timeout_s=2))
            app.state.routing = routing = Routing(repository, intensities, settings)
            app.state.batches = Batches(repository, settings)
            show_figures(app.state.metrics, engine, plan_rows)
            there = repository.presence.wait
            batches: list[BatchWorker] = []
            if "router" in settings.credential.keys:
                lines = Sender(lines_session, settings.router_url, outgoing(settings.credential, "router"))
                forecasts = Forecasts(Carbon(carbon, attempts=1, timeout_s=2))
                batches = [
                    BatchWorker(repository, routing, forecasts, lines, settings, limits_at(resolve_at(admission)))
                ]
            else:
                log.error("batches.no_credential", why="WATTSHIFT_SERVICE_CREDENTIAL does not let serving ask routers")
            loops = (
                *batches,
                Sweeper("plan", plan_rows, None, settings),
                Planner(plans, EventWatch(repository, intensities, settings), settings.plan_look_s, there),
                PlanWorkers(
                    plan_rows,
                    at_once=settings.plan_workers,
                    look_s=min(settings.plan_look_s, WORKERS_LOOK_S),
                    when=there,
                ),
                FleetPlanner(
                    repository,
                    intensities,
                    Baselines(Carbon(carbon, attempts=1)),
                    search_by(optimizer, settings.fleet_solve_s),
                    settings,
                ),
                Controller(repository, ServerJobs(admission), prober, settings, held=routing.held, sealer=sealer),
            )
            upkeep = (
                repeat(partial(rectify, repository), EVERY_S, failed="rectifier.not_looked", when=there),
                repeat(partial(forget, repository, settings), settings.traffic_sweep_s, failed="serving.not_swept"),
            )
            running = [asyncio.create_task(work) for work in (*upkeep, *(loop.run() for loop in loops))]
            yield
            await end_tasks(running)
        await engine.dispose()

    app = create_service(
        "Wattshift serving",
        settings,
        lifespan=lifespan,
        readiness=partial(ping, engine),
        max_body_bytes=max(settings.max_body_bytes, settings.batch_file_bytes + FORM_BYTES),
    )
    for router in (endpoints.router, endpoints.endpoints_router, endpoints.apps_router, batch_endpoints.router):
        app.include_router(router)
    answer_unavailable(app, "The database", (DBAPIError, PoolTimeoutError, OSError), is_so=is_connection_error)
    return app


def main() -> None:
    """Run the service until SIGTERM; exit with one line for each invalid setting."""
    settings = settings_or_exit(ServingSettings, database=True)
    try:
        app = create_app(settings)
    except ValueError as error:
        exit_with(f"serving: {error}")
    serve(app, "serving", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
