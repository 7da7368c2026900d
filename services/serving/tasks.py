"""The planning workers: ``python -m celery -A services.serving.tasks worker -Q plans --concurrency 1``."""

from __future__ import annotations

import functools

from services.db.engine import async_url, create_engine
from services.kit.background.worker import Worker
from services.kit.celery import prepare_worker
from services.serving.queue import TASK, plan_celery
from services.serving.settings import ServingSettings
from services.serving.worker import plan_worker

settings = ServingSettings()  # type: ignore[call-arg]
async_url(settings.database_url)  # a worker without a database must not start: it would take every message for nothing
app = plan_celery(settings)
prepare_worker("planner-worker", settings)


@functools.cache
def _planner() -> Worker:
    """Return this process's worker; made by the first task, after the pool has forked."""
    return plan_worker(create_engine(settings.database_url, pool_size=1, application_name="planner-worker"), settings)


@app.task(name=TASK)
def plan_pool(plan_id: str) -> None:
    """Make the plan of a pool that has that id; safe to run twice."""
    _planner().run(plan_id)
