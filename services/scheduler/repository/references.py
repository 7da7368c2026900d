"""Whether secrets and uploads exist that the spec of a job names."""

from __future__ import annotations

from collections.abc import Collection

from services.db.database import Connection

MISSING_SECRETS = """
SELECT name FROM unnest($3::text[]) WITH ORDINALITY AS wanted (name, position)
 WHERE NOT EXISTS (
    SELECT FROM secrets s WHERE s.tenant_id = $1 AND s.project IN ('', $2) AND s.name = wanted.name)
 ORDER BY position
"""
HAS_UPLOAD = "SELECT EXISTS (SELECT FROM uploads WHERE tenant_id = $1 AND sha256 = $2 AND is_complete)"


async def missing_secrets(connection: Connection, tenant_id: str, project: str, names: Collection[str]) -> list[str]:
    """Return those secrets that neither a tenant's project nor the whole tenant has."""
    return [row["name"] for row in await connection.fetch(MISSING_SECRETS, tenant_id, project, list(names))]


async def has_upload(connection: Connection, tenant_id: str, sha256: str) -> bool:
    """Return whether a tenant has a complete upload."""
    return bool(await connection.fetchval(HAS_UPLOAD, tenant_id, sha256))
