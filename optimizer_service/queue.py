"""The queue of solves: messages that carry an id. Losing one, or having it twice, costs time and nothing else."""

from __future__ import annotations

import asyncio

from celery import Celery
from redis.asyncio import Redis

from optimizer_service.settings import OptimizerSettings
from services.contracts.optimize import MAX_SOLVER_TIME_S
from services.kit.celery import TaskLimits, create_celery, queue_key
from services.kit.logging import Log

log = Log(__name__)

QUEUE = "optimizer"
TASK = "optimizer.solve"
# A solve may run its solver twice (an infeasible problem's shortfall is a solve of its own).
LIMITS = TaskLimits(soft_s=2 * MAX_SOLVER_TIME_S + 60, hard_s=2 * MAX_SOLVER_TIME_S + 120)
PUBLISH_WITHIN_S = 3.0


def optimizer_celery(settings: OptimizerSettings) -> Celery:
    """Return the Celery app that the service publishes with and the workers work for."""
    return create_celery(QUEUE, settings, LIMITS)


class SolveQueue:
    """The service's end of the queue."""

    def __init__(self, celery: Celery, redis: Redis) -> None:
        self._celery = celery
        self._redis = redis

    async def send(self, solve_id: str) -> bool:
        """Send a message for a solve that is committed, and return whether the broker took it.

        It never raises: the row is there, and the sweeper sends what was not sent.
        """
        try:
            # Celery publishes synchronously.
            sending = asyncio.to_thread(self._celery.send_task, TASK, args=[solve_id])
            await asyncio.wait_for(sending, PUBLISH_WITHIN_S)
        except Exception as error:
            log.warning("solve.not_enqueued", solve=solve_id, error=str(error) or type(error).__name__)
            return False
        return True

    async def waiting(self) -> int:
        """Return how many messages wait for a worker."""
        return int(await self._redis.llen(queue_key(QUEUE)))  # type: ignore[misc]  # redis-py types it for both worlds

    async def ping(self) -> None:
        """Return once the broker has answered."""
        await self._redis.ping()  # type: ignore[misc]
