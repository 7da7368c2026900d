"""The worker: ``python -m celery -A optimizer_service.tasks worker --concurrency 1``."""

from __future__ import annotations

import functools

from optimizer_service.queue import TASK, optimizer_celery
from optimizer_service.settings import OptimizerSettings
from optimizer_service.worker import solve_worker
from services.db.engine import async_url, create_engine
from services.kit.background.worker import Worker
from services.kit.celery import prepare_worker

settings = OptimizerSettings()  # type: ignore[call-arg]
async_url(settings.database_url)  # a worker without a database must not start: it would take every message for nothing
app = optimizer_celery(settings)
prepare_worker("optimizer-worker", settings)


@functools.cache
def _worker() -> Worker:
    """Return this process's worker; made by the first task, after the pool has forked."""
    engine = create_engine(settings.database_url, pool_size=1, application_name="optimizer-worker")
    return solve_worker(engine, settings.lease_s)


@app.task(name=TASK)
def solve(solve_id: str) -> None:
    """Solve the solve of that id; safe to run twice."""
    _worker().run(solve_id)
