"""Queries on trainings, on the history that they learn from, and on the models that they produce."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
import numpy as np
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.serving import PLANNER
from services.core.domain.arrays import Floats
from services.core.domain.errors import DomainError
from services.core.profiles.recurrence import GROUP_VERSION, Runs, job_group
from services.db.background import WorkRepository
from services.db.database import connect
from services.db.lengths import HISTORY
from services.db.tables import length_trainings, solve_submissions, solves
from services.kit.logging import Log
from services.learning.length_table import LengthTable

log = Log(__name__)

DUE = text("""
SELECT max(j.ended_at) AS through, count(*) AS jobs
  FROM jobs j
 WHERE j.state = 'succeeded' AND j.spec -> 'service' IS NULL
   AND j.ended_at > coalesce((SELECT max((problem ->> 'through')::timestamptz) FROM length_trainings
                               WHERE state <> 'failed'), '-infinity')
   AND NOT EXISTS (SELECT FROM length_trainings
                    WHERE state IN ('queued', 'running') OR submitted_at > now() - make_interval(secs => :interval_s))
""")
"""The jobs that have succeeded since the last training; none while one is pending or was begun within the interval."""

PAGE = 20_000

SPECS = "SELECT id, tenant_id, spec FROM jobs WHERE id = ANY($1::text[])"

KEEP_GROUPS = """
INSERT INTO job_predictions (job_id, group_version, group_id, user_id)
SELECT job_id, $4, group_id, user_id
  FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS g (job_id, group_id, user_id)
ON CONFLICT (job_id) DO UPDATE
   SET group_version = excluded.group_version, group_id = excluded.group_id, user_id = excluded.user_id
"""

OLDEST = """
SELECT ended_at FROM jobs WHERE state = 'succeeded' AND ended_at <= $1 ORDER BY ended_at DESC, id DESC OFFSET $2 LIMIT 1
"""

ACTIVE = "SELECT id, through_at, group_version, content FROM length_models WHERE is_active"

STANDS = "SELECT true FROM length_trainings WHERE id = $1 AND state = 'running' AND claim = $2 FOR UPDATE"

STORE = """
INSERT INTO length_models (id, through_at, group_version, jobs, groups, evaluation, content)
VALUES ($1, $2, $3, $4, $5, $6, $7)
"""

MADE = "SELECT jobs, is_active AS active, evaluation FROM length_models WHERE id = $1"

PURGE = """
DELETE FROM length_models WHERE NOT is_active
   AND id NOT IN (SELECT id FROM length_models ORDER BY trained_at DESC, id DESC LIMIT $1)
"""


class TrainingRepository(WorkRepository):
    """Queries on trainings."""

    async def new_jobs(self, interval_s: float) -> tuple[datetime | None, int]:
        """Return when the last of the jobs ended that call for a new training, and how many they are.

        There are none while a training is pending or began within the interval.
        """
        async with self._engine.connect() as connection:
            row = (await connection.execute(DUE, {"interval_s": interval_s})).one()
        return row.through, row.jobs


def training_repository(engine: AsyncEngine) -> TrainingRepository:
    return TrainingRepository(engine, length_trainings, None, "training", ())


@asynccontextmanager
async def _connected(database_url: str) -> AsyncGenerator[asyncpg.Connection]:
    connection = await connect(database_url, application_name="length-history")
    try:
        yield connection
    finally:
        await connection.close()


async def read_history(database_url: str, through: datetime, max_jobs: int) -> tuple[Runs, Floats]:
    """Return the newest jobs that had succeeded by then, in the order of their ends, and those ends in UTC seconds.

    Jobs whose group is unknown, or of another version, get theirs here.
    """
    columns: tuple[list[int], list[int], list[float], list[float]] = ([], [], [], [])
    async with _connected(database_url) as connection:
        oldest = await connection.fetchval(OLDEST, through, max_jobs)
        after: tuple[datetime, str] = (oldest or datetime(1970, 1, 1, tzinfo=UTC), "~" if oldest else "")
        while True:
            rows = await connection.fetch(HISTORY, *after, through, PAGE)
            groups = await _grouped(connection, [row["id"] for row in rows if row["group_version"] != GROUP_VERSION])
            for row in rows:
                group, user = groups.get(row["id"], (row["group_id"], row["user_id"]))
                values = (group, user, row["gpu_s"], row["ended_at"].timestamp())
                for column, value in zip(columns, values, strict=True):
                    column.append(value)
            if len(rows) < PAGE:
                break
            after = (rows[-1]["ended_at"], rows[-1]["id"])
    group, user, gpu_s, ended_s = columns
    return (
        Runs(np.array(group, np.int64), np.array(user, np.int64), np.array(gpu_s, np.float64)),
        np.array(ended_s, np.float64),
    )


async def _grouped(connection: asyncpg.Connection, job_ids: list[str]) -> dict[str, tuple[int, int]]:
    """Compute and store the groups of these jobs."""
    if not job_ids:
        return {}
    rows = await connection.fetch(SPECS, job_ids)
    found = {row["id"]: job_group(row["tenant_id"], row["spec"]) for row in rows}
    groups, users = ([pair[at] for pair in found.values()] for at in (0, 1))
    await connection.execute(KEEP_GROUPS, list(found), groups, users, GROUP_VERSION)
    return found


async def read_made(database_url: str, model_id: str) -> dict[str, Any] | None:
    """Return the result of a training whose model already exists."""
    async with _connected(database_url) as connection:
        row = await connection.fetchrow(MADE, model_id)
    return None if row is None else dict(row)


async def read_in_force(database_url: str) -> tuple[LengthTable | None, float]:
    """Return the table in force, if it uses today's groups, and the end of its history in UTC seconds."""
    async with _connected(database_url) as connection:
        row = await connection.fetchrow(ACTIVE)
    if row is None or row["group_version"] != GROUP_VERSION:
        return None, 0.0
    try:
        return LengthTable.from_bytes(row["content"]), row["through_at"].timestamp()
    except DomainError as error:
        log.error("lengths.unreadable", id=row["id"], error=str(error))
        return None, 0.0


async def store_model(
    database_url: str, model_id: str, columns: Sequence[Any], claim: str | None, models_kept: int, *, is_better: bool
) -> bool:
    """Store a model, and put it in force if it is better, unless another worker has taken the training over.

    Args:
        model_id: That of its training.
        columns: The end of its history, the version of its groups, its jobs and groups, evaluation and content.
    """
    async with _connected(database_url) as connection, connection.transaction():
        if not await connection.fetchval(STANDS, model_id, claim):
            return False
        await connection.execute(STORE, model_id, *columns)
        if is_better:
            await connection.execute("UPDATE length_models SET is_active = false WHERE is_active")
            await connection.execute("UPDATE length_models SET is_active = true WHERE id = $1", model_id)
        await connection.execute(PURGE, models_kept)
    return True


OUTCOME_FIELDS = ("status", "solver", "objective", "bound", "gap", "note")

_SUMMARY = (
    solves.c.kind,
    solves.c.progress,
    solves.c.solve_s,
    *(solves.c.result[name].label(name) for name in OUTCOME_FIELDS),
)


def solve_repository(engine: AsyncEngine, *, of_plans: bool | None = None) -> WorkRepository:
    """Return the queries on solves; sweeping covers those that plans of pools await, all others, or all."""
    is_of_plan = solves.c.key_id == PLANNER.key_id
    swept = None if of_plans is None else is_of_plan if of_plans else ~is_of_plan
    return WorkRepository(engine, solves, solve_submissions, "solve", _SUMMARY, swept=swept, kind=is_of_plan)
