"""Queries on the batches of one tenant, and on their files."""

import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from sqlalchemy import Row, text

from services.contracts.batches import Batch, BatchCarbon, BatchErrors, BatchFile, RequestCounts
from services.contracts.identity import Identity
from services.core.domain.units import J_PER_KWH
from services.kit.problems import found, not_found
from services.kit.readable import Unread, each_readable
from services.serving.repository.specs import Rows

_ADD_FILE = text("""
INSERT INTO batch_files (id, tenant_id, filename, purpose, expires_at)
VALUES (:id, :tenant, :filename, :purpose, now() + make_interval(secs => CAST(:keep_s AS float8)))
""")
_ADD_CHUNK = text("""
WITH added AS (INSERT INTO batch_file_chunks (file_id, number, data) VALUES (:file, :number, :data))
UPDATE batch_files SET size_bytes = size_bytes + :bytes WHERE id = :file AND tenant_id = :tenant
""")
_COMPLETE_FILE = text("""
UPDATE batch_files SET is_complete = true, expires_at = created_at + make_interval(secs => CAST(:keep_s AS float8))
 WHERE id = :id AND tenant_id = :tenant
""")
_FILES = text("""
SELECT * FROM batch_files
 WHERE tenant_id = :tenant AND is_complete AND expires_at > now()
   AND (CAST(:id AS text) IS NULL OR id = :id) AND (CAST(:purpose AS text) IS NULL OR purpose = :purpose)
   AND (CAST(:after AS text) IS NULL OR CASE WHEN :ascending THEN id > :after ELSE id < :after END)
 ORDER BY CASE WHEN :ascending THEN id END, id DESC LIMIT :limit
""")
_CHUNK = text("""
SELECT c.data FROM batch_file_chunks c JOIN batch_files f ON f.id = c.file_id
 WHERE f.tenant_id = :tenant AND c.file_id = :id AND c.number = :number
""")
_REMOVE_FILE = text("DELETE FROM batch_files WHERE tenant_id = :tenant AND id = :id")
_STORED = text("""
SELECT (SELECT coalesce(sum(size_bytes), 0) FROM batch_files WHERE tenant_id = :tenant)
       + (SELECT coalesce(sum(input_bytes), 0) FROM batches WHERE tenant_id = :tenant AND ended_at IS NULL)
""")
_ADD_BATCH = text("""
INSERT INTO batches (id, tenant_id, caller, endpoint, input_file_id, output_keep_s, metadata, expires_at, input_bytes)
SELECT :id, :tenant, CAST(:caller AS jsonb), :endpoint, id, CAST(:keep_s AS float8), CAST(:metadata AS jsonb),
       now() + make_interval(secs => CAST(:window_s AS float8)), size_bytes FROM batch_files
 WHERE tenant_id = :tenant AND id = :file FOR UPDATE
""")
_BATCHES = text("""
SELECT * FROM batches
 WHERE tenant_id = :tenant AND (CAST(:id AS text) IS NULL OR id = :id)
   AND (CAST(:after AS text) IS NULL OR id < :after)
 ORDER BY id DESC LIMIT :limit
""")
_CANCEL = text("""
UPDATE batches SET status = 'cancelling',
       moments = moments || jsonb_build_object('cancelling_at', floor(extract(epoch FROM now())))
 WHERE tenant_id = :tenant AND id = :id AND status IN ('validating', 'in_progress')
""")


