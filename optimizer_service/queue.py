"""The queues: of solves and of trainings, which the same workers serve, and of the solves that plans of pools wait for.

The latter have workers of their own, so that a solve that takes minutes does not make a plan late.
"""

from __future__ import annotations

from celery import Celery

from optimizer_service.settings import OptimizerSettings
from services.contracts.solver import MAX_SOLVER_TIME_S
from services.kit.celery import TaskLimits, create_celery

QUEUE = "optimizer"
TASK = "optimizer.solve"
PLAN_QUEUE = "plan-solves"
TRAINING_QUEUE = "lengths"
TRAINING_TASK = "lengths.train"
TRAINING_LIMITS = TaskLimits(soft_s=900, hard_s=960)
# A solve may run its solver twice (an infeasible problem's shortfall is a solve of its own).
LIMITS = TaskLimits(soft_s=2 * MAX_SOLVER_TIME_S + 60, hard_s=2 * MAX_SOLVER_TIME_S + 120)


def optimizer_celery(settings: OptimizerSettings, queue: str = QUEUE) -> Celery:
    """Return the Celery app that the service publishes solves with and the workers work for."""
    return create_celery(queue, settings, LIMITS)


def training_celery(settings: OptimizerSettings) -> Celery:
    """Return the Celery app that trainings are published with."""
    return create_celery(TRAINING_QUEUE, settings, TRAINING_LIMITS)
