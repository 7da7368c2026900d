"""Composition root of telemetry: ``python -m services.telemetry.app``."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asyncpg
from fastapi import FastAPI

from services.db.database import CONNECTION_ERRORS, Database
from services.db.sealing import Sealer
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.carbon import Carbon
from services.kit.http import client_of, new_session
from services.kit.redis import connect
from services.kit.repeating import repeat
from services.kit.settings import settings_or_exit
from services.kit.tasks import end_tasks
from services.telemetry.endpoints import NODE_PATHS, internal_router, router
from services.telemetry.enrolment import Enrolment
from services.telemetry.figures import show_figures
from services.telemetry.idle import BOOK_EVERY_S, SLOT_S, book_control_plane, book_sleeps
from services.telemetry.intensity import IntensitySource
from services.telemetry.ledger import Ledger, last_used_intensity
from services.telemetry.redis_users import LOOK_S, RedisUsers
from services.telemetry.repository.corrections import return_late
from services.telemetry.repository.requests import fold_requests
from services.telemetry.repository.retention import fold, forget_clocks, forget_settings
from services.telemetry.repository.temperatures import STEP_S, note
from services.telemetry.seals import CLOSE_EVERY_S, close_days
from services.telemetry.service import Telemetry
from services.telemetry.settings import TelemetrySettings


def create_app(settings: TelemetrySettings) -> FastAPI:
    """Return the process's HTTP application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        database = await Database.open(settings.database_url, size=settings.pool_size, application_name="telemetry")
        redis = connect(settings.redis_url, settings)
        session = new_session(tls=settings.tls)
        carbon = Carbon(client_of(session, settings, "carbon"), attempts=2, timeout_s=3)

        last_used = partial(last_used_intensity, database)
        intensities = IntensitySource(carbon, last_used, signal=settings.signal, refresh_s=settings.carbon_refresh_s)
        ledger = Ledger(database, intensities, settings.pue)
        users = RedisUsers(database, redis) if settings.node_redis == "own" else None
        enrolment = Enrolment(settings, database, users)
        app.state.telemetry = telemetry = Telemetry(
            settings, database, redis, ledger, Sealer(settings.secrets_key), enrolment, intensities
        )
        signer = telemetry.signer
        show_figures(app.state.metrics, database)
        loops = [repeat(lambda: book_sleeps(database, ledger), BOOK_EVERY_S, failed="sleeps.not_booked")]
        loops.append(repeat(lambda: note(database), STEP_S / 5, failed="temperatures.not_noted"))
        every_s, keep_days = settings.retention_interval_s, settings.clocks_keep_days
        loops.append(repeat(lambda: forget_clocks(database, keep_days), every_s, failed="clocks.not_forgotten"))
        if power_w := settings.control_plane_w:
            own = partial(book_control_plane, ledger, settings.zone, power_w)
            loops.append(repeat(lambda: own(time.time()), SLOT_S / 5, failed="control_plane.not_booked"))
        if users is not None:
            loops.append(repeat(users.apply, LOOK_S, failed="redis.users_not_read"))
        loops.append(repeat(lambda: signer.use(close_days), CLOSE_EVERY_S, failed="ledger.not_signed"))
        loops.append(repeat(lambda: signer.use(return_late), every_s, failed="ledger.not_given_back"))
        if keep_s := settings.retention_s:
            loops.append(repeat(lambda: signer.use(fold, keep_s), every_s, failed="ledger.not_folded"))
            loops.append(repeat(lambda: fold_requests(database, keep_s), every_s, failed="requests.not_folded"))
            loops.append(repeat(lambda: forget_settings(database, keep_s), every_s, failed="settings.not_forgotten"))
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            yield
        finally:
            await end_tasks(tasks)
            await session.close()
            await redis.aclose()
            await database.close()

    async def readiness() -> None:
        await app.state.telemetry.database.ping()

    app = create_service("Wattshift telemetry", settings, lifespan=lifespan, readiness=readiness, open_paths=NODE_PATHS)
    answer_unavailable(app, "The database", (*CONNECTION_ERRORS, TimeoutError, asyncpg.TooManyConnectionsError))
    app.include_router(router)
    app.include_router(internal_router)
    return app


def main() -> None:
    """Run the process."""
    settings = settings_or_exit(TelemetrySettings, database=True)
    serve(create_app(settings), "telemetry", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
