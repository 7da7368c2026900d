"""The figures of serving's ``/metrics`` that come from its tables."""

from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

INSTANCES = text("""
SELECT pool AS name, mode, state, count(*) AS instances FROM pool_instances WHERE state <> 'ended' GROUP BY 1, 2, 3
""")

POOLS = text("""
SELECT name, extract(epoch FROM now() - planned_at)::float8 AS plan_age_s FROM pools WHERE deleted_at IS NULL
""")

# The last five minutes, which one index has, as routers report every five seconds.
SEEN = text("""
SELECT app, sum(arrivals)::float8 / 300 AS arrivals_per_s,
       sum(accuracy_sum) / nullif(sum(answered), 0) AS accuracy
  FROM app_observations WHERE start_at >= now() - interval '5 minutes' GROUP BY app
""")

MIXES = text("""
SELECT app, variant, sum(count::int)::int AS answers
  FROM app_observations, jsonb_each_text(variants) AS of(variant, count)
 WHERE start_at >= now() - interval '5 minutes' GROUP BY app, variant
""")


class Instances(NamedTuple):
    """Instances of a pool, or of an app, by the mode or variant that they run and by state."""

    name: str
    mode: str
    state: str
    instances: int


class PlannedPool(NamedTuple):
    """A pool and how old its plan is, seconds; None without one."""

    name: str
    plan_age_s: float | None


class SeenApp(NamedTuple):
    """Requests per second to an application in the last minutes, and the mean accuracy of its answers."""

    app: str
    arrivals_per_s: float
    accuracy: float | None


class Mix(NamedTuple):
    """Answers of a variant in the last minutes."""

    app: str
    variant: str
    answers: int


class Figures(NamedTuple):
    """All figures."""

    instances: list[Instances]
    pools: list[PlannedPool]
    apps: list[SeenApp]
    mixes: list[Mix]


async def read(engine: AsyncEngine) -> Figures:
    async with engine.connect() as connection:
        return Figures(
            [Instances(*row) for row in await connection.execute(INSTANCES)],
            [PlannedPool(*row) for row in await connection.execute(POOLS)],
            [SeenApp(*row) for row in await connection.execute(SEEN)],
            [Mix(*row) for row in await connection.execute(MIXES)],
        )
