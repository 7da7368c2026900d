"""Open one of root's folders to the account that its jobs run as, by access lists: no job runs as root.

A folder whose list names the account has been opened to it by its owner, and the agent shows it to the account's jobs
even if the folders above it are closed (``gpu_agent.enclosure``). New files in it are open to the account too.
"""

import errno
import os
import pwd
import stat
import struct
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_VERSION, _NO_ID = 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP, _GROUPS, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_OF_THE_SYSTEM = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr", "var")
)
_CODE = Path(__file__).resolve().parents[3]
_R, _W, _X = 4, 2, 1

Entries = dict[tuple[int, int], int]  #: Rights by the kind of an entry and the id that it names


def may_be_opened(folder: Path, kept: Collection[Path]) -> bool:
    """Return whether this process may open a folder: none of the system's, and none by which a job could become root.

    Args:
        kept: What the installation needs; a folder may neither lie in it nor contain it.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    real, home = Path(os.path.realpath(folder)), Path(os.path.realpath(pwd.getpwuid(0).pw_dir))
    if home.is_relative_to(real) or real.parts[1] in _OF_THE_SYSTEM:
        return False
    if real.is_relative_to(home) and real.relative_to(home).parts[0].startswith("."):
        return False
    ends = [Path(os.path.realpath(each)) for each in (*kept, _CODE)]
    return not any(real.is_relative_to(end) or end.is_relative_to(real) for end in ends)


def has_lists(folder: Path) -> bool:
    """Return whether the file system of a folder has access lists."""
    try:
        return bool(os.getxattr(folder, _ACCESS))
    except OSError as error:
        return error.errno == errno.ENODATA


def is_named(user_id: int, folder: Path) -> bool:
    """Return whether a folder's access list names an account."""
    with suppress(OSError):
        return (_USER, user_id) in _read(os.getxattr(folder, _ACCESS))
    return False


def open_to(user_id: int, folder: Path, *, writes: bool) -> bool:
    """Let an account read a folder and everything in it, and write there if ``writes``; return whether that is new.

    Files with a second name stay as they are, as that name may be outside the folder.

    Raises:
        OSError: The file system has no access lists, or cannot be written to.
    """
    rights = _R | _X | (_W if writes else 0)
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        is_new = _grant(top, user_id, rights)
        device = os.fstat(top).st_dev
        # By descriptors: an account that can write there already must not lead this elsewhere by a link.
        for _, folders, files, at in os.fwalk(".", dir_fd=top):
            folders[:] = [name for name in folders if _grant_in(at, name, user_id, rights, device)]
            for name in files:
                _grant_in(at, name, user_id, rights, device)
    finally:
        os.close(top)
    return is_new


def let_through(user_id: int, folder: Path) -> None:
    """Let an account pass through a folder."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _set(at, _ACCESS, _with(_entries(at), user_id, _X))
    finally:
        os.close(at)


def _grant_in(at: int, name: str, user_id: int, rights: int, device: int) -> bool:
    with suppress(OSError):
        status = os.stat(name, dir_fd=at, follow_symlinks=False)
        if not (stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)):
            return False
        found = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        try:
            status = os.fstat(found)
            if status.st_dev == device and (stat.S_ISDIR(status.st_mode) or status.st_nlink == 1):
                _grant(found, user_id, rights)
                return True
        finally:
            os.close(found)
    return False


def _grant(at: int, user_id: int, rights: int) -> bool:
    mode = os.fstat(at).st_mode
    if not stat.S_ISDIR(mode) and not mode & stat.S_IXUSR:
        rights &= ~_X
    entries = _entries(at)
    wanted = _with(entries, user_id, rights)
    if stat.S_ISDIR(mode):
        _set(at, _DEFAULT, wanted)
    if wanted != entries:
        _set(at, _ACCESS, wanted)
    return wanted != entries


def _with(entries: Entries, user_id: int, rights: int) -> Entries:
    """Return the access list with rights added for an account, and for nobody else."""
    mask = entries.get((_MASK, _NO_ID), _R | _W | _X)
    limited = {key: each & mask if key[0] in (_USER, _GROUP, _GROUPS) else each for key, each in entries.items()}
    limited[_USER, user_id] = limited.get((_USER, user_id), 0) | rights
    limited[_MASK, _NO_ID] = 0
    for (kind, _), each in limited.items():
        if kind in (_USER, _GROUP, _GROUPS):
            limited[_MASK, _NO_ID] |= each
    return limited


def _entries(at: int) -> Entries:
    with suppress(OSError):
        return _read(os.getxattr(at, _ACCESS))
    mode = os.fstat(at).st_mode
    kinds = {_OWNER: 6, _GROUP: 3, _OTHERS: 0}
    return {(kind, _NO_ID): mode >> shift & 7 for kind, shift in kinds.items()}


def _read(raw: bytes) -> Entries:
    return {(kind, of): rights for kind, rights, of in struct.iter_unpack("<HHI", raw[4:])}


def _set(at: int, name: str, entries: Entries) -> None:
    rows = (struct.pack("<HHI", kind, rights, of) for (kind, of), rights in sorted(entries.items()))
    os.setxattr(at, name, struct.pack("<I", _VERSION) + b"".join(rows))
