"""The workers: ``python -m celery -A optimizer_service.tasks worker -Q optimizer,lengths --concurrency 1``.

The solves that plans of pools await (``-Q plan-solves``) have workers of their own.
"""

import functools

from optimizer_service.length_model import training_worker
from optimizer_service.queue import LIMITS, QUEUE, TASK, TRAINING_LIMITS, TRAINING_TASK
from optimizer_service.settings import OptimizerSettings
from optimizer_service.worker import solve_worker
from services.db.database import plain_url
from services.db.engine import create_engine
from services.kit.background.worker import Worker
from services.kit.celery import create_celery, prepare_worker
from services.kit.settings import settings_or_exit

settings = settings_or_exit(OptimizerSettings, database=True)
plain_url(settings.database_url)  # a worker without a database must not start: it would take every message for nothing
app = create_celery(QUEUE, settings, LIMITS)
prepare_worker("optimizer-worker", settings, app)


@functools.cache
def _worker() -> Worker:
    """Return this process's worker, made by the first task, after the pool has forked."""
    engine = create_engine(settings.database_url, pool_size=1, application_name="optimizer-worker")
    return solve_worker(engine, settings.lease_s)


@functools.cache
def _trainer() -> Worker:
    engine = create_engine(settings.database_url, pool_size=1, application_name="optimizer-worker")
    return training_worker(engine, settings)


@app.task(name=TASK)
def solve(solve_id: str) -> None:
    """Solve the solve with this id, or another one whose tenant is next; safe to run twice."""
    _worker().run(solve_id)


@app.task(name=TRAINING_TASK, soft_time_limit=TRAINING_LIMITS.soft_s, time_limit=TRAINING_LIMITS.hard_s)
def train_lengths(training_id: str) -> None:
    """Train the job length model with this id; safe to run twice."""
    _trainer().run(training_id)
