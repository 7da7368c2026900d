"""A job's files on their way to nodes that share no folder with this machine: archives, and commits of repositories."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
import subprocess
import tarfile
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from wattshift.errors import WattshiftError

CHUNK_BYTES = 512 * 1024
LEFT_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".venv", ".wattshift"})
"""Names that are left out of folders that git does not know."""

MOST_BYTES = 2**30
"""Compressed: no control plane takes more, so that nobody packs a data set by mistake."""

_BIGGEST_SHOWN = 5
_GIT_S = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class SourceError(WattshiftError):
    """A job's files cannot be packed or found."""


@dataclass(frozen=True)
class Entry:
    """A file or link to pack: its path in the folder, with slashes, and its size in bytes."""

    name: str
    size_bytes: int


class Archive:
    """The files of a folder, packed. Equal files make equal archives: times, owners and disk order are left out.

    Attributes:
        folder: Where the files are from.
        sha256: The archive's hash, which is its name.
        size_bytes: The archive's size.
        entries: What is in it.
        skipped: Folders that were left out because they are repositories of their own.
    """

    def __init__(self, folder: str | os.PathLike[str] = ".") -> None:
        """Pack a folder: what git does not ignore or, where git does not know it, all but caches and environments.

        Raises:
            SourceError: It is not a folder, is empty or too large, or has a link that leads out of it.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise SourceError(f"{self.folder} is not a folder")
        self.entries, self.skipped = listed(self.folder)
        if not self.entries:
            raise SourceError(f"{self.folder} has no files that git does not ignore")
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the archive
        weakref.finalize(self, self._file.close)
        self._pack()
        self.size_bytes = self._file.tell()
        self._file.seek(0)
        self.sha256 = hashlib.file_digest(cast("Any", self._file), "sha256").hexdigest()
        self._file.seek(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Discard the archive."""
        self._file.close()

    def chunk(self, number: int) -> str:
        """Return a part of the archive in Base64."""
        self._file.seek(number * CHUNK_BYTES)
        return base64.b64encode(self._file.read(CHUNK_BYTES)).decode()

    def biggest(self) -> str:
        """Return the largest files with their sizes, for a person who has to leave some out."""
        largest = sorted(self.entries, key=lambda entry: -entry.size_bytes)[:_BIGGEST_SHOWN]
        return ", ".join(f"{entry.name} ({entry.size_bytes / 2**20:.1f} MiB)" for entry in largest)

    def too_large(self, limit: str) -> SourceError:
        """Return the error for an archive that is refused for its size."""
        advice = "leave them out with .gitignore, or read them from storage that nodes reach"
        return SourceError(f"{limit} The biggest files are {self.biggest()}; {advice}")

    def _pack(self) -> None:
        zipped = gzip.GzipFile(filename="", mode="wb", fileobj=self._file, mtime=0, compresslevel=6)
        with zipped, tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for entry in self.entries:
                self._add(tar, entry.name)
                if self._file.tell() > MOST_BYTES:
                    raise self.too_large(f"{self.folder} has more than {MOST_BYTES / 2**30:.0f} GiB, compressed.")

    def _add(self, tar: tarfile.TarFile, name: str) -> None:
        path = self.folder / name
        member = tarfile.TarInfo(name)
        if path.is_symlink():
            target = os.readlink(path)
            inside = os.path.normpath(os.path.join(os.path.dirname(name), target))
            if os.path.isabs(target) or inside.split(os.sep)[0] == os.pardir:
                raise SourceError(f"{name} is a link that leads out of {self.folder}: {target}")
            member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(member)
            return
        try:
            with path.open("rb") as file:
                member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
                member.size = os.fstat(file.fileno()).st_size
                tar.addfile(member, file)
        except OSError as error:
            raise SourceError(f"cannot read {path}: {error.strerror or error}") from None


