"""What a process's connections to the database are doing, for its ``/metrics``."""

from collections.abc import Awaitable, Callable, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import QueuePool

from services.db.background import WorkRepository
from services.db.database import Database


def _pool(in_use: int, idle: int, most: int) -> list[Metric]:
    connections = GaugeMetricFamily(
        "wattshift_database_pool_connections", "Connections to the database that are open.", labels=["state"]
    )
    connections.add_metric(["in_use"], in_use)
    connections.add_metric(["idle"], idle)
    return [
        connections,
        GaugeMetricFamily("wattshift_database_pool_limit", "Connections that may be open at once.", value=most),
    ]


def pool_of(source: Database | AsyncEngine) -> Callable[[], Awaitable[list[Metric]]]:
    """Return a function that reads the state of a process's connections."""

    async def read() -> list[Metric]:
        if isinstance(source, Database):
            return _pool(*source.connections_now())
        pool = source.pool
        assert isinstance(pool, QueuePool)
        return _pool(pool.checkedout(), pool.checkedin(), 2 * pool.size())  # ``create_engine`` lets it grow to that

    return read


def work_of(repositories: Mapping[str, WorkRepository]) -> Callable[[], Awaitable[list[Metric]]]:
    """Return a function that reads how much work of each kind waits for workers, and how much is in progress.

    Celery's workers answer no requests: what they do is in the rows that they claim.
    """

    async def read() -> list[Metric]:
        tasks = GaugeMetricFamily(
            "wattshift_background_tasks", "Work that workers have or that waits for them.", labels=["kind", "state"]
        )
        oldest = GaugeMetricFamily(
            "wattshift_background_longest_wait_seconds",
            "How long the work has waited that has done so for longest; 0 while none waits.",
            labels=["kind"],
        )
        for kind, repository in repositories.items():
            found = await repository.live()
            tasks.add_metric([kind, "queued"], found.queued)
            tasks.add_metric([kind, "running"], found.running)
            oldest.add_metric([kind], found.longest_wait_s)
        return [tasks, oldest]

    return read
