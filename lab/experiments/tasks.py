"""The task of an experiment's cells, which the simulator's worker finds by the entry point ``wattshift.tasks``."""

from __future__ import annotations

import functools

from celery import Celery

from lab.experiments import remote
from lab.experiments.remote import CellWorker, connect_blocking
from services.simulator.settings import SimulatorSettings


def add_tasks(app: Celery, settings: SimulatorSettings) -> None:
    """Add the task to a worker's app; its Redis connection is made by the first task, after the pool has forked."""

    @functools.cache
    def worker() -> CellWorker:
        return CellWorker(connect_blocking(settings), lease_s=settings.lease_s)

    @app.task(name=remote.TASK, soft_time_limit=remote.LONGEST_S, time_limit=remote.LONGEST_S + 60)
    def run_cells(name: str) -> None:
        """Run the cells of an experiment's task of that name; safe to run twice."""
        worker().run(name)
