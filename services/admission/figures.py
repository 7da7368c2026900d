"""What admission shows at ``/metrics``: submissions as they are committed, budgets, webhooks, the database's disk."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.budgets import BudgetRepository
from services.admission.repository.webhooks import WebhookRepository
from services.db.figures import pool_of
from services.kit.disk import DiskWatch
from services.kit.metrics import Metrics, counter, gauge, histogram, single

SUBMISSIONS = counter(
    "wattshift_submissions_total", "Submissions, of single jobs and of batches, by the answer's status.", ["status"]
)
COMMITS = histogram("wattshift_submission_commit_duration_seconds", "Time that a commit of submissions took.")


def show_figures(metrics: Metrics, engine: AsyncEngine, disk: DiskWatch) -> None:
    """Register the metrics of what admission owns."""

    async def read_budgets() -> Iterable[Metric]:
        async with engine.connect() as connection:
            found = await BudgetRepository(connection).all()
        names = [((each.tenant_id, each.project or "", each.quantity.value), each) for each in found]
        by = ("tenant", "project", "quantity")
        return [
            gauge(
                "wattshift_budget_used_ratio",
                "Used part of the month's budget; above 1 it is exceeded. Without a project it is of the whole tenant.",
                by,
                [(labels, each.used / each.amount if each.amount else None) for labels, each in names],
            ),
            gauge(
                "wattshift_budget_exceeded",
                "1 for a budget that is used up.",
                by,
                [(labels, float(each.exceeded)) for labels, each in names],
            ),
        ]

    async def read_webhooks() -> Iterable[Metric]:
        async with engine.connect() as connection:
            due = await WebhookRepository(connection).waiting()
        return [single("wattshift_webhook_messages", "Messages to webhooks that are not delivered yet.", due)]

    async def read_disk() -> Iterable[Metric]:
        space = disk.space()
        return [
            single(
                "wattshift_database_disk_free_bytes",
                "What may still be written to the database's disk; none where it is not on this host.",
                space and space.free_bytes,
            ),
            single(
                "wattshift_database_disk_reserve_bytes",
                "Below so much free space nothing new is accepted.",
                space and space.reserve_bytes,
            ),
        ]

    metrics.add("budgets", read_budgets)
    metrics.add("webhooks", read_webhooks)
    metrics.add("disk", read_disk)
    metrics.add("database", pool_of(engine))
