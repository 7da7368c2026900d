"""The folder of an installation's sockets, which only the control plane can enter.

Its path is short: the address of a Unix socket has at most 107 bytes on Linux and 103 on macOS, and a data folder may
be nested deeply. It is made anew at each start, under a name that nobody has used before, and removed at the end.
"""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

from services.standalone.process import Account, StackError

BASES = (Path("/run"), Path("/tmp"))
"""The first is root's. That of a user (`XDG_RUNTIME_DIR`) goes when they log out, and what they started stays."""

LONGEST_PATH = 107 if sys.platform == "linux" else 103
POSTGRES = "postgres"  #: The folder in it of PostgreSQL's account, which can make its socket nowhere else
VALKEY = "valkey.sock"

_PREFIX = "wattshift-"
_LONGEST_NAME = f"{_PREFIX}12345678/{POSTGRES}/.s.PGSQL.5432"


def make(postgres: Account | None = None) -> Path:
    """Return a new folder (0700).

    Args:
        postgres: The account of PostgreSQL, if not the caller's: its group may pass through, and read nothing.

    Raises:
        StackError: no folder with a short path can be made.
    """
    for base in (path.resolve() for path in BASES):
        try:
            if not _is_safe(base) or len(os.fsencode(base / _LONGEST_NAME)) > LONGEST_PATH:
                continue
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            inner = folder / POSTGRES
            inner.mkdir(mode=0o700)
            if postgres:
                os.chown(inner, postgres.user_id, postgres.group_id)
                os.chown(folder, -1, postgres.group_id)
                folder.chmod(0o710)
        except OSError:
            continue
        return folder
    raise StackError(f"no folder for sockets can be made in {' or '.join(map(str, BASES))}")


def remove(folder: Path) -> None:
    """Remove a folder that `make` made; one that it did not make, or that belongs to others, is left alone."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if folder.name.startswith(_PREFIX) and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            shutil.rmtree(folder)


def _is_safe(base: Path) -> bool:
    """Return whether nobody else can rename or remove what is made in a folder."""
    found = base.stat()
    is_closed = not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX)
    return found.st_uid in (0, os.geteuid()) and is_closed
