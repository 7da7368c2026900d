"""Tenants' secrets: their sealed values, and which ones there are."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import delete, func, select, text
from sqlalchemy.dialects.postgresql import insert

from services.admission.repository import Repository
from services.contracts.secrets import Secret
from services.db.locks import SECRETS
from services.db.tables import secrets

# The rows of `wanted` that neither the job's project nor the whole tenant has.
_MISSING = text("""
SELECT wanted.position, wanted.name
FROM unnest(CAST(:positions AS int[]), CAST(:projects AS text[]), CAST(:names AS text[]))
    AS wanted (position, project, name)
WHERE NOT EXISTS (
    SELECT FROM secrets s
    WHERE s.tenant_id = :tenant_id AND s.project IN ('', wanted.project) AND s.name = wanted.name)
ORDER BY wanted.position
""")


class SecretWanted(NamedTuple):
    """A secret that a job names; ``position`` is that of the job in its submission."""

    position: int
    project: str
    name: str


class SecretRepository(Repository):
    """Secrets in their sealed form."""

    async def lock_tenant(self, tenant_id: str) -> None:
        """Keep other transactions from setting secrets of this tenant meanwhile; submissions are not held up."""
        await self._connection.execute(select(func.pg_advisory_xact_lock(SECRETS, func.hashtext(tenant_id))))

    async def count(self, tenant_id: str) -> int:
        query = select(func.count()).select_from(secrets).where(secrets.c.tenant_id == tenant_id)
        return await self._value(query)

    async def version(self, tenant_id: str, project: str, name: str) -> int:
        """Return how often a secret has been set; 0 if there is none."""
        query = select(secrets.c.version).where(
            secrets.c.tenant_id == tenant_id, secrets.c.project == project, secrets.c.name == name
        )
        return await self._value(query) or 0

    async def put(self, tenant_id: str, project: str, name: str, sealed: bytes, now: datetime) -> Secret:
        """Store a sealed value in place of any earlier one."""
        place = {"tenant_id": tenant_id, "project": project, "name": name}
        query = insert(secrets).values(**place, version=1, sealed=sealed, created_at=now, updated_at=now)
        changed = {"sealed": sealed, "version": secrets.c.version + 1, "updated_at": now}
        stored = query.on_conflict_do_update(index_elements=list(place), set_=changed).returning(
            secrets.c.name, secrets.c.project, secrets.c.version, secrets.c.created_at, secrets.c.updated_at
        )
        return _secret(*(await self._connection.execute(stored)).one())

    async def all(self, tenant_id: str) -> list[Secret]:
        """Return a tenant's secrets without their values, ordered by name."""
        columns = (secrets.c.name, secrets.c.project, secrets.c.version, secrets.c.created_at, secrets.c.updated_at)
        query = select(*columns).where(secrets.c.tenant_id == tenant_id).order_by(secrets.c.name, secrets.c.project)
        return [_secret(*row) for row in await self._connection.execute(query)]

    async def remove(self, tenant_id: str, project: str, name: str) -> bool:
        """Delete a secret; return whether there was one."""
        query = delete(secrets).where(
            secrets.c.tenant_id == tenant_id, secrets.c.project == project, secrets.c.name == name
        )
        return await self._value(query.returning(secrets.c.name)) is not None

    async def missing(self, tenant_id: str, wanted: Sequence[SecretWanted]) -> list[tuple[int, str]]:
        """Return position and name of the secrets that the jobs name but that do not exist."""
        columns = [list(column) for column in zip(*wanted, strict=True)]
        values = dict(zip(("positions", "projects", "names"), columns, strict=True))
        found = await self._connection.execute(_MISSING, {"tenant_id": tenant_id, **values})
        return [(int(position), str(name)) for position, name in found]


def _secret(name: str, project: str, version: int, created_at: datetime, updated_at: datetime) -> Secret:
    return Secret(name=name, project=project or None, version=version, created_at=created_at, updated_at=updated_at)
