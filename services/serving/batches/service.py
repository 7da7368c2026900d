"""What callers do with files and batches, by OpenAI's contract."""

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.exc import DBAPIError

from services.contracts import batches
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.kit.disk import DiskWatch
from services.kit.ids import new_id
from services.kit.problems import ProblemError, conflict
from services.kit.readable import Unread
from services.serving.repository import Queries, ServingRepository
from services.serving.settings import ServingSettings

CHUNK_BYTES = 2**20
PURPOSE = "batch"
_TEXT_BYTES = 1_000
_DISK_FULL = "53100"


@dataclass
class _Form:
    """The fields of an upload beside its file."""

    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def take(self, name: str, piece: bytes) -> None:
        self.texts[name] = self.texts.get(name, b"") + piece
        if len(self.texts[name]) > _TEXT_BYTES or len(self.texts) > 10:
            raise _refused(400, f"The field {name[:50]} is too long, or there are too many.")

    def keep_s(self, usual_s: float) -> float:
        seconds, anchor = self.texts.get("expires_after[seconds]"), self.texts.get("expires_after[anchor]")
        if seconds is None and anchor is None:
            return usual_s
        if anchor != b"created_at" or seconds is None or not re.fullmatch(rb"[0-9]{1,9}", seconds):
            raise _refused(400, "expires_after has the anchor created_at and a whole number of seconds.")
        if not batches.LEAST_KEPT_S <= int(seconds) <= batches.MOST_KEPT_S:
            raise _refused(400, f"A file is kept for {batches.LEAST_KEPT_S} to {batches.MOST_KEPT_S} seconds.")
        return float(seconds)


class Batches:
    """Files and batches. A tenant sees only its own."""

    def __init__(self, repository: ServingRepository, settings: ServingSettings) -> None:
        self._repository, self._settings = repository, settings
        self._disk = DiskWatch(settings.database_dir, settings.database_reserve_bytes)

    async def upload(self, caller: Identity, content_type: str, body: AsyncIterator[bytes]) -> batches.BatchFile:
        """Store a file as it arrives; nobody sees it before all of it is flushed to disk.

        Raises:
            ProblemError: 400 for a form that is no upload of a batch, 413 if the file is too large, 403 beyond the
                tenant's quota, 503 while the database's disk is nearly full.
        """
        self._disk.check("The database's disk")
        file_id = new_id("file")
        try:
            return await self._take_in(file_id, caller.tenant_id, content_type, body)
        except BaseException:  # what came of it would count as the tenant's for a day
            with contextlib.suppress(ProblemError, DBAPIError, OSError):
                await self.remove_file(caller, file_id)
            raise

    async def _take_in(
        self, file_id: str, tenant: str, content_type: str, body: AsyncIterator[bytes]
    ) -> batches.BatchFile:
        usual_s, form, size, number, held = self._settings.batch_keep_days * 86_400, _Form(), 0, 0, bytearray()
        is_begun = False
        async for name, filename, piece in read_parts(content_type, body):
            if name != "file":
                form.take(name, piece)
                continue
            if not is_begun:
                is_begun = True
                async with self._repository.writing() as queries:
                    await queries.batches.add_file(file_id, tenant, (filename or "file")[:500], PURPOSE, usual_s)
            size += len(piece)
            if size > self._settings.batch_file_bytes:
                detail = f"A file has at most {self._settings.batch_file_bytes} bytes."
                raise _refused(413, detail, ProblemCode.BODY_TOO_LARGE)
            held += piece
            while len(held) >= CHUNK_BYTES:
                await self._add_chunk(file_id, tenant, number, bytes(held[:CHUNK_BYTES]))
                number += 1
                del held[:CHUNK_BYTES]
        if form.texts.get("purpose") != PURPOSE.encode():
            raise _refused(400, "The only purpose of files here is batch.")
        if not size:
            raise _refused(400, "The form has no file, or an empty one.")
        if held:
            await self._add_chunk(file_id, tenant, number, bytes(held))
        keep_s = form.keep_s(usual_s)
        async with self._repository.writing() as queries:
            await queries.batches.complete_file(file_id, tenant, keep_s)
            return await queries.batches.file(tenant, file_id)

    async def _add_chunk(self, file_id: str, tenant: str, number: int, data: bytes) -> None:
        self._disk.check("The database's disk")
        try:
            async with self._repository.writing() as queries:
                await queries.batches.add_chunk(file_id, tenant, number, data)
                await self._check_quota(queries, tenant)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) != _DISK_FULL:
                raise
            detail = "The database's disk is full. The file was not taken in."
            raise ProblemError(503, ProblemCode.UNAVAILABLE, detail, headers={"Retry-After": "30"}) from error

    async def _check_quota(self, queries: Queries, tenant: str) -> None:
        if await queries.batches.stored_bytes(tenant) > (most := self._settings.batch_quota_bytes):
            detail = f"The tenant's files and open batches may have {most} bytes in all; delete or cancel some."
            raise _refused(403, detail, ProblemCode.QUOTA_EXCEEDED)

    async def files(
        self, caller: Identity, limit: int, after: str | None, purpose: str | None, *, ascending: bool
    ) -> batches.BatchFileList:
        async with self._repository.reading() as queries:
            found = await queries.batches.files(
                caller.tenant_id, limit + 1, purpose=purpose, after=after, ascending=ascending
            )
        return batches.BatchFileList(**_page(found, limit))

    async def file(self, caller: Identity, file_id: str) -> batches.BatchFile:
        """Return a file without its content, or raise ProblemError 404."""
        async with self._repository.reading() as queries:
            return await queries.batches.file(caller.tenant_id, file_id)

    async def content(self, caller: Identity, file_id: str) -> AsyncIterator[bytes]:
        """Yield a file's content."""
        number = 0
        while True:
            async with self._repository.reading() as queries:
                piece = await queries.batches.chunk(caller.tenant_id, file_id, number)
            if piece is None:
                return
            yield piece
            number += 1

    async def remove_file(self, caller: Identity, file_id: str) -> batches.DeletedFile:
        """Delete a file, or raise ProblemError 404. Batches that have begun have their lines and go on."""
        async with self._repository.writing() as queries:
            await queries.batches.remove_file(caller.tenant_id, file_id)
        return batches.DeletedFile(id=file_id)

    async def create(self, caller: Identity, request: batches.BatchRequest) -> batches.Batch:
        """Take in a batch; it is flushed to disk on return, and checked afterwards.

        Raises:
            ProblemError: 400 if there is no such file, 403 beyond the tenant's quota, 503 while the database's disk is
                nearly full.
        """
        self._disk.check("The database's disk")
        keep_s = self._settings.batch_keep_days * 86_400
        if request.output_expires_after is not None:
            keep_s = float(request.output_expires_after.seconds)
        batch_id = new_id("batch")
        async with self._repository.writing() as queries:
            if not await queries.batches.has_file(caller.tenant_id, request.input_file_id):
                raise _refused(400, f"There is no file {request.input_file_id[:100]} with the purpose batch.")
            await queries.batches.add(
                batch_id,
                caller,
                request.endpoint,
                request.input_file_id,
                window_s=batches.WINDOW_S,
                keep_s=keep_s,
                metadata=request.metadata,
            )
            await self._check_quota(queries, caller.tenant_id)
            return await queries.batches.find(caller.tenant_id, batch_id)

    async def page(self, caller: Identity, limit: int, after: str | None) -> batches.BatchList:
        """Return a page of batches, newest first."""
        async with self._repository.reading() as queries:
            found = await queries.batches.page(caller.tenant_id, limit + 1, after=after)
        return batches.BatchList(**_page(found, limit))

    async def find(self, caller: Identity, batch_id: str) -> batches.Batch:
        """Return a batch, or raise ProblemError 404."""
        async with self._repository.reading() as queries:
            return await queries.batches.find(caller.tenant_id, batch_id)

    async def cancel(self, caller: Identity, batch_id: str) -> batches.Batch:
        """Have a batch end; its files keep what is answered; ``ProblemError``: 404, or 409 if it ends or has ended."""
        async with self._repository.writing() as queries:
            is_done = await queries.batches.cancel(caller.tenant_id, batch_id)
            found = await queries.batches.find(caller.tenant_id, batch_id)
        if not is_done and found.status != "cancelling":
            raise conflict(f"The batch is {found.status} and cannot be cancelled.")
        return found


