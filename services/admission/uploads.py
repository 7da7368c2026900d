"""Uploads: archives of jobs' files, named by their SHA-256 and kept in the database, where every agent reaches them."""

import base64
import binascii
from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.access import AccessRepository
from services.admission.repository.uploads import StoredUpload, UploadRepository
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.sources import UPLOAD_CHUNK_BYTES, Upload
from services.kit.disk import DiskWatch
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, found, invalid

log = Log(__name__)

_UNFINISHED_S = 86_400.0


class UploadLimits(NamedTuple):
    """How much is kept, and for how long."""

    max_bytes: int  #: Size of one archive
    quota_bytes: int  #: Total size of a tenant's archives
    kept_s: float  #: Time that an archive is kept after its last use, if no job needs it


class Uploads:
    """Receives archives in chunks. A tenant sees only its own: another's is not found, even by its hash."""

    def __init__(self, engine: AsyncEngine, limits: UploadLimits, disk: DiskWatch) -> None:
        self._engine, self._limits, self._disk = engine, limits, disk

    async def start(self, caller: Identity, sha256: str, size_bytes: int) -> Upload:
        """Begin an upload, or return how far it has got.

        Raises:
            ProblemError: 413 if it is too large, 403 beyond the tenant's quota, 409 if it was begun with another size,
                503 while the database's disk is nearly full.
        """
        self._disk.check("The database's disk")
        if size_bytes > self._limits.max_bytes:
            raise ProblemError(
                413,
                ProblemCode.BODY_TOO_LARGE,
                f"The archive has {_mib(size_bytes)}; at most {_mib(self._limits.max_bytes)} can be uploaded.",
            )
        tenant_id = caller.tenant_id
        async with self._engine.begin() as connection:
            repository = UploadRepository(connection)
            found(await AccessRepository(connection).tenant(tenant_id), "tenant")
            await repository.lock_tenant(tenant_id)
            known = await repository.find(tenant_id, sha256)
            if known is None:
                kept = await repository.total_bytes(tenant_id)
                if kept + size_bytes > self._limits.quota_bytes:
                    raise ProblemError(
                        403,
                        ProblemCode.QUOTA_EXCEEDED,
                        f"The tenant has {_mib(kept)} of uploads and may have {_mib(self._limits.quota_bytes)}; unused "
                        f"ones go after {self._limits.kept_s / 3_600:.0f} h.",
                    )
                await repository.add(tenant_id, sha256, size_bytes)
            elif known.size_bytes != size_bytes:
                raise conflict(f"The upload was begun with {known.size_bytes} bytes, not {size_bytes}.")
            else:
                await repository.use(tenant_id, [sha256])
            return await _state(repository, tenant_id, sha256)

    async def get(self, caller: Identity, sha256: str) -> Upload:
        """Return how far an upload has got; ``ProblemError``: 404 if there is none."""
        async with self._engine.connect() as connection:
            return await _state(UploadRepository(connection), caller.tenant_id, sha256)

    async def put_chunk(self, caller: Identity, sha256: str, number: int, data: str) -> Upload:
        """Store a part; after the last one, compare the whole with its SHA-256. Repeating it changes nothing.

        Raises:
            ProblemError: 404; 422 if the part is not valid, or if the whole has another hash and is therefore deleted.
        """
        tenant_id = caller.tenant_id
        content = _decoded(data)
        async with self._engine.begin() as connection:
            repository = UploadRepository(connection)
            known = found(await repository.find(tenant_id, sha256, lock=True), "upload")
            if known.is_complete:
                return await _state(repository, tenant_id, sha256)
            expected = min(UPLOAD_CHUNK_BYTES, known.size_bytes - number * UPLOAD_CHUNK_BYTES)
            if expected <= 0 or len(content) != expected:
                raise invalid("/data", f"Chunk {number} has {len(content)} bytes; it must have {max(expected, 0)}.")
            await repository.put_chunk(tenant_id, sha256, number, content)
            is_whole = len(await repository.chunk_numbers(tenant_id, sha256)) == _chunks(known)
            is_right = not is_whole or await repository.digest(tenant_id, sha256) == sha256
            if is_right and is_whole:
                await repository.complete(tenant_id, sha256)
            if is_right:
                return await _state(repository, tenant_id, sha256)
            await repository.remove(tenant_id, sha256)
        raise invalid("/data", "What was uploaded does not have the SHA-256 that it is named by; upload it again.")

    async def clear(self) -> None:
        """Delete archives that no job needs any more and that have not been used for a while."""
        async with self._engine.begin() as connection:
            cleared = await UploadRepository(connection).clear(
                self._limits.kept_s, min(self._limits.kept_s, _UNFINISHED_S)
            )
        if cleared:
            log.info("uploads.cleared", uploads=cleared)


async def _state(repository: UploadRepository, tenant_id: str, sha256: str) -> Upload:
    known = found(await repository.find(tenant_id, sha256), "upload")
    there = set[int]() if known.is_complete else await repository.chunk_numbers(tenant_id, sha256)
    missing = () if known.is_complete else (n for n in range(_chunks(known)) if n not in there)
    return Upload(
        sha256=sha256,
        size_bytes=known.size_bytes,
        chunks=_chunks(known),
        next_chunk=next(iter(missing), None),
        created_at=known.created_at,
    )


def _chunks(upload: StoredUpload) -> int:
    return -(-upload.size_bytes // UPLOAD_CHUNK_BYTES)


def _decoded(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("/data", "The data must be Base64.") from None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
