"""The queue of solves."""

from __future__ import annotations

from celery import Celery

from optimizer_service.settings import OptimizerSettings
from services.contracts.solver import MAX_SOLVER_TIME_S
from services.kit.celery import TaskLimits, create_celery

QUEUE = "optimizer"
TASK = "optimizer.solve"
# A solve may run its solver twice (an infeasible problem's shortfall is a solve of its own).
LIMITS = TaskLimits(soft_s=2 * MAX_SOLVER_TIME_S + 60, hard_s=2 * MAX_SOLVER_TIME_S + 120)


def optimizer_celery(settings: OptimizerSettings) -> Celery:
    """Return the Celery app that the service publishes with and the workers work for."""
    return create_celery(QUEUE, settings, LIMITS)