def _page(found: Sequence[batches.BatchFile | batches.Batch | Unread], limit: int) -> dict[str, Any]:
    page = found[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    data = [each for each in page if not isinstance(each, Unread)]
    return {"data": data, "first_id": first, "last_id": last, "has_more": len(found) > limit}


def _refused(status: int, detail: str, code: ProblemCode = ProblemCode.INVALID_REQUEST) -> ProblemError:
    return ProblemError(status, code, detail)


_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?\bboundary="?([^";]{1,70})"?', re.IGNORECASE)
_NAMED = re.compile(rb'\b(name|filename)="((?:[^"\\]|\\.)*)"')
LONGEST_HEAD = 8_192


async def read_parts(content_type: str, body: AsyncIterator[bytes]) -> AsyncGenerator[tuple[str, str | None, bytes]]:
    """Yield a form's fields in pieces, at least one each: the field's name, its file name if any, and the piece.

    Raises:
        ProblemError: 400 if it is not such a form, or ends before its end.
    """
    match = _BOUNDARY.match(content_type)
    if match is None:
        raise _refused(400, "The body must be multipart/form-data with a boundary.")
    mark = b"\r\n--" + match[1].encode()
    held = bytearray(b"\r\n")  # the first boundary begins a line, too
    name, filename, is_in_part = "", None, False
    async for piece in body:
        held += piece
        while True:
            if not is_in_part:  # before the head of a part
                start, end = held.find(mark), held.find(b"\r\n\r\n")
                if start >= 0 and held.startswith(b"--", start + len(mark)):
                    return
                if start < 0 or end < 0:
                    if len(held) > LONGEST_HEAD:
                        raise _refused(400, "A part's head is too long.")
                    break
                said = {found[1]: found[2].decode(errors="replace") for found in _NAMED.finditer(held[start:end])}
                name, filename = said.get(b"name", ""), said.get(b"filename")
                is_in_part = True
                del held[: end + 4]
                yield name, filename, b""
            at = held.find(mark)
            size = at if at >= 0 else max(0, len(held) - len(mark))  # a mark may have begun
            if size:
                yield name, filename, bytes(held[:size])
                del held[:size]
            if at < 0:
                break
            is_in_part = False
    raise _refused(400, "The form ends before its last boundary.")
