"""The worker: ``python -m celery -A services.simulator.tasks worker -Q simulator,experiments --concurrency 1``."""

import functools
from collections.abc import Callable

from services.db.database import plain_url
from services.db.engine import create_engine
from services.kit.background.worker import Worker
from services.kit.celery import prepare_worker
from services.kit.plugins import PluginError, load_plugins
from services.kit.policies import load_policies
from services.kit.settings import exit_with, settings_or_exit
from services.simulator.queue import TASK, simulator_celery
from services.simulator.settings import SimulatorSettings
from services.simulator.worker import simulation_worker

settings = settings_or_exit(SimulatorSettings, database=True)
plain_url(settings.database_url)  # a worker without a database must not start: it would take every message for nothing
app = simulator_celery(settings)
try:
    load_policies()
    for plugin in load_plugins("wattshift.tasks", Callable):  # type: ignore[type-abstract]
        plugin.value(app, settings)  # the lab's experiments, on a queue of their own
except PluginError as error:
    exit_with(f"simulator worker: {error}")
prepare_worker("simulator-worker", settings, app)


@functools.cache
def _worker() -> Worker:
    """Return this process's worker; created by the first task, after the worker processes have been forked."""
    engine = create_engine(settings.database_url, pool_size=1, application_name="simulator-worker")
    return simulation_worker(engine, settings.lease_s)


@app.task(name=TASK)
def simulate(simulation_id: str) -> None:
    """Run the simulation with that id, or another one whose tenant is next; safe to run twice."""
    _worker().run(simulation_id)