def listed(folder: Path) -> tuple[list[Entry], list[str]]:
    """Return what to pack of a folder, sorted, and the folders in it that are repositories of their own."""
    names = _git_names(folder)
    names = sorted(_walked(folder)) if names is None else sorted(names)
    entries: list[Entry] = []
    skipped: list[str] = []
    for name in names:
        path = folder / name
        if path.is_symlink() or path.is_file():
            entries.append(Entry(name, path.lstat().st_size))
        elif path.is_dir():
            skipped.append(name)
    return entries, skipped


def _git_names(folder: Path) -> set[str] | None:
    """Return what git does not ignore below a folder; None if git does not know the folder or is missing."""
    words = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(words, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    return {os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name}


def _walked(folder: Path) -> Iterator[str]:
    for top, folders, names in os.walk(folder):
        below = Path(top).relative_to(folder)
        links = [name for name in folders if os.path.islink(os.path.join(top, name))]
        folders[:] = [name for name in folders if name not in LEFT_OUT and name not in links]
        yield from ((below / name).as_posix() for name in (*names, *links) if name not in LEFT_OUT)


def git_source(text: str, secret: str | None = None) -> dict[str, Any]:
    """Return the source of a job for ``URL@REVISION``, whose commit is looked up in the repository.

    Args:
        text: The address, and after ``@`` a branch, a tag or a whole commit id; by default the default branch.
        secret: Name of the secret by which nodes reach it.

    Raises:
        SourceError: There is no such revision, or the repository cannot be reached from here.
    """
    url, revision = split_revision(text)
    commit = revision if _COMMIT.fullmatch(revision) else _resolved(url, revision)
    return {"git": {"url": url, "revision": commit, **({"secret": secret} if secret else {})}}


def split_revision(text: str) -> tuple[str, str]:
    """Return address and revision of ``URL@REVISION``; the revision is ``HEAD`` if none is given.

    Raises:
        SourceError: Nodes could not use such an address.
    """
    found = re.fullmatch(r"(https://[^/@\s]+/|ssh://[^/\s]+/|file:///|[\w.-]+@[\w.-]+:)([^@\s]+)(?:@(\S+))?", text)
    if found is None:
        wanted = "https://HOST/PATH@REVISION, ssh://USER@HOST/PATH@REVISION or USER@HOST:PATH@REVISION"
        raise SourceError(f"{_without_password(text)!r} is not {wanted}; credentials are given by a secret")
    revision = found[3] or "HEAD"
    if revision.startswith("-") or found[2].startswith("-"):
        raise SourceError(f"{text!r} has a part that begins with '-'")
    return found[1] + found[2], revision


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*:[^/@\s]*@", "//***@", text)


def _resolved(url: str, revision: str) -> str:
    words = ["git", "-c", "protocol.ext.allow=never", "ls-remote", "--", url]
    names = ["HEAD"] if revision == "HEAD" else _references(revision)
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    environment.setdefault("GIT_SSH_COMMAND", "ssh -o BatchMode=yes")
    give = "give a whole commit id instead of a name"
    try:
        done = subprocess.run(
            [*words, *names],
            capture_output=True,
            env=environment,
            timeout=_GIT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise SourceError(f"git is not installed here, so {revision} cannot be looked up; {give}") from None
    except subprocess.TimeoutExpired:
        raise SourceError(f"{url} did not answer within {_GIT_S:.0f} s; {give}") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = next((line.removeprefix("fatal: ") for line in said if line.startswith("fatal: ")), "it does not answer")
        raise SourceError(f"{url} cannot be reached from here ({why}); {give}")
    found = dict(line.split("\t", 1)[::-1] for line in done.stdout.decode().splitlines() if "\t" in line)
    for name in (f"{each}{peeled}" for each in names for peeled in ("^{}", "")):
        if name in found:
            return found[name]
    raise SourceError(f"{url} has no branch or tag {revision}; a commit is given by its whole id")


def _references(revision: str) -> list[str]:
    if revision.startswith("refs/"):
        return [revision, f"{revision}^{{}}"]
    return [f"refs/tags/{revision}", f"refs/tags/{revision}^{{}}", f"refs/heads/{revision}"]
