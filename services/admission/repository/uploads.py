"""Archives of jobs' files, in chunks; and tenants' secrets, as sealed values."""

import hashlib
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, RowMapping, TableClause, delete, func, select, text, update
from sqlalchemy.dialects.postgresql import insert

from services.admission.repository import Repository
from services.contracts.secrets import Secret
from services.db.locks import SECRETS, UPLOADS
from services.db.sealing import SEAL_BYTES
from services.db.tables import secrets, upload_chunks, uploads
from services.kit.readable import BY_NAME

# One that a submission is just naming is locked by it, and stays.
_CLEAR = text("""
WITH old AS (
    SELECT u.tenant_id, u.sha256 FROM uploads u
    WHERE u.used_at < now() - make_interval(
        secs => CASE WHEN u.is_complete THEN CAST(:kept_s AS float8) ELSE CAST(:unfinished_s AS float8) END)
      AND NOT EXISTS (
        SELECT FROM jobs j WHERE j.tenant_id = u.tenant_id AND j.state NOT IN ('succeeded', 'failed', 'cancelled')
          AND j.spec #>> '{source,upload}' = u.sha256)
    FOR UPDATE SKIP LOCKED
)
DELETE FROM uploads u USING old WHERE u.tenant_id = old.tenant_id AND u.sha256 = old.sha256 RETURNING u.sha256
""")

# In one order, as two submissions may name the same ones.
_USE = text("""
WITH named AS (
    SELECT sha256 FROM uploads WHERE tenant_id = :tenant_id AND sha256 = ANY(:sha256s) AND is_complete
    ORDER BY sha256 FOR UPDATE
)
UPDATE uploads u SET used_at = now() FROM named WHERE u.tenant_id = :tenant_id AND u.sha256 = named.sha256
RETURNING u.sha256
""")


def _of(table: TableClause, **place: Any) -> list[ColumnElement[bool]]:
    return [table.c[name] == value for name, value in place.items()]


class StoredUpload(NamedTuple):
    """An archive without its bytes."""

    size_bytes: int
    is_complete: bool
    created_at: datetime


class UploadRepository(Repository):
    """Archives, and their chunks."""

    async def lock_tenant(self, tenant_id: str) -> None:
        """Keep other uploads of this tenant from beginning meanwhile."""
        await self._connection.execute(select(func.pg_advisory_xact_lock(UPLOADS, func.hashtext(tenant_id))))

    async def find(self, tenant_id: str, sha256: str, *, lock: bool = False) -> StoredUpload | None:
        """Return an archive of a tenant; with ``lock``, no other transaction can change it until this one ends."""
        columns = (uploads.c.size_bytes, uploads.c.is_complete, uploads.c.created_at)
        query = select(*columns).where(*_of(uploads, tenant_id=tenant_id, sha256=sha256))
        return await self._one(query.with_for_update() if lock else query, lambda row: StoredUpload(**row))

    async def total_bytes(self, tenant_id: str) -> int:
        """Return the total announced size of a tenant's archives."""
        query = select(func.coalesce(func.sum(uploads.c.size_bytes), 0)).where(uploads.c.tenant_id == tenant_id)
        return int(await self._value(query))

    async def add(self, tenant_id: str, sha256: str, size_bytes: int) -> None:
        """Store that an archive is being uploaded."""
        await self._connection.execute(
            insert(uploads).values(tenant_id=tenant_id, sha256=sha256, size_bytes=size_bytes)
        )

    async def use(self, tenant_id: str, sha256s: Collection[str]) -> set[str]:
        """Note that complete archives are in use; return which of the named ones there are."""
        named = {"tenant_id": tenant_id, "sha256s": list(sha256s)}
        return {str(sha256) for (sha256,) in await self._connection.execute(_USE, named)}

    async def put_chunk(self, tenant_id: str, sha256: str, number: int, data: bytes) -> None:
        """Store a part of an archive; one that is already there is replaced."""
        place = {"tenant_id": tenant_id, "sha256": sha256, "number": number}
        stored = insert(upload_chunks).values(**place, data=data)
        query = stored.on_conflict_do_update(index_elements=list(place), set_={"data": data})
        await self._connection.execute(query)
        await self._change(tenant_id, sha256, used_at=func.now())

    async def chunk_numbers(self, tenant_id: str, sha256: str) -> set[int]:
        """Return the numbers of the parts that are stored."""
        query = select(upload_chunks.c.number).where(*_of(upload_chunks, tenant_id=tenant_id, sha256=sha256))
        return {int(number) for (number,) in await self._connection.execute(query)}

    async def digest(self, tenant_id: str, sha256: str) -> str:
        """Return the SHA-256 of all parts together, read one after the other."""
        digest = hashlib.sha256()
        for number in sorted(await self.chunk_numbers(tenant_id, sha256)):
            place = _of(upload_chunks, tenant_id=tenant_id, sha256=sha256, number=number)
            query = select(upload_chunks.c.data).where(*place)
            digest.update((await self._connection.execute(query)).scalar_one())
        return digest.hexdigest()

    async def complete(self, tenant_id: str, sha256: str) -> None:
        """Note that an archive is complete, so that jobs may name it."""
        await self._change(tenant_id, sha256, is_complete=True)

    async def remove(self, tenant_id: str, sha256: str) -> None:
        await self._connection.execute(delete(uploads).where(*_of(uploads, tenant_id=tenant_id, sha256=sha256)))

    async def clear(self, kept_s: float, unfinished_s: float) -> int:
        """Delete archives that no job needs and that have not been used for that long; return how many."""
        found = await self._connection.execute(_CLEAR, {"kept_s": kept_s, "unfinished_s": unfinished_s})
        return len(found.all())

    async def _change(self, tenant_id: str, sha256: str, **values: object) -> None:
        query = update(uploads).where(*_of(uploads, tenant_id=tenant_id, sha256=sha256))
        await self._connection.execute(query.values(**values))


