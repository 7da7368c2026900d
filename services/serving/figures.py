"""What serving shows at ``/metrics``: instances, the age of plans, and which variants answer for applications."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from sqlalchemy.ext.asyncio import AsyncEngine

from services.db.background import WorkRepository
from services.db.figures import pool_of, work_of
from services.kit.metrics import Metrics, gauge
from services.serving.instances import APP_PREFIX
from services.serving.repository.figures import read


def show_figures(metrics: Metrics, engine: AsyncEngine, plans: WorkRepository) -> None:
    """Register all metrics that serving owns."""

    async def read_serving() -> Iterable[Metric]:
        found = await read(engine)
        of_pools = [each for each in found.instances if not each.name.startswith(APP_PREFIX)]
        of_apps = [each for each in found.instances if each.name.startswith(APP_PREFIX)]
        answers = Counter[str]()
        for mix in found.mixes:
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
                [((each.name,), each.plan_age_s) for each in found.pools],
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
                [((m.app, m.variant), m.answers / answers[m.app] if answers[m.app] else None) for m in found.mixes],
            ),
            gauge(
                "wattshift_app_accuracy_ratio",
                "Mean accuracy of an application's answers in the last five minutes, as its variants state it.",
                ["app"],
                [((each.app,), None if each.accuracy is None else each.accuracy / 100) for each in found.apps],
            ),
            gauge(
                "wattshift_app_arrivals_per_second",
                "Requests to an application per second, over the last five minutes.",
                ["app"],
                [((each.app,), each.arrivals_per_s) for each in found.apps],
            ),
        ]

    metrics.add("serving", read_serving)
    metrics.add("work", work_of({"pool_plan": plans}))
    metrics.add("database", pool_of(engine))
