"""The files of jobs whose submitter shares no folder with this node: fetched, checked, and unpacked for one gang.

A gang's files are in ``source`` in the folder of its rank, all or nothing: they are made under another name, so that a
killed agent leaves nothing that looks complete. Archives are kept under their hash for the next gang.
"""

import asyncio
import base64
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from gpu_agent import trees
from gpu_agent.account import Account
from gpu_agent.archives import unpack
from gpu_agent.git import fetch_commit
from gpu_agent.secrets import InputError
from gpu_agent.settings import AgentSettings
from services.contracts.sources import UPLOAD_CHUNK_BYTES, OpenedChunk, Source
from services.kit.logging import Log

log = Log(__name__)

FOLDER = "source"
_DRAFT = ".source-"


class Sources:
    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._cache = settings.state_folder / "uploads"
        self._in_use = WeakValueDictionary[str, asyncio.Lock]()
        """One for each archive that is being fetched or unpacked."""

    async def make(
        self,
        source: Source,
        rank: Path,
        read_chunk: Callable[[int], Awaitable[OpenedChunk]],
        credential: str | None,
        account: Account | None,
        confinement: Callable[[], Sequence[tuple[str, str]]],
    ) -> Path:
        """Return the folder with the files of a gang's job.

        Args:
            account: Who owns the files; None for this process's user.
            confinement: Returns what confines the gang's processes, and git.

        Raises:
            InputError: They cannot be obtained.
            OSError: They cannot be written, or a limit cannot be set.
        """
        made = rank / FOLDER
        if made.is_dir():
            return made
        for path in rank.glob(f"{_DRAFT}*"):
            await asyncio.to_thread(trees.remove, path)
        draft = rank / f"{_DRAFT}{secrets.token_hex(4)}"
        if account is not None:
            rank.chmod(0o711)
        try:
            if source.git is not None:
                await fetch_commit(source.git, credential, draft, self._settings, account, confinement())
            elif source.upload is not None:
                most_bytes = self._settings.source_max_bytes
                async with self._archive(source.upload, read_chunk) as archive:
                    await asyncio.to_thread(unpack, archive, draft, most_bytes, account)
            draft.rename(made)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(trees.remove, draft))
            raise
        return made

    @asynccontextmanager
    async def _archive(self, sha256: str, read_chunk: Callable[[int], Awaitable[OpenedChunk]]) -> AsyncGenerator[Path]:
        """Yield the archive with this hash, which stays until the end of the block."""
        in_use = self._in_use.setdefault(sha256, asyncio.Lock())
        async with in_use:
            path = await self._fetched(sha256, read_chunk)
        yield path

    async def _fetched(self, sha256: str, read_chunk: Callable[[int], Awaitable[OpenedChunk]]) -> Path:
        """Return the archive with this hash, fetched unless it is here; an interrupted fetch is resumed."""
        path = self._cache / sha256
        if path.exists():
            os.utime(path)
            return path
        self._cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        await asyncio.to_thread(self._make_room)
        draft = self._cache / f"{sha256}.part"
        # The last whole chunk is read again, because its answer says how many there are.
        done = max(0, draft.stat().st_size // UPLOAD_CHUNK_BYTES - 1) if draft.exists() else 0
        draft.touch(mode=0o600)
        with draft.open("r+b") as file:
            file.truncate(done * UPLOAD_CHUNK_BYTES)
            file.seek(done * UPLOAD_CHUNK_BYTES)
            chunks = done + 1
            while done < chunks:
                chunk = await read_chunk(done)
                file.write(base64.b64decode(chunk.data))
                chunks = chunk.chunks
                done += 1
        if await asyncio.to_thread(_sha256, draft) != sha256:
            draft.unlink()
            raise InputError(f"The upload {sha256[:12]} arrived damaged.")
        draft.replace(path)
        log.info("source.fetched", sha256=sha256, size_bytes=path.stat().st_size)
        return path

    def _make_room(self) -> None:
        """Remove the least recently used archives that are not in use, down to half of what may be kept."""
        kept: list[tuple[float, int, Path]] = []
        for path in self._cache.iterdir():
            with suppress(FileNotFoundError):  # another one has arrived, and has its name now
                kept.append(((found := path.stat()).st_mtime, found.st_size, path))
        total = sum(size for _, size, _ in kept)
        if total <= self._settings.source_cache_bytes:
            return
        for _, size, path in sorted(kept):
            if total > self._settings.source_cache_bytes / 2 and path.stem not in self._in_use:
                path.unlink(missing_ok=True)
                total -= size


def remove_sources(rank: Path) -> None:
    """Remove a gang's files from the folder of a rank that is over and settled: checkpoints and logs are kept."""
    for folder in (rank / FOLDER, *rank.glob(f"{_DRAFT}*")):
        trees.remove(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
