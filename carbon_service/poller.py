"""Keeps the store up to date: one task per source fetches values, fills gaps after downtime, and survives outages."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

from carbon_service.providers.protocol import DAY_S, ExpectsGeneration, Point, ProviderError
from carbon_service.repository import Repository
from carbon_service.settings import Settings
from carbon_service.zones import Source
from services.core.domain.signal import impossible
from services.kit.logging import Log

log = Log(__name__)

PRUNE_INTERVAL_S = 600.0
EXPECTED_INTERVAL_S = 1800.0  #: Forecasts of wind and sun come once a day, each country's at an hour of its own
LONGEST_BACKOFF_S = 900.0
POINTS_PER_BATCH = 20_000


class Poller:
    """Polls sources. ``poll`` polls one source once; ``run`` repeats it until cancelled."""

    def __init__(self, repository: Repository, settings: Settings, now_s: Callable[[], float]) -> None:
        self._repository, self._settings, self._now_s = repository, settings, now_s
        self._due_s: dict[tuple[str, Source], float] = {}

    async def run(self, source: Source) -> None:
        """Poll one source until cancelled; errors are logged, and it is polled again."""
        failures = 0
        while True:
            wait_s = source.feed.poll_interval_s
            try:
                await self.poll(source)
                failures = 0
            except ProviderError as error:
                failures += 1
                wait_s = min(wait_s * 2 ** min(failures - 1, 10), max(wait_s, LONGEST_BACKOFF_S))
                wait_s = max(wait_s, min(error.retry_after_s, DAY_S))
                log.warning("source.failed", **vars(source.key), error=str(error), failures=failures)
            except Exception:
                # The database is away, or we have a bug: this zone goes stale, says so, and the next turn tries again.
                failures += 1
                source.last_error = "it could not be asked, or its answer not be stored; the service's log says why"
                log.exception("source.poll_failed", **vars(source.key), failures=failures)
            await asyncio.sleep(wait_s * random.uniform(0.9, 1.0))

    async def poll(self, source: Source) -> None:
        """Fetch what is new and drop what is too old; after a ``ProviderError``, what came before it is stored."""
        try:
            await self._poll_history(source)
            source.last_success_s = self._now_s()
            await self._poll_forecast(source)
            await self._poll_expected(source)
            source.last_error = None
        except ProviderError as error:
            source.last_error = str(error)
            raise
        finally:
            source.polled = True
        if self._now_s() >= self._due_s.get(("prune", source), 0.0):
            self._due_s["prune", source] = self._now_s() + PRUNE_INTERVAL_S
            await self._prune(source)

    async def _poll_history(self, source: Source) -> None:
        now_s, feed, key, settings = self._now_s(), source.feed, source.key, self._settings
        known_until_s = await self._repository.known_until_s(key)
        oldest_s = now_s - min(feed.history_s, settings.retention_s, settings.max_points * feed.step_s)
        if known_until_s is None:
            start_s = max(oldest_s, now_s - settings.backfill_s / feed.time_scale)
        else:
            start_s = max(oldest_s, min(known_until_s, now_s) - feed.revision_s)
            if not feed.revision_s:
                start_s = max(start_s, known_until_s)
        knows_now = known_until_s is not None and known_until_s > now_s
        batch_s = POINTS_PER_BATCH * feed.step_s
        while start_s < now_s + feed.ahead_s:
            until_s = min(start_s + batch_s, now_s + feed.ahead_s)
            found = await source.provider.history(key.zone, key.signal, start_s, until_s)
            saved = await self._save(source, found.points, found.skipped, known_until_s)
            knows_now = knows_now or any(point.start_s <= now_s < point.end_s for point in saved)
            start_s = until_s
        if not knows_now:
            newest = await source.provider.latest(key.zone, key.signal)
            await self._save(source, newest.points, newest.skipped, known_until_s)

    async def _save(
        self, source: Source, points: tuple[Point, ...], skipped: int, known_until_s: float | None
    ) -> list[Point]:
        """Store and return the points that have a plausible value and do not lie in an impossible future."""
        feed, now_s = source.feed, self._now_s()
        # A clock gone wrong at the provider must not make us believe that all is known until the year 9999.
        latest_start_s = now_s + feed.ahead_s + feed.step_s
        kept = [point for point in possible(points, source) if point.start_s <= latest_start_s]
        source.skipped_values += skipped + len(points) - len(kept)
        if not feed.revision_s and known_until_s is not None:
            kept = [replace(p, start_s=max(p.start_s, known_until_s)) for p in kept if p.end_s > known_until_s]
        if kept:
            await self._repository.save_points(source.key, kept, now_s)
        return kept

    async def _poll_forecast(self, source: Source) -> None:
        now_s, feed, key = self._now_s(), source.feed, source.key
        if feed.forecast_interval_s is None or now_s < self._due_s.get(("forecast", source), 0.0):
            return
        for issue in await source.provider.forecast(key.zone, key.signal, feed.horizon_s):
            points = possible(issue.points, source)
            source.skipped_values += issue.skipped + len(issue.points) - len(points)
            if points:
                await self._repository.save_forecast(key, replace(issue, points=tuple(points)), now_s)
        # Slightly early, so that a poll that comes a moment before its time does not put the forecast off by a turn.
        self._due_s["forecast", source] = now_s + 0.9 * feed.forecast_interval_s

    async def _poll_expected(self, source: Source) -> None:
        """Keep the day-ahead forecasts of wind and sun as far back as values; forecasts do without what is missing."""
        now_s, feed, key, provider = self._now_s(), source.feed, source.key, source.provider
        if not isinstance(provider, ExpectsGeneration) or now_s < self._due_s.get(("expected", source), 0.0):
            return
        self._due_s["expected", source] = now_s + EXPECTED_INTERVAL_S
        known_until_s = await self._repository.expected_until_s(key)
        oldest_s = now_s - min(feed.history_s, self._settings.retention_s, self._settings.backfill_s)
        start_s = oldest_s if known_until_s is None else max(oldest_s, min(known_until_s, now_s) - DAY_S)
        try:
            found = await provider.expected(key.zone, start_s, now_s + 2 * DAY_S)
        except ProviderError as error:
            log.warning("source.expected_failed", **vars(source.key), error=str(error))
            return
        await self._repository.save_expected(key, found, now_s)

    async def _prune(self, source: Source) -> None:
        settings = self._settings
        before_s = self._now_s() - settings.retention_s
        gone = await self._repository.prune(source.key, before_s, settings.max_points, settings.max_forecasts)
        if gone:
            log.info("source.pruned", **vars(source.key), rows=gone)


def possible(points: tuple[Point, ...], source: Source) -> list[Point]:
    """Return the points whose value is plausible for a grid."""
    return [point for point in points if not impossible(point.gco2_per_kwh, 1.0, source.key.signal)]
