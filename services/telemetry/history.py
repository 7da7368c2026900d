"""Past jobs as they ran: what an export holds and a replay begins with. Standing services are none of them."""

from __future__ import annotations

from services.contracts.queries import PastJobsQuery
from services.contracts.reports import PastJob, PastJobs
from services.db.database import Database
from services.kit.cursors import read_cursor, write_cursor

# Ids sort by the time of submission, so a page needs no sort and a cursor is an id.
_PAST_JOBS = """
SELECT j.id AS job_id, j.tenant_id AS tenant, j.project, j.state, j.submitted_at, j.started_at, j.ended_at,
    a.gpus, CASE WHEN j.ended_at IS NOT NULL THEN a.run_s END AS run_s,
    CASE WHEN j.ended_at IS NOT NULL THEN a.gpu_s END AS gpu_s, f.energy_j
FROM jobs j
LEFT JOIN LATERAL (
    SELECT (array_agg(gpus ORDER BY generation DESC))[1] AS gpus,
        sum(extract(epoch FROM ended_at - started_at))::float8 AS run_s,
        sum(gpus * extract(epoch FROM ended_at - started_at))::float8 AS gpu_s
    FROM allocations WHERE job_id = j.id
) a ON true
LEFT JOIN job_footprints f ON f.job_id = j.id
WHERE ($1::timestamptz IS NULL OR j.submitted_at >= $1) AND ($2::timestamptz IS NULL OR j.submitted_at < $2)
    AND ($3::text IS NULL OR j.tenant_id = $3) AND ($4::text IS NULL OR j.id > $4)
    AND j.spec -> 'service' IS NULL
ORDER BY j.id LIMIT $5
"""


async def past_jobs(database: Database, query: PastJobsQuery, tenant_id: str | None) -> PastJobs:
    """Return one page of the jobs submitted in a period, those that have not ended included.

    Args:
        database: Of the database.
        query: The period and the page.
        tenant_id: Whose; None is everybody's.

    Raises:
        ProblemError: 422 for a cursor that is not one.
    """
    after = read_cursor(query.cursor, r"[A-Za-z0-9_]{1,100}")
    async with database.connection() as connection:
        rows = await connection.fetch(_PAST_JOBS, query.start, query.end, tenant_id, after, query.limit + 1)
    items = [PastJob(**dict(row)) for row in rows[: query.limit]]
    return PastJobs(items=items, next_cursor=write_cursor(items[-1].job_id) if len(rows) > query.limit else None)
