"""The simulator's composition root: ``python -m services.simulator.app``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from services.db.engine import create_engine, is_connection_error, ping
from services.db.figures import pool_of, work_of
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.background.queue import TaskQueue
from services.kit.background.work_queue import Sweeper, WorkQueue
from services.kit.carbon import Carbon
from services.kit.http import client_of, new_session
from services.kit.metrics import Metrics
from services.kit.plugins import PluginError
from services.kit.policies import load_policies
from services.kit.redis import check_answers, connect
from services.kit.repeating import repeat
from services.kit.settings import exit_with, settings_or_exit
from services.kit.tasks import end_tasks
from services.simulator import endpoints
from services.simulator.daily import LOOK_S, DailySavings, savings_of
from services.simulator.queue import QUEUE, TASK, simulator_celery
from services.simulator.repository import SimulationRepository
from services.simulator.service import Comparisons, SimulatorService
from services.simulator.settings import SimulatorSettings
from services.simulator.sources import Sources


def create_app(settings: SimulatorSettings) -> FastAPI:
    """Return the app, which repairs what crashes left behind; ``PluginError`` if a package's policy is unusable."""
    load_policies()
    engine = create_engine(settings.database_url, application_name="simulator")
    redis = connect(settings.redis_url, settings)
    repository = SimulationRepository(engine)
    queue = TaskQueue(simulator_celery(settings), redis, QUEUE, TASK)
    work_queue = WorkQueue("simulation", repository, queue, settings.max_pending_per_tenant)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with new_session(tls=settings.tls) as session:
            telemetry, carbon, scheduler = (
                client_of(session, settings, service, timeout_s=settings.source_timeout_s)
                for service in ("telemetry", "carbon", "scheduler")
            )
            sources = Sources(telemetry, Carbon(carbon), scheduler)
            app.state.simulator = SimulatorService(work_queue, repository, sources, settings)
            one_at_a_time = SimulatorService(
                WorkQueue("simulation", repository, queue, max_pending_per_tenant=1), repository, sources, settings
            )
            ages_s = settings.comparison_max_age_s, settings.comparison_min_age_s
            comparisons = app.state.comparisons = Comparisons(repository, one_at_a_time, *ages_s)
            daily = app.state.savings = DailySavings(repository, one_at_a_time, sources, telemetry)
            metrics: Metrics = app.state.metrics
            metrics.add("savings", savings_of(repository))
            metrics.add("work", work_of({"simulation": repository}))
            metrics.add("database", pool_of(engine))
            looks = repeat(daily.look, LOOK_S, failed="savings.not_replayed")
            sweeps = Sweeper("simulation", repository, queue, settings).run()
            tasks = [asyncio.create_task(loop) for loop in (sweeps, looks)]
            yield
            await end_tasks(tasks)
            await comparisons.close()
        await redis.aclose()
        await engine.dispose()

    async def readiness() -> None:
        await ping(engine)
        await check_answers(redis)

    app = create_service(
        "Wattshift simulator", settings, lifespan=lifespan, readiness=readiness, max_body_bytes=settings.max_body_bytes
    )
    for router in endpoints.ROUTERS:
        app.include_router(router)
    answer_unavailable(app, "The database", (DBAPIError, PoolTimeoutError, OSError), is_so=is_connection_error)
    return app


def main() -> None:
    """Run the service until SIGTERM; on invalid settings, exit with one line for each."""
    settings = settings_or_exit(SimulatorSettings, database=True)
    try:
        app = create_app(settings)
    except (ValueError, PluginError) as error:
        exit_with(f"simulator: {error}")
    serve(app, "simulator", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
