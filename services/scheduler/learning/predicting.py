"""What is foretold of jobs' lengths: once, when the scheduler first sees a job, and kept with the model's version.

A look-up in a table that the optimizer's worker trains; this process needs no scikit-learn. Whatever is wrong with the
model, rounds go on: with the last one that could be read, or as if every group were new. A new group is foretold 0, so
that a policy by length runs it at once and learns of it.

Source: A-SRPT section IV-C, 3.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.profiles.job_group import GROUP_VERSION, job_group
from services.db.database import Database
from services.kit.logging import Log
from services.learning.length_table import LengthTable

log = Log(__name__)

ACTIVE = "SELECT id, group_version FROM length_models WHERE is_active"

CONTENT = "SELECT content FROM length_models WHERE id = $1"

KEEP = """
INSERT INTO job_predictions (job_id, group_version, group_id, user_id, predicted_at, model_id,
                             gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s)
SELECT job_id, $1, group_id, user_id, now(), $2,
       gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s
  FROM unnest($3::text[], $4::bigint[], $5::bigint[], $6::float8[], $7::float8[], $8::bool[], $9::int[], $10::float8[],
              $11::float8[], $12::float8[])
    AS told (job_id, group_id, user_id, gpu_s, spread_gpu_s, seen, examples, low_gpu_s, median_gpu_s, high_gpu_s),
       set_config('synchronous_commit', 'off', true) AS not_waited_for
ON CONFLICT (job_id) DO NOTHING
"""
"""Not waited for until it is on disk, which was most of the time it took: what a crash of the database loses is
foretold again when the scheduler next sees the job."""


@dataclass(frozen=True)
class Told:
    """What is foretold of some jobs; every column is (n_jobs,).

    Attributes:
        job_ids: Which.
        columns: As ``KEEP`` takes them.
        gpu_s: GPU seconds, 0 of a group that is new.
    """

    job_ids: list[str]
    columns: tuple[list[Any], ...]
    gpu_s: list[float]


class Predicting:
    """Foretells with the model in force, which it reads when another one comes into force."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seen_id: str | None = None
        self._model_id: str | None = None
        self._table: LengthTable | None = None

    async def refresh(self) -> None:
        """Read the model in force, if it is another than before."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(ACTIVE)
            active = None if row is None or row["group_version"] != GROUP_VERSION else row["id"]
            if active == self._seen_id:
                return
            content = None if active is None else await connection.fetchval(CONTENT, active)
        self._seen_id = active
        try:
            table = None if content is None else await asyncio.to_thread(LengthTable.from_bytes, content)
        except DomainError as error:  # the one before goes on serving
            log.error("lengths.unreadable", model=active, error=str(error))
            return
        self._model_id, self._table = active, table
        log.info("lengths.in_force", model=active, groups=0 if table is None else len(table.groups))

    def tell(self, rows: Sequence[Any]) -> Told:
        """Return what is foretold of jobs, given as rows with ``id``, ``tenant_id`` and ``spec``."""
        hashed = [job_group(row["tenant_id"], row["spec"]) for row in rows]
        group, user = (np.array([pair[at] for pair in hashed], dtype=np.int64) for at in (0, 1))
        table, n_jobs = self._table, len(rows)
        examples = np.zeros(n_jobs, dtype=np.int64)
        quantiles: list[list[float | None]] = [[None] * 3] * n_jobs
        if table is None:
            gpu_s, spread, seen = np.zeros(n_jobs), np.zeros(n_jobs), np.zeros(n_jobs, dtype=np.bool_)
        else:
            told = table.predict(group, user)
            gpu_s, spread, seen = told.amount, told.spread, told.seen
            if table.groups.size:
                at, _ = table.places(group)
                examples = np.where(seen, table.examples[at], 0)
                known = zip(table.quantiles[at].tolist(), seen.tolist(), strict=True)
                quantiles = [values if is_known else [None] * 3 for values, is_known in known]
        ids = [row["id"] for row in rows]
        columns = [ids, *(each.tolist() for each in (group, user, gpu_s, spread, seen, examples))]
        columns += [[values[at] for values in quantiles] for at in range(3)]
        return Told(ids, tuple(columns), gpu_s.tolist())

    async def keep(self, told: Told) -> None:
        """Store what was foretold; what another scheduler has stored before stands."""
        if told.job_ids:
            async with self._database.connection() as connection:
                await connection.execute(KEEP, GROUP_VERSION, self._model_id, *told.columns)


def remaining_s(gpu_s: Floats, progress: Floats, attained_gpu_s: Floats, min_gpus: Floats) -> Floats:
    """Return what jobs still need on their smallest gang, seconds, if twice the GPUs take half the time: (n_jobs,).

    Args:
        gpu_s: Foretold for the whole job; NaN where nothing is.
        progress: Share of the work that is done; NaN where none is reported, then what it has held its GPUs for counts.
        attained_gpu_s: That, GPU seconds.
        min_gpus: Size of the smallest gang.
    """
    left = np.where(np.isnan(progress), gpu_s - attained_gpu_s, gpu_s * (1.0 - progress))
    return np.maximum(left, 0.0) / min_gpus
