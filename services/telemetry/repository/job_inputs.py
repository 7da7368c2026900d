"""What a node needs to start a gang, besides the command: read only for a live gang of that node.

An instance is known by its job's submission, which serving makes under the instance's id: the row of the instance may
not name the job yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from services.db.database import Database
from services.db.rows import fetch_row, fetch_rows

# A gang is the node's as long as a heartbeat of the node would be answered with it.
_JOB = """
SELECT j.tenant_id, j.project, coalesce(j.spec -> 'secrets', '[]') AS secrets,
    j.spec #>> '{source,git,secret}' AS git_secret, j.spec #>> '{source,upload}' AS upload,
    i.id AS instance, i.sealed_key
FROM allocations a JOIN jobs j ON j.id = a.job_id
LEFT JOIN submissions s ON j.spec -> 'service' IS NOT NULL AND s.tenant_id = j.tenant_id
    AND s.idempotency_key = j.spec #>> '{environment,WATTSHIFT_INSTANCE}' AND s.job_ids = ARRAY[j.id]
LEFT JOIN pool_instances i ON i.id = s.idempotency_key AND i.tenant_id = s.tenant_id AND i.state <> 'ended'
WHERE a.id = $2 AND a.state <> 'ended'
  AND EXISTS (SELECT FROM device_claims c WHERE c.allocation_id = a.id AND c.node_id = $1)
  AND NOT EXISTS (SELECT FROM rank_ends e WHERE e.allocation_id = a.id AND e.node_id = $1)
"""

# The secret of the project comes before that of the tenant.
_SECRETS = """
SELECT DISTINCT ON (name) name, project, sealed FROM secrets
WHERE tenant_id = $1 AND project IN ('', $2) AND name = ANY($3::text[])
ORDER BY name, project DESC
"""


_CHUNK = """
SELECT (SELECT count(*) FROM upload_chunks a WHERE a.tenant_id = c.tenant_id AND a.sha256 = c.sha256) AS chunks, c.data
FROM upload_chunks c JOIN uploads u USING (tenant_id, sha256)
WHERE c.tenant_id = $1 AND c.sha256 = $2 AND c.number = $3 AND u.is_complete
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


class StoredChunk(NamedTuple):
    """A part of an archive, and how many parts it has."""

    chunks: int
    data: bytes


class SealedSecret(NamedTuple):
    """A secret in its stored form."""

    name: str
    project: str
    sealed: bytes


async def starting_job(database: Database, node_id: str, allocation_id: str) -> StartingJob | None:
    """Return the job of a gang that the node may run now, or None."""
    async with database.connection() as connection:
        return await fetch_row(connection, StartingJob, _JOB, node_id, allocation_id)


async def sealed_secrets(database: Database, tenant_id: str, project: str, names: list[str]) -> list[SealedSecret]:
    """Return those of the named secrets that exist, each once."""
    async with database.connection() as connection:
        return await fetch_rows(connection, SealedSecret, _SECRETS, tenant_id, project, names)


async def upload_chunk(database: Database, tenant_id: str, sha256: str, number: int) -> StoredChunk | None:
    """Return a part of a complete archive, or None."""
    async with database.connection() as connection:
        return await fetch_row(connection, StoredChunk, _CHUNK, tenant_id, sha256, number)
