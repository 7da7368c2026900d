"""Secrets and uploads that jobs name; the rows are admission's."""

from collections.abc import Collection
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_row, fetch_rows

# The secret of the project comes before that of the tenant.
_SECRETS = """
SELECT DISTINCT ON (name) name, project, sealed FROM secrets
WHERE tenant_id = $1 AND project IN ('', $2) AND name = ANY($3::text[])
ORDER BY name, project DESC
"""

_HAS_UPLOAD = "SELECT EXISTS (SELECT FROM uploads WHERE tenant_id = $1 AND sha256 = $2 AND is_complete)"

_CHUNK = """
SELECT (SELECT count(*) FROM upload_chunks a WHERE a.tenant_id = c.tenant_id AND a.sha256 = c.sha256) AS chunks, c.data
FROM upload_chunks c JOIN uploads u USING (tenant_id, sha256)
WHERE c.tenant_id = $1 AND c.sha256 = $2 AND c.number = $3 AND u.is_complete
"""


class SealedSecret(NamedTuple):
    """A secret in its stored form."""

    name: str
    project: str
    sealed: bytes


class StoredChunk(NamedTuple):
    """A part of an archive, and how many parts it has."""

    chunks: int
    data: bytes


async def sealed_secrets(
    connection: Connection, tenant_id: str, project: str, names: Collection[str]
) -> list[SealedSecret]:
    """Return those of the named secrets that a tenant's project or the whole tenant has, each once."""
    return await fetch_rows(connection, SealedSecret, _SECRETS, tenant_id, project, list(names))


async def has_upload(connection: Connection, tenant_id: str, sha256: str) -> bool:
    """Return whether a tenant has a complete upload."""
    return bool(await connection.fetchval(_HAS_UPLOAD, tenant_id, sha256))


async def upload_chunk(connection: Connection, tenant_id: str, sha256: str, number: int) -> StoredChunk | None:
    """Return a part of a complete archive, or None."""
    return await fetch_row(connection, StoredChunk, _CHUNK, tenant_id, sha256, number)
