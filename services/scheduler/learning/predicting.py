"""Each job's length is predicted once, when the scheduler first sees the job, and kept with the model's version.

A prediction is a look-up in a table that the optimizer's worker trains; this process needs no scikit-learn. Whatever is
wrong with the model, rounds go on: with the last one that could be read, or as if every group were new. The length
predicted for a new group is 0, so that a policy that orders by length runs its first job at once and learns from it.

Source: A-SRPT section IV-C, 3.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from services.contracts.engines import ENGINE_LABEL
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import GROUP_VERSION, job_group
from services.db.database import Database
from services.kit.logging import Log
from services.learning.length_table import LengthTable
from services.scheduler.repository import predictions
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import SpecRow

log = Log(__name__)


class Predicting:
    """Predicts with the model in force, which it reads again whenever another one takes its place."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen_id: str | None = None
        self._model_id: str | None = None
        self._table: LengthTable | None = None

    async def refresh(self) -> None:
        """Read the model in force, if it is not the one read before."""
        async with self._database.connection() as connection:
            active = await connection.fetchval(predictions.ACTIVE, GROUP_VERSION)
            if active == self._seen_id:
                return
            content = None if active is None else await connection.fetchval(predictions.CONTENT, active)
        self._seen_id = active
        try:
            table = None if content is None else await asyncio.to_thread(LengthTable.from_bytes, content)
        except DomainError as error:  # the one before goes on serving
            log.error("lengths.unreadable", model=active, error=str(error))
            return
        self._model_id, self._table = active, table
        log.info("lengths.in_force", model=active, groups=0 if table is None else len(table.groups))

    def predict(self, rows: Sequence[SpecRow]) -> Predictions:
        hashed = [job_group(row.tenant_id, row.spec) for row in rows]
        group, user = (np.array([pair[at] for pair in hashed], dtype=np.int64) for at in (0, 1))
        table, n_jobs = self._table, len(rows)
        examples = np.zeros(n_jobs, dtype=np.int64)
        quantiles: list[list[float | None]] = [[None] * 3] * n_jobs
        if table is None:
            gpu_s, spread, seen = np.zeros(n_jobs), np.zeros(n_jobs), np.zeros(n_jobs, dtype=np.bool_)
        else:
            predicted = table.predict(group, user)
            gpu_s, spread, seen = predicted.amount, predicted.spread, predicted.seen
            if table.groups.size:
                at, _ = table.places(group)
                examples = np.where(seen, table.examples[at], 0)
                known = zip(table.quantiles[at].tolist(), seen.tolist(), strict=True)
                quantiles = [values if is_known else [None] * 3 for values, is_known in known]
        limits = np.array([_limit_gpu_s(row) for row in rows])
        gpu_s = np.where(seen | np.isnan(limits), gpu_s, limits)
        low, median, high = ([values[at] for values in quantiles] for at in range(3))
        return Predictions(
            job_id=[row.id for row in rows],
            group_id=group.tolist(),
            user_id=user.tolist(),
            gpu_s=gpu_s.tolist(),
            spread_gpu_s=spread.tolist(),
            seen=seen.tolist(),
            examples=examples.tolist(),
            low_gpu_s=low,
            median_gpu_s=median,
            high_gpu_s=high,
        )

    async def keep(self, new: Predictions) -> None:
        """Store predictions; those that another scheduler has already stored stand."""
        if new.job_id:
            await self._database.run(predictions.keep, GROUP_VERSION, self._model_id, new)


def _limit_gpu_s(row: SpecRow) -> float:
    """Return the GPU seconds that the time limit of an engine's job permits; NaN for other jobs and without a limit.

    Users of an engine must say how long a job may take, and nothing else is known about a new kind of job.
    """
    spec = row.spec
    if ENGINE_LABEL not in (spec.get("labels") or {}) or not spec.get("time_limit_s"):
        return float("nan")
    return float(spec["time_limit_s"]) * spec["gpus"]["min"]


def remaining_s(gpu_s: Floats, progress: Floats, attained_gpu_s: Floats, min_gpus: Floats) -> Floats:
    """Return how much longer jobs need on their smallest gang, seconds, if twice the GPUs halve the time: (n_jobs,).

    Args:
        gpu_s: GPU seconds predicted for the whole job; NaN where nothing is.
        progress: Share of the work that is done; NaN where none is reported, so that ``attained_gpu_s`` counts instead.
        attained_gpu_s: GPU seconds that the job has held its GPUs for.
    """
    left = np.where(np.isnan(progress), gpu_s - attained_gpu_s, gpu_s * (1.0 - progress))
    return np.maximum(left, 0.0) / min_gpus
