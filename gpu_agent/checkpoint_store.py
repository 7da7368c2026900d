"""Copies of jobs' checkpoints in a store that all nodes reach: an S3 API, or a folder.

A copy by node 0 of generation 7 consists of its files, each under ``JOB/7/0/KEY``, followed by a manifest,
``JOB/7/0/manifest.json``, that lists them with their sizes and hashes. Without a manifest and all the files that it
lists, it is not a copy. Each allocation writes only beneath its own generation, so that a node that was given up cannot
overwrite what a later gang has stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MANIFEST = "manifest.json"
PIECE_BYTES = 8 * 2**20
_AT_ONCE = 4  #: Pieces of a file that are on their way at once


class StoreError(Exception):
    """The store did not do what it was asked to do; the message contains no secret."""


class Entry(BaseModel):
    """A file, folder or link of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["file", "folder", "link"]  #: Which of the three it is
    mode: int = Field(default=0o700, ge=0, le=0o777)
    size_bytes: int = Field(default=0, ge=0)
    sha256: str = ""
    key: str = Field(default="", pattern=r"^([a-z0-9-]+)?$")
    """Name of a file's content in the folder of its copy; empty if another node of the gang stores it."""
    target: str = ""  #: Where a link leads, relative to its own folder
    changed: bool = True  #: Whether it was written by this gang, not by an earlier one


