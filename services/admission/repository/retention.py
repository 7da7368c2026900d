"""What is forgotten: jobs that ended long ago, idempotency keys and audit rows.

A small row is kept of each job, so that the totals of reports stay what they were. Everything is done in batches, each
in a transaction of its own, so that nobody waits for long.
"""

from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.db.job_rows import FORGET_RUNS
from services.kit.logging import Log

log = Log(__name__)

DAY_S = 86_400.0
BATCH = 1_000

# Tasks of an array go together, and nothing goes on which a job that has not ended depends.
_CHOOSE = text("""
SELECT j.id FROM jobs j
 WHERE j.ended_at < now() - make_interval(secs => CAST(:kept_s AS float8))
   AND (j.array_id IS NULL OR NOT EXISTS (
       SELECT FROM jobs o WHERE o.array_id = j.array_id
          AND coalesce(o.ended_at >= now() - make_interval(secs => CAST(:kept_s AS float8)), true)))
   AND NOT EXISTS (
       SELECT FROM job_dependencies d JOIN jobs o ON o.id = d.dependent_id OR o.array_id = d.dependent_id
        WHERE d.needs_id IN (j.id, j.array_id) AND o.ended_at IS NULL)
   AND NOT EXISTS (SELECT FROM live_gangs a WHERE a.job_id = j.id)
 ORDER BY j.ended_at, j.id LIMIT :batch FOR UPDATE OF j SKIP LOCKED
""")

_KEEP = text("""
INSERT INTO past_jobs (id, tenant_id, project, name, state, user_id, user_label, array_id, array_name, work_unit,
                       work_done)
SELECT j.id, j.tenant_id, j.project, j.name, j.state, j.user_id, j.labels ->> 'user', j.array_id, a.name,
       j.spec -> 'work' ->> 'unit', p.done
  FROM jobs j LEFT JOIN job_arrays a ON a.id = j.array_id LEFT JOIN reported_work p ON p.job_id = j.id
 WHERE j.id = ANY(CAST(:ids AS text[])) ON CONFLICT DO NOTHING
""")

_FORGET = [
    *map(text, FORGET_RUNS),
    text("DELETE FROM cell_jobs WHERE job_id = ANY(CAST(:ids AS text[]))"),
    text("DELETE FROM job_events WHERE job_id = ANY(CAST(:ids AS text[]))"),
    text("DELETE FROM job_dependencies WHERE dependent_id = ANY(CAST(:ids AS text[]))"),
    text("DELETE FROM jobs WHERE id = ANY(CAST(:ids AS text[]))"),
]

# Arrays that have no tasks left.
_FORGET_ARRAYS = text("""
WITH gone AS (
    DELETE FROM job_arrays a WHERE submitted_at < now() - make_interval(secs => CAST(:kept_s AS float8))
       AND NOT EXISTS (SELECT FROM jobs j WHERE j.array_id = a.id) RETURNING id
)
DELETE FROM job_dependencies d USING gone WHERE d.dependent_id = gone.id
""")

_FORGET_KEYS = text("DELETE FROM submissions WHERE created_at < now() - make_interval(secs => CAST(:kept_s AS float8))")

_FORGET_AUDIT = text("DELETE FROM audit_log WHERE at < now() - make_interval(secs => CAST(:kept_s AS float8))")


async def forget_jobs(connection: AsyncConnection, kept_s: float) -> int:
    """Forget one batch of the jobs that ended more than ``kept_s`` ago, oldest first; return how many."""
    found = await connection.execute(_CHOOSE, {"kept_s": kept_s, "batch": BATCH})
    ids = [row[0] for row in found]
    if not ids:
        return 0
    for statement in (_KEEP, *_FORGET):
        await connection.execute(statement, {"ids": ids})
    return len(ids)


class Kept(NamedTuple):
    """How long things are kept, days; 0: for ever."""

    jobs: float  #: Jobs, with all that happened to them, after their end
    keys: float  #: Idempotency keys
    audit: float  #: What operators and admins did


async def forget(engine: AsyncEngine, kept: Kept) -> int:
    """Forget everything past its time, as several processes may; return how many jobs were forgotten."""
    jobs = 0
    while kept.jobs:
        async with engine.begin() as connection:
            count = await forget_jobs(connection, kept.jobs * DAY_S)
        if not count:
            break
        jobs += count
    for statement, days in ((_FORGET_ARRAYS, kept.jobs), (_FORGET_KEYS, kept.keys), (_FORGET_AUDIT, kept.audit)):
        if days:
            async with engine.begin() as connection:
                await connection.execute(statement, {"kept_s": days * DAY_S})
    if jobs:
        log.info("jobs.forgotten", jobs=jobs)
    return jobs
