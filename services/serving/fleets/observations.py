"""What routers saw of applications' requests: stored, kept for some days, and added up."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from services.contracts.apps import LATENCY_BOUNDS_MS, AppObservations
from services.serving.repository import ServingRepository
from services.serving.repository.apps import Observed


def percentile_ms(latency: Mapping[int, int], share: float) -> float | None:
    """Return a percentile of latency, at most 5 % off; None without answers.

    Args:
        latency: Numbers of answers by the index of their bucket of ``LATENCY_BOUNDS_MS``.
        share: The share of answers that are no slower, 0 to 1.
    """
    total = sum(latency.values())
    if not total:
        return None
    seen = 0
    for bucket in sorted(latency):
        seen += latency[bucket]
        if seen >= share * total:
            if bucket >= len(LATENCY_BOUNDS_MS):
                return LATENCY_BOUNDS_MS[-1]
            lower = LATENCY_BOUNDS_MS[bucket - 1] if bucket else 0.0
            return (lower + LATENCY_BOUNDS_MS[bucket]) / 2
    return None


def bucket_of(latency_ms: float) -> int:
    """Return the index of the bucket that a latency falls into."""
    return bisect_left(LATENCY_BOUNDS_MS, latency_ms)


def sparse(counts: Sequence[int]) -> dict[str, int]:
    """Return a histogram without its empty buckets."""
    return {str(bucket): count for bucket, count in enumerate(counts) if count}


class Observations:
    """Stores what routers saw."""

    def __init__(self, repository: ServingRepository) -> None:
        self._repository = repository

    async def report(self, report: AppObservations) -> None:
        """Write a report; applications that are gone are left out, and a window that is sent again is replaced."""
        ids = {server.server for each in report.apps for server in each.servers}
        async with self._repository.writing() as queries:
            known = {app.name: app for app in await queries.apps.routed()}
            modes = await queries.apps.modes_of(ids)
            rows: list[Observed] = []
            for each in sorted(report.apps, key=lambda each: each.app):
                app = known.get(each.app)
                if app is None:
                    continue
                accuracy = {variant.name: variant.accuracy_pct for variant in app.spec.variants}
                variants: dict[str, int] = {}
                accuracy_sum = 0.0
                for server in each.servers:
                    owner, variant = modes.get(server.server, ("", ""))
                    if owner == app.name and variant in accuracy and server.answered:
                        variants[variant] = variants.get(variant, 0) + server.answered
                        accuracy_sum += server.answered * accuracy[variant]
                rows.append(
                    Observed(
                        app=app.name,
                        start_at=report.start_at,
                        router=report.router,
                        arrivals=each.arrivals,
                        answered=sum(variants.values()),
                        failed=each.failed,
                        waiting=each.waiting,
                        latency=sparse(each.latency),
                        variants=variants,
                        servers=[server.model_dump(mode="json") for server in each.servers],
                        accuracy_sum=accuracy_sum,
                    )
                )
            if rows:
                await queries.apps.observe(rows)