class Manifest(BaseModel):
    """What one node of a gang has stored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    nodes: int = Field(ge=1)  #: The number of nodes of the gang; its copy is complete once each has a manifest
    entries: dict[str, Entry]

    @model_validator(mode="after")
    def _stays_inside(self) -> Self:
        for path, entry in self.entries.items():
            if not is_inside(path) or (entry.kind == "link" and not leads_inside(path, entry.target)):
                raise ValueError(f"{path} leads out of its folder")
            if any(str(above) in self.entries and self.entries[str(above)].kind != "folder" for above in _above(path)):
                raise ValueError(f"{path} is below something that is no folder")
        return self


class Copy(BaseModel):
    """The complete copy of one gang: the manifests of its nodes, by their rank."""

    model_config = ConfigDict(frozen=True)

    generation: int
    manifests: tuple[Manifest, ...]

    def merged(self) -> dict[str, tuple[int, Entry]]:
        """Return the content of the gang's nodes merged into one folder: by path, the node's rank and the entry.

        What a node has written takes precedence over what it only found; a path that any node has removed is gone.
        """
        found: dict[str, tuple[int, Entry]] = {}
        for path in sorted({path for each in self.manifests for path in each.entries}):
            kept = [(rank, each.entries[path]) for rank, each in enumerate(self.manifests) if path in each.entries]
            written = [(rank, entry) for rank, entry in kept if entry.changed]
            if written or len(kept) == len(self.manifests):
                found[path] = (written or kept)[0]
        return {
            path: each
            for path, each in found.items()
            if all(str(above) in found and found[str(above)][1].kind == "folder" for above in _above(path))
        }


class Store:
    """A store of checkpoints; its calls block, may be repeated, and raise ``StoreError`` if it does not answer."""

    def __init__(self, objects: Any) -> None:
        import obstore

        self._objects = objects
        self._library: Any = obstore

    @classmethod
    def at(cls, address: str, *, endpoint: str = "", region: str = "", key: str = "", secret: str = "") -> Store:
        """Open the store at ``s3://BUCKET/PREFIX`` or in a folder.

        Raises:
            ModuleNotFoundError: The ``obstore`` package is not installed.
            StoreError: The address or a setting is not accepted.
        """
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, S3Store

        try:
            if not address.startswith("s3://"):
                Path(address).mkdir(mode=0o700, parents=True, exist_ok=True)
                return cls(LocalStore(address))
            parts = urlsplit(address)
            given: dict[str, Any] = {"endpoint": endpoint, "access_key_id": key, "secret_access_key": secret}
            return cls(
                S3Store(
                    parts.netloc,
                    prefix=parts.path.strip("/") or None,
                    region=region or "us-east-1",
                    client_options={"allow_http": endpoint.startswith("http://"), "timeout": "60s"},
                    retry_config={"max_retries": 3},
                    **{name: value for name, value in given.items() if value},
                )
            )
        except (BaseError, OSError) as error:
            raise StoreError(f"{address} cannot be opened: {_first_line(error)}") from None

    def check(self) -> None:
        """Raise StoreError unless the store answers."""
        self._names("wattshift-asks-whether-this-answers")

    def newest(self, job: str, before: int) -> Copy | None:
        """Return the newest complete copy of a job from a generation before ``before``."""
        found: dict[int, set[int]] = {}
        for name in self._names(job):
            parts = name.split("/")
            if len(parts) == 4 and parts[3] == MANIFEST and parts[1].isdecimal() and parts[2].isdecimal():
                found.setdefault(int(parts[1]), set()).add(int(parts[2]))
        for generation in sorted((number for number in found if number < before), reverse=True):
            manifests = [self.manifest(job, generation, rank) for rank in range(len(found[generation]))]
            known = [each for each in manifests if each is not None]
            if known and len(known) == len(manifests) == known[0].nodes:
                return Copy(generation=generation, manifests=tuple(known))
        return None

    def manifest(self, job: str, generation: int, rank: int) -> Manifest | None:
        """Return the manifest of one node of a gang; None if it is missing or cannot be read."""
        try:
            return Manifest.model_validate_json(b"".join(self.read(job, generation, rank, MANIFEST)))
        except (FileNotFoundError, ValidationError):
            return None

    def keep(self, job: str, generation: int, rank: int, manifest: Manifest) -> None:
        """Write the manifest, which turns the written files into a copy."""
        self.write(job, generation, rank, MANIFEST, [manifest.model_dump_json().encode()])

    def write(self, job: str, generation: int, rank: int, key: str, content: Sequence[bytes] | Iterator[bytes]) -> None:
        """Write one file's content, completely or not at all."""
        with _talking():
            path = f"{job}/{generation}/{rank}/{key}"
            self._library.put(self._objects, path, iter(content), chunk_size=PIECE_BYTES, max_concurrency=_AT_ONCE)

    def read(self, job: str, generation: int, rank: int, key: str) -> Iterator[bytes]:
        """Yield one file's content in pieces; ``FileNotFoundError`` if it is not there, or ``StoreError``."""
        with _talking(may_be_missing=True):
            for piece in self._library.get(self._objects, f"{job}/{generation}/{rank}/{key}").stream(PIECE_BYTES):
                yield bytes(piece)

    def fetch(self, job: str, generation: int, rank: int, entry: Entry, file: IO[bytes]) -> bool:
        """Write a file's content into ``file``; return False if it is missing, or differs from the manifest."""
        digest, size = hashlib.sha256(), 0
        try:
            for piece in self.read(job, generation, rank, entry.key):
                digest.update(piece)
                size += len(piece)
                if size > entry.size_bytes:
                    return False
                file.write(piece)
        except FileNotFoundError:
            return False
        return size == entry.size_bytes and digest.hexdigest() == entry.sha256

    def forget(self, job: str, generation: int, rank: int, kept: Manifest) -> None:
        """Remove a node's earlier copies of this gang and, once the gang's copy is complete, all older generations."""
        own = {entry.key for entry in kept.entries.values()} | {MANIFEST}
        whole = self.newest(job, generation + 1)
        gone: list[str] = []
        for name in self._names(job):
            parts = name.split("/")
            if len(parts) != 4 or not parts[1].isdecimal():
                continue
            is_left = parts[1:3] == [str(generation), str(rank)] and parts[3] not in own
            if is_left or (whole is not None and int(parts[1]) < whole.generation):
                gone.append(name)
        manifests = [name for name in gone if name.endswith(MANIFEST)]  # first: what they name may then go
        with _talking():
            for names in (manifests, [name for name in gone if name not in manifests]):
                if names:
                    self._library.delete(self._objects, names)

    def _names(self, job: str) -> list[str]:
        with _talking():
            return [each["path"] for batch in self._library.list(self._objects, f"{job}/") for each in batch]


@contextmanager
def _talking(*, may_be_missing: bool = False) -> Generator[None]:
    """Turn the library's errors into ``StoreError``."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        if may_be_missing and isinstance(error, FileNotFoundError):
            raise
        raise StoreError(_first_line(error)) from None


def is_inside(path: str) -> bool:
    """Return whether a relative path stays inside the folder that it begins in."""
    found = PurePosixPath(path)
    return bool(path) and not found.is_absolute() and ".." not in found.parts and "\0" not in path and path != "."


def leads_inside(path: str, target: str) -> bool:
    """Return whether a link at ``path`` to ``target`` stays in the folder that ``path`` begins in."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    depth = len(PurePosixPath(path).parts) - 1
    for part in target.split("/"):
        depth += -1 if part == ".." else 0 if part in ("", ".") else 1
        if depth < 0:
            return False
    return True


def _above(path: str) -> list[PurePosixPath]:
    return list(PurePosixPath(path).parents)[:-1]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
