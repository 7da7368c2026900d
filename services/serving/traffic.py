"""Traffic as routers report it: how many requests of each class arrived in each window of 5 seconds."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.problems import FieldError
from services.contracts.serving import PoolPartition, TrafficReceipt, TrafficReport, TrafficWindow
from services.core.domain.serving import CLASSES
from services.core.policies.freesh.classes import Thresholds
from services.kit.problems import ProblemError
from services.serving.repository import ServingRepository
from services.serving.repository.pools import Counts
from services.serving.settings import ServingSettings

EARLY_S = 60.0  #: How far a reporter's clock may be ahead
MAX_POINTERS = 50


class TrafficReports:
    """What routers report about the requests that arrived, kept for some days."""

    def __init__(self, repository: ServingRepository, settings: ServingSettings) -> None:
        self._repository, self._settings = repository, settings

    async def report(self, pool: str, report: TrafficReport, caller: Identity) -> TrafficReceipt:
        """Count a report's requests; they are flushed to disk on return, and a window reported again is replaced.

        Raises:
            ProblemError: 404 if there is no pool that the caller may see, 422 for windows too old or in the future.
        """
        windows = sorted(report.windows, key=lambda window: window.start_at)  # one order: reports never wait in a ring
        while True:
            async with self._repository.reading() as queries:
                known = await queries.pools.find(pool, caller)
                self._check(report.windows, await queries.now())
            # A large report takes a second: neither the event loop nor whoever wants the pool's row waits for it.
            counts = await asyncio.to_thread(count_requests, known.spec.partitions, windows)
            found = [(each.start_at, counted) for each, counted in zip(windows, counts, strict=True)]
            async with self._repository.writing() as queries:
                # The lock keeps the partitions as they are until their counts are written.
                locked = await queries.pools.find(pool, caller, "share")
                if (locked.revision, locked.created_at) == (known.revision, known.created_at):
                    await queries.traffic.replace(pool, report.source, found)
                    break
        return TrafficReceipt(windows=len(windows), requests=sum(len(window.requests) for window in windows))

    def _check(self, windows: Sequence[TrafficWindow], now: datetime) -> None:
        keep_days = self._settings.traffic_keep_days
        oldest, newest = now - timedelta(days=keep_days), now + timedelta(seconds=EARLY_S)
        wrong = [
            FieldError(
                pointer=f"/windows/{index}/start_at",
                detail=f"More than {keep_days:g} days ago." if window.start_at < oldest else "Not yet.",
            )
            for index, window in enumerate(windows)
            if not oldest <= window.start_at <= newest
        ]
        if wrong:
            detail = f"{len(wrong)} of {len(windows)} windows lie more than {keep_days:g} days back or in the future."
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, detail, errors=wrong[:MAX_POINTERS])


def count_requests(partitions: Sequence[PoolPartition], windows: Sequence[TrafficWindow]) -> list[Counts]:
    """Return each window's counts, by what partitions are counted as and by class; classes without any are left out.

    Every partition is named: a window that names one without counts says that no requests came, one that does not name
    it says nothing of it.
    """
    lengths = np.array([request for window in windows for request in window.requests], dtype=np.int64).reshape(-1, 2)
    window_of = np.repeat(np.arange(len(windows)), [len(window.requests) for window in windows])
    found: list[Counts] = [{} for _ in windows]
    for part in partitions:
        if part.thresholds is None:
            names, class_of = (part.classes[0].name,), np.zeros(len(lengths), np.int64)
        else:
            thresholds = Thresholds(part.thresholds.input_tokens, part.thresholds.output_tokens)
            names, class_of = CLASSES, thresholds.class_of(lengths[:, 0], lengths[:, 1])
        counted = np.bincount(window_of * len(names) + class_of, minlength=len(windows) * len(names))
        for counts, each in zip(found, counted.reshape(len(windows), len(names)).tolist(), strict=True):
            counts[part.counted_as] = {name: count for name, count in zip(names, each, strict=True) if count}
    return found
