"""Unpack an archive from an untrusted source: nothing lands outside its folder, and it cannot fill the disk."""

import gzip
import io
import os
import shutil
import tarfile
import zlib
from pathlib import Path, PurePosixPath

from gpu_agent.account import Account
from gpu_agent.secrets import CannotStartError

MOST_ENTRIES = 200_000
_LARGEST_READ = 16 * 2**20
_COPY_BYTES = 2**20


def unpack(archive: Path, into: Path, most_bytes: int, account: Account | None = None) -> None:
    """Unpack a gzip-compressed tar file into a new folder. It may hold folders, files, and links that stay inside it.

    Files are written before links, and never through one. Of a file's mode, only the execute permission is kept.

    Args:
        into: The folder, which is made. Nobody else may be able to write there.
        most_bytes: The largest total size, unpacked.
        account: Who owns what is unpacked; None for this process's user.

    Raises:
        CannotStartError: It is no such archive, is too large, or has a forbidden entry; parts may be unpacked by then.
        OSError: It cannot be written.
    """
    into.mkdir(mode=0o700)
    try:
        _unpack(archive, into, most_bytes, account)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, RecursionError) as error:
        raise CannotStartError(f"The uploaded archive cannot be read: {error}.") from error


def _unpack(archive: Path, into: Path, most_bytes: int, account: Account | None) -> None:
    with gzip.open(archive) as unzipped, tarfile.open(fileobj=_Bounded(unzipped, most_bytes), mode="r:") as tar:
        links = _unpack_files(tar, into, account)
    for name, target in links:
        path = into / name
        _make_folders(into, path.parent, account)
        if os.path.lexists(path):
            raise CannotStartError(f"The uploaded archive has two entries {name}.")
        path.symlink_to(target)
        _give(path, account)
    for name, _ in links:
        if not Path(os.path.realpath(into / name)).is_relative_to(os.path.realpath(into)):
            raise CannotStartError(f"The uploaded archive has a link that leads out of it: {name}.")
    _give(into, account)


def _unpack_files(tar: tarfile.TarFile, into: Path, account: Account | None) -> list[tuple[str, str]]:
    """Write folders and files; return the links still to be made, with their targets."""
    links: list[tuple[str, str]] = []
    for count, member in enumerate(tar, start=1):
        if count > MOST_ENTRIES:
            raise CannotStartError(f"The uploaded archive has more than {MOST_ENTRIES:,} entries.")
        path = into / _inside(member.name)
        if path == into and not member.isdir():
            raise CannotStartError("The uploaded archive has an entry without a name.")
        if member.isdir():
            _make_folders(into, path, account)
        elif member.issym():
            if member.linkname.startswith("/"):
                raise CannotStartError(f"The uploaded archive has a link that leads out of it: {member.name}.")
            links.append((member.name, member.linkname))
        elif member.isreg() and not member.issparse():
            _make_folders(into, path.parent, account)
            content = tar.extractfile(member)
            mode = 0o755 if member.mode & 0o100 else 0o644
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
            except FileExistsError:
                raise CannotStartError(f"The uploaded archive has two entries {member.name}.") from None
            with os.fdopen(descriptor, "wb") as file:
                if content is not None:
                    shutil.copyfileobj(content, file, _COPY_BYTES)
                if account is not None:
                    os.fchown(file.fileno(), account.user_id, account.group_id)
        else:
            raise CannotStartError(f"The uploaded archive has an entry that is no file, folder or link: {member.name}.")
    return links


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise CannotStartError(f"The uploaded archive has an entry outside its folder: {name}.")
    return path


def _make_folders(into: Path, folder: Path, account: Account | None) -> None:
    """Make a folder and its parents; one that already exists must be a folder and not a link."""
    for parent in [*reversed(folder.relative_to(into).parents), folder.relative_to(into)]:
        path = into / parent
        if path == into:
            continue
        try:
            path.mkdir(mode=0o755)
            _give(path, account)
        except FileExistsError:
            if path.is_symlink() or not path.is_dir():
                what = f"The uploaded archive has an entry below {parent}, which is no folder."
                raise CannotStartError(what) from None


def _give(path: Path, account: Account | None) -> None:
    if account is not None:
        account.own(path)


class _Bounded(io.RawIOBase):
    """The decompressed data, up to a limit; no single read, such as of a header, may take much memory."""

    def __init__(self, unzipped: gzip.GzipFile, most_bytes: int) -> None:
        self._unzipped = unzipped
        self._most_bytes = most_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._unzipped.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._check(offset)
        return self._unzipped.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _LARGEST_READ:
            raise tarfile.ReadError("it has a header of several megabytes")
        self._check(self._unzipped.tell() + size)
        return self._unzipped.read(size)

    def _check(self, position: int) -> None:
        # What tar adds at the end, and a read beyond it, is not counted against small archives.
        if position > self._most_bytes + tarfile.RECORDSIZE + _COPY_BYTES:
            raise CannotStartError(f"The uploaded archive has more than {self._most_bytes / 2**20:,.0f} MiB unpacked.")
