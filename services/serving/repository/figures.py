"""What serving shows at ``/metrics``: instances, the age of plans, and which variants answer for applications."""

from collections import Counter
from functools import partial

from prometheus_client.metrics_core import Metric
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.db.background import WorkRepository
from services.db.figures import pool_of, work_of
from services.kit.metrics import Metrics, gauge
from services.serving.instances import APP_PREFIX

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


def show_figures(metrics: Metrics, engine: AsyncEngine, plans: WorkRepository) -> None:
    """Register all metrics that serving owns."""
    metrics.add("serving", partial(_read, engine))
    metrics.add("work", work_of({"pool_plan": plans}))
    metrics.add("database", pool_of(engine))


async def _read(engine: AsyncEngine) -> list[Metric]:
    async with engine.connect() as connection:
        instances = (await connection.execute(INSTANCES)).all()
        pools = (await connection.execute(POOLS)).all()
        apps = (await connection.execute(SEEN)).all()
        mixes = (await connection.execute(MIXES)).all()
    of_pools = [each for each in instances if not each.name.startswith(APP_PREFIX)]
    of_apps = [each for each in instances if each.name.startswith(APP_PREFIX)]
    answers = Counter[str]()
    for mix in mixes:
        answers[mix.app] += mix.answers
    return [
        gauge(
            "wattshift_pool_instances",
            "Model servers of a pool, by the mode that they run in.",
            ["pool", "mode", "state"],
            [((each.name, each.mode, each.state), each.instances) for each in of_pools],
        ),
        gauge(
            "wattshift_pool_plan_age_seconds",
            "How old the plan is that a pool runs by; none before its first plan.",
            ["pool"],
            [((each.name,), each.plan_age_s) for each in pools],
        ),
        gauge(
            "wattshift_app_instances",
            "Instances of an application's variants.",
            ["app", "variant", "state"],
            [((each.name.removeprefix(APP_PREFIX), each.mode, each.state), each.instances) for each in of_apps],
        ),
        gauge(
            "wattshift_app_answers_ratio",
            "Share of an application's answers that a variant gave, in the last five minutes.",
            ["app", "variant"],
            [((m.app, m.variant), m.answers / answers[m.app] if answers[m.app] else None) for m in mixes],
        ),
        gauge(
            "wattshift_app_accuracy_ratio",
            "Mean accuracy of an application's answers in the last five minutes, as its variants state it.",
            ["app"],
            [((each.app,), None if each.accuracy is None else each.accuracy / 100) for each in apps],
        ),
        gauge(
            "wattshift_app_arrivals_per_second",
            "Requests to an application per second, over the last five minutes.",
            ["app"],
            [((each.app,), each.arrivals_per_s) for each in apps],
        ),
    ]