# The size of each of `wanted`, as the job's project or else the whole tenant has it; null where neither does.
_SIZES = text("""
SELECT wanted.position, wanted.name, (
    SELECT octet_length(s.sealed) FROM secrets s
    WHERE s.tenant_id = :tenant_id AND s.project IN ('', wanted.project) AND s.name = wanted.name
    ORDER BY s.project DESC LIMIT 1)
FROM unnest(CAST(:positions AS int[]), CAST(:projects AS text[]), CAST(:names AS text[]))
    AS wanted (position, project, name)
ORDER BY wanted.position
""")


_SHOWN = secrets.c.name, secrets.c.project, secrets.c.version, secrets.c.created_at, secrets.c.updated_at


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
        query = select(secrets.c.version).where(*_of(secrets, tenant_id=tenant_id, project=project, name=name))
        return await self._value(query) or 0

    async def put(self, tenant_id: str, project: str, name: str, sealed: bytes, now: datetime) -> Secret:
        """Store a sealed value in place of any earlier one."""
        place = {"tenant_id": tenant_id, "project": project, "name": name}
        query = insert(secrets).values(**place, version=1, sealed=sealed, created_at=now, updated_at=now)
        changed = {"sealed": sealed, "version": secrets.c.version + 1, "updated_at": now}
        stored = query.on_conflict_do_update(index_elements=list(place), set_=changed)
        (made,) = await self._all(stored.returning(*_SHOWN), _secret)
        return made

    async def all(self, tenant_id: str) -> list[Secret]:
        """Return a tenant's secrets without their values, ordered by name."""
        query = select(*_SHOWN).where(secrets.c.tenant_id == tenant_id).order_by(secrets.c.name, secrets.c.project)
        return await self._readable(query, _secret, "secret", BY_NAME)

    async def remove(self, tenant_id: str, project: str, name: str) -> bool:
        """Delete a secret; return whether there was one."""
        query = delete(secrets).where(*_of(secrets, tenant_id=tenant_id, project=project, name=name))
        return await self._value(query.returning(secrets.c.name)) is not None

    async def sizes(self, tenant_id: str, wanted: Sequence[SecretWanted]) -> list[tuple[int, str, int | None]]:
        """Return position and name of the secrets that the jobs name, and their bytes; None if they do not exist."""
        columns = [list(column) for column in zip(*wanted, strict=True)]
        values = dict(zip(("positions", "projects", "names"), columns, strict=True))
        found = await self._connection.execute(_SIZES, {"tenant_id": tenant_id, **values})
        return [(at, name, None if sealed is None else sealed - SEAL_BYTES) for at, name, sealed in found]


def _secret(row: RowMapping) -> Secret:
    return Secret.as_stored({**row, "project": row["project"] or None})
