"""The queue of plans, with workers of its own: a solve of minutes must not make plans late."""

from __future__ import annotations

from celery import Celery

from services.kit.celery import TaskLimits, create_celery
from services.serving.settings import ServingSettings

QUEUE = "plans"
TASK = "pools.plan"


def plan_celery(settings: ServingSettings) -> Celery:
    """Return the Celery app that plans are published with and workers work for."""
    longest_s = settings.plan_lead_s + settings.plan_late_s  # past its deadline a plan is of no use
    return create_celery(QUEUE, settings, TaskLimits(soft_s=longest_s + 30, hard_s=longest_s + 60))
