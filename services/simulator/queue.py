"""The simulator's queue of what-if runs. Its worker also serves ``experiments`` if wattshift-lab is installed."""

from celery import Celery

from services.kit.celery import TaskLimits, create_celery
from services.simulator.settings import SimulatorSettings

QUEUE = "simulator"
TASK = "simulator.run"


def simulator_celery(settings: SimulatorSettings) -> Celery:
    limits = TaskLimits(soft_s=settings.max_run_s, hard_s=settings.max_run_s + 60)
    return create_celery(QUEUE, settings, limits)
