"""A job's checkpoint folder, read and written without ever leaving it: jobs may change it meanwhile."""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_agent.account import Account
from gpu_agent.checkpoint_store import PIECE_BYTES, Copy, Entry, Store, StoreError

MOST_ENTRIES = 200_000
MOST_LEVELS = 200
"""Of folders in folders: each is open while what is beneath it is looked at."""


class UnfitError(Exception):
    """A folder cannot be copied as it is; the message is a clause that says why."""


class ChangedError(Exception):
    """A folder changed while it was copied."""


class DamagedError(Exception):
    """A copy lacks something that its manifest names."""


@dataclass(frozen=True)
class Seen:
    """One entry of a folder; two equal entries have the same content, unless somebody set the clock back."""

    kind: str
    mode: int
    size_bytes: int = 0
    changed_ns: int = 0
    inode: int = 0
    target: str = ""

    def entry(self) -> Entry:
        """Return what a manifest says of it; ``UnfitError`` if that cannot be written down."""
        try:
            self.target.encode()
        except UnicodeEncodeError:
            raise UnfitError("it has a link whose target is not UTF-8") from None
        return Entry.model_validate(asdict(self))  # which takes of it what it has


def walk(folder: Path, owner: int | None) -> Iterator[tuple[str, Seen, int]]:
    """Yield the entries of a folder: the relative path, the entry, and a descriptor of its parent folder.

    Links are never followed. Entries that belong to anybody but ``owner``, and those that are neither file, folder nor
    link, are left out.

    Raises:
        UnfitError: It has too many entries, folders nested too deep, or a name that is not UTF-8.
    """
    count = 0
    for above, folders, names, descriptor in os.fwalk(folder, follow_symlinks=False):
        for name in sorted(folders + names):
            if (count := count + 1) > MOST_ENTRIES:
                raise UnfitError(f"it has more than {MOST_ENTRIES:,} files")
            path = os.path.relpath(os.path.join(above, name), folder)
            if path.count("/") > MOST_LEVELS:
                raise UnfitError(f"it has folders that are nested more than {MOST_LEVELS} deep")
            try:
                path.encode()
            except UnicodeEncodeError:
                raise UnfitError("it has a file whose name is not UTF-8") from None
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                seen = _seen(found, name, descriptor)
                if seen is not None and owner in (None, found.st_uid):
                    yield path, seen, descriptor


def listed(folder: Path, owner: int | None) -> dict[str, Seen]:
    """Return what ``walk`` yields, by path; empty if there is no folder."""
    return {path: seen for path, seen, _ in walk(folder, owner)}


def pieces(name: str, folder: int, seen: Seen, note: Callable[[str], None]) -> Iterator[bytes]:
    """Yield a file's content, and pass its hash to ``note``; ``ChangedError`` if it is not as it was ``seen``."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        raise ChangedError from error
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "rb") as file:
        if _seen(os.fstat(descriptor), "", folder) != seen:
            raise ChangedError
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            yield piece
        if _seen(os.fstat(descriptor), "", folder) != seen:
            raise ChangedError
    note(digest.hexdigest())


def restore(
    store: Store,
    job: str,
    copy: Copy,
    folder: Path,
    account: Account | None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Make a folder with the content of a copy; its parent is the agent's own.

    Raises:
        DamagedError: The copy lacks something; no folder is left.
        StoreError: The store does not answer; no folder is left.
        OSError: It cannot be written; no folder is left.
    """
    folder.mkdir(mode=0o700)
    try:
        merged = copy.merged()
        for path, (rank, entry) in sorted(merged.items()):  # folders before what is in them
            if is_over():
                raise StoreError("this agent ends")
            if entry.kind == "folder":
                (folder / path).mkdir(mode=0o700)
            elif entry.kind == "file":
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(folder / path, flags, 0o600), "wb") as file:
                    if not store.fetch(job, copy.generation, rank, entry, file):
                        raise DamagedError(path)
        for path, (_, entry) in merged.items():
            if entry.kind == "link":
                os.symlink(entry.target, folder / path)
        for path, (_, entry) in sorted(merged.items(), reverse=True):  # a folder that nobody may write comes last
            if account is not None:
                account.own(folder / path)
            if entry.kind != "link":
                (folder / path).chmod(entry.mode)
        if account is not None:
            account.own(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _seen(found: os.stat_result, name: str, folder: int) -> Seen | None:
    mode = stat.S_IMODE(found.st_mode) & 0o777
    if stat.S_ISDIR(found.st_mode):
        return Seen("folder", mode)
    if stat.S_ISLNK(found.st_mode):
        return Seen("link", 0, target=os.readlink(name, dir_fd=folder))
    if stat.S_ISREG(found.st_mode):
        return Seen("file", mode, found.st_size, max(found.st_mtime_ns, found.st_ctime_ns), found.st_ino)
    return None
