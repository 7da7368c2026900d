"""What a node needs to start a gang, besides the command: read only for a gang that the node may run now.

An instance is known by its job's submission, which serving makes under the instance's id: the row of the instance may
not name the job yet.
"""

from typing import Any, NamedTuple

from services.db.database import Database
from services.db.rows import fetch_row

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
    async with database.connection() as connection:
        return await fetch_row(connection, StartingJob, _JOB, node_id, allocation_id)
