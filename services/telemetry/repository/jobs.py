"""Past jobs, the tenant of a job, and what a node needs to start one."""

from operator import itemgetter
from typing import Any, NamedTuple

from services.contracts.queries import PastJobsQuery
from services.contracts.reports import PastJob
from services.db.database import Database, Record
from services.db.rows import fetch_row
from services.kit.readable import Unread, messages_of

# Ids sort by the time of submission, so a page needs no sort and a cursor is an id.
PAST_JOBS = """
SELECT j.id AS job_id, j.tenant_id AS tenant, j.project, j.state, j.submitted_at, j.started_at, j.ended_at,
    a.gpus, CASE WHEN j.ended_at IS NOT NULL THEN a.run_s END AS run_s,
    CASE WHEN j.ended_at IS NOT NULL THEN a.gpu_s END AS gpu_s, f.energy_j,
    j.array_id AS array, c.max_running, CASE WHEN j.gated THEN (
        SELECT string_agg(DISTINCT d.needs_id, ' ' ORDER BY d.needs_id)
        FROM job_dependencies d WHERE d.dependent_id IN (j.id, j.array_id)) END AS after,
    j.spec -> 'gpus' ->> 'slice' AS slice
FROM jobs j LEFT JOIN job_arrays c ON c.id = j.array_id
LEFT JOIN LATERAL (
    SELECT (array_agg(gpus ORDER BY generation DESC))[1] AS gpus,
        sum(extract(epoch FROM ended_at - started_at))::float8 AS run_s,
        sum(gpus * extract(epoch FROM ended_at - started_at))::float8 AS gpu_s
    FROM gangs WHERE job_id = j.id
) a ON true
LEFT JOIN job_footprints f ON f.job_id = j.id
WHERE ($1::timestamptz IS NULL OR j.submitted_at >= $1) AND ($2::timestamptz IS NULL OR j.submitted_at < $2)
    AND ($3::text IS NULL OR j.tenant_id = $3) AND ($4::text IS NULL OR j.project = $4)
    AND ($5::text IS NULL OR j.id > $5)
    AND j.spec -> 'service' IS NULL
ORDER BY j.id LIMIT $6
"""

OWNER = "SELECT tenant_id, project FROM reported_jobs WHERE id = $1"


async def past_jobs(
    database: Database, query: PastJobsQuery, tenant_id: str | None, project: str | None, after: str | None
) -> list[PastJob | Unread]:
    """Return the jobs submitted in a period, one more than its limit, in order, from after the job ``after``."""
    given = query.start, query.end, tenant_id, project, after, query.limit + 1
    async with database.connection() as connection:
        return messages_of(PastJob, await connection.fetch(PAST_JOBS, *given), itemgetter("job_id"))


async def owner_of(database: Database, job_id: str) -> Record | None:
    """Return the tenant and the project of a job, or None if there is no such job."""
    async with database.connection() as connection:
        return await connection.fetchrow(OWNER, job_id)


_JOB = """
SELECT j.tenant_id, j.project, coalesce(j.spec -> 'secrets', '[]') AS secrets,
    j.spec #>> '{source,git,secret}' AS git_secret, j.spec #>> '{source,upload}' AS upload,
    i.id AS instance, i.sealed_key
FROM node_gangs a JOIN jobs j ON j.id = a.job_id
LEFT JOIN submissions s ON j.spec -> 'service' IS NOT NULL AND s.tenant_id = j.tenant_id
    AND s.idempotency_key = j.spec #>> '{environment,WATTSHIFT_INSTANCE}' AND s.job_ids = ARRAY[j.id]
LEFT JOIN pool_instances i ON i.id = s.idempotency_key AND i.tenant_id = s.tenant_id AND i.state <> 'ended'
WHERE a.node_id = $1 AND a.allocation_id = $2
"""


class StartingJob(NamedTuple):
    """The job of a live gang; ``secrets`` are those of its spec, and ``upload`` is the SHA-256 of its archive."""

    tenant_id: str
    project: str
    secrets: list[dict[str, Any]]
    git_secret: str | None
    upload: str | None
    instance: str | None = None
    sealed_key: bytes | None = None


async def starting_job(database: Database, node_id: str, allocation_id: str) -> StartingJob | None:
    """Return the job of a gang that the node may run now, or None."""
    return await database.run(fetch_row, StartingJob, _JOB, node_id, allocation_id)