class BatchRows(Rows):
    """Queries on batches and files; all compare the tenant."""

    async def add_file(self, file_id: str, tenant_id: str, filename: str, purpose: str, keep_s: float) -> None:
        """Store that a file is being written."""
        values = {"id": file_id, "tenant": tenant_id, "filename": filename, "purpose": purpose, "keep_s": keep_s}
        await self._connection.execute(_ADD_FILE, values)

    async def add_chunk(self, file_id: str, tenant_id: str, number: int, data: bytes) -> None:
        """Store the next part of a file that is being written."""
        values = {"file": file_id, "tenant": tenant_id, "number": number, "data": data, "bytes": len(data)}
        await self._connection.execute(_ADD_CHUNK, values)

    async def complete_file(self, file_id: str, tenant_id: str, keep_s: float) -> None:
        """Let a file be seen for ``keep_s`` from when it was begun: all of it is there."""
        await self._connection.execute(_COMPLETE_FILE, {"id": file_id, "tenant": tenant_id, "keep_s": keep_s})

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the size of all files of a tenant, also of those being written, and of what its open batches hold."""
        return int((await self._connection.execute(_STORED, {"tenant": tenant_id})).scalar_one())

    async def files(
        self,
        tenant_id: str,
        limit: int,
        *,
        purpose: str | None = None,
        after: str | None = None,
        ascending: bool = False,
    ) -> list[BatchFile | Unread]:
        """Return complete files, newest first unless ``ascending``."""
        values = {"tenant": tenant_id, "id": None, "purpose": purpose, "after": after}
        values |= {"ascending": ascending, "limit": limit}
        return each_readable(await self._connection.execute(_FILES, values), _file, "file", attrgetter("id"))

    async def file(self, tenant_id: str, file_id: str) -> BatchFile:
        """Return a complete file; ``ProblemError``: 404 if there is none."""
        return _file(found(await self._file_row(tenant_id, file_id), "file"))

    async def has_file(self, tenant_id: str, file_id: str) -> bool:
        """Return whether there is such a complete file."""
        return await self._file_row(tenant_id, file_id) is not None

    async def _file_row(self, tenant_id: str, file_id: str) -> Row[Any] | None:
        values = {"tenant": tenant_id, "id": file_id, "purpose": None, "after": None, "ascending": False, "limit": 1}
        return (await self._connection.execute(_FILES, values)).one_or_none()

    async def chunk(self, tenant_id: str, file_id: str, number: int) -> bytes | None:
        """Return a part of a file; None after the last one."""
        values = {"tenant": tenant_id, "id": file_id, "number": number}
        return (await self._connection.execute(_CHUNK, values)).scalar_one_or_none()

    async def remove_file(self, tenant_id: str, file_id: str) -> None:
        """Delete a file; ``ProblemError``: 404 if there is none."""
        if not (await self._connection.execute(_REMOVE_FILE, {"tenant": tenant_id, "id": file_id})).rowcount:
            raise not_found("file")

    async def add(
        self,
        batch_id: str,
        caller: Identity,
        endpoint: str,
        file_id: str,
        *,
        window_s: float,
        keep_s: float,
        metadata: Mapping[str, str] | None,
    ) -> None:
        """Store a batch, whose file is to be checked."""
        values: dict[str, Any] = {"id": batch_id, "tenant": caller.tenant_id, "caller": caller.model_dump_json()}
        values |= {"endpoint": endpoint, "file": file_id, "window_s": window_s, "keep_s": keep_s}
        written = None if metadata is None else json.dumps(dict(metadata))
        await self._connection.execute(_ADD_BATCH, {**values, "metadata": written})

    async def page(self, tenant_id: str, limit: int, *, after: str | None = None) -> list[Batch | Unread]:
        """Return batches, newest first."""
        values = {"tenant": tenant_id, "id": None, "after": after, "limit": limit}
        return each_readable(await self._connection.execute(_BATCHES, values), batch_of, "batch", attrgetter("id"))

    async def find(self, tenant_id: str, batch_id: str) -> Batch:
        """Return a batch; ``ProblemError``: 404 if there is none."""
        values = {"tenant": tenant_id, "id": batch_id, "after": None, "limit": 1}
        return batch_of(found((await self._connection.execute(_BATCHES, values)).one_or_none(), "batch"))

    async def cancel(self, tenant_id: str, batch_id: str) -> bool:
        """Have a batch end as soon as may be; return whether it had not begun to end."""
        return bool((await self._connection.execute(_CANCEL, {"tenant": tenant_id, "id": batch_id})).rowcount)


def _file(row: Row[Any]) -> BatchFile:
    created_at, expires_at = int(row.created_at.timestamp()), int(row.expires_at.timestamp())
    return BatchFile.of(row, bytes=row.size_bytes, created_at=created_at, expires_at=expires_at)


def batch_of(row: Row[Any]) -> Batch:
    saved = None
    if row.arrival_gco2_per_kwh is not None:
        saved = row.energy_j / J_PER_KWH * row.arrival_gco2_per_kwh - row.carbon_gco2
    moments: dict[str, Any] = {name: int(at) for name, at in row.moments.items()}
    next_at = moments.pop("next_at", None)
    return Batch.of(
        row,
        errors=None if row.errors is None else BatchErrors(data=row.errors),
        created_at=int(row.created_at.timestamp()),
        expires_at=int(row.expires_at.timestamp()),
        request_counts=RequestCounts.of(row),
        wattshift=BatchCarbon(
            wh=row.energy_j / 3_600.0,
            gco2=row.carbon_gco2,
            saved_gco2=saved,
            repeated_lines=row.repeated,
            next_at=next_at if row.status == "in_progress" else None,
        ),
        **moments,
    )
