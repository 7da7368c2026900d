"""The optimizer's composition root: ``python -m optimizer_service.app``."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from optimizer_service import endpoints
from optimizer_service.length_model import LengthTrainer
from optimizer_service.queue import LIMITS, PLAN_QUEUE, QUEUE, TASK, TRAINING_LIMITS, TRAINING_QUEUE, TRAINING_TASK
from optimizer_service.repository.lengths import solve_repository, training_repository
from optimizer_service.service import OptimizerService
from optimizer_service.settings import OptimizerSettings
from services.db.engine import create_engine, is_connection_error, ping
from services.db.figures import pool_of, work_of
from services.kit.app import answer_unavailable, create_service, serve
from services.kit.background.queue import TaskQueue
from services.kit.background.work_queue import Sweeper, WorkQueue
from services.kit.celery import create_celery
from services.kit.metrics import Metrics
from services.kit.redis import check_answers, connect
from services.kit.settings import exit_with, settings_or_exit
from services.kit.tasks import end_tasks

MOST_PLAN_SOLVES = 10_000  #: Queued or running at once; each planning worker waits for one


def create_app(settings: OptimizerSettings) -> FastAPI:
    """Return the app; while it runs, it resumes work after crashes and has the job length model trained."""
    engine = create_engine(settings.database_url, application_name="optimizer")
    redis = connect(settings.redis_url, settings)
    repository, of_plans = solve_repository(engine, of_plans=False), solve_repository(engine, of_plans=True)
    queue, plan_queue = (
        TaskQueue(create_celery(name, settings, LIMITS), redis, name, TASK) for name in (QUEUE, PLAN_QUEUE)
    )
    trainings = training_repository(engine)
    training_celery = create_celery(TRAINING_QUEUE, settings, TRAINING_LIMITS)
    training_queue = TaskQueue(training_celery, redis, TRAINING_QUEUE, TRAINING_TASK)

    plan_settings = settings.model_copy(update={"keep_days": settings.plan_solve_keep_days})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        work_queue = WorkQueue("solve", repository, queue, settings.max_pending_per_tenant)
        plan_work_queue = WorkQueue("solve", of_plans, plan_queue, MOST_PLAN_SOLVES)
        app.state.optimizer = OptimizerService(work_queue, plan_work_queue)
        metrics: Metrics = app.state.metrics
        metrics.add("work", work_of({"solve": repository, "plan_solve": of_plans, "training": trainings}))
        metrics.add("database", pool_of(engine))
        loops = (
            Sweeper("solve", repository, queue, settings),
            Sweeper("solve", of_plans, plan_queue, plan_settings),
            Sweeper("training", trainings, training_queue, settings),
            LengthTrainer(trainings, training_queue, settings),
        )
        running = [asyncio.create_task(loop.run()) for loop in loops]
        yield
        await end_tasks(running)
        await redis.aclose()
        await engine.dispose()

    async def readiness() -> None:
        await ping(engine)
        await check_answers(redis)

    app = create_service(
        "Wattshift optimizer", settings, lifespan=lifespan, readiness=readiness, max_body_bytes=settings.max_body_bytes
    )
    app.include_router(endpoints.router)
    answer_unavailable(app, "The database", (DBAPIError, PoolTimeoutError, OSError), is_so=is_connection_error)
    return app


def main() -> None:
    """Run the service until SIGTERM; exit with one line for each invalid setting."""
    settings = settings_or_exit(OptimizerSettings, database=True)
    try:
        app = create_app(settings)
    except ValueError as error:
        exit_with(f"optimizer: {error}")
    serve(app, "optimizer", settings, settings.host, settings.port)


if __name__ == "__main__":
    main()
