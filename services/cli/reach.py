"""Whether an account of this machine can enter a folder, judged by owners and modes."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

ACCESS_LIST = "system.posix_acl_access"
_ENTER = 0o1


def blocking_folder(folder: Path, account: str) -> Path | None:
    """Return the first folder on the way to ``folder`` that an account cannot enter.

    None if there is none, or if it cannot be known here: the account is not one of this machine, a folder has an access
    list, or the caller cannot look at it. The agent tries it before it starts a job.
    """
    try:
        entry = pwd.getpwnam(account)
        groups = os.getgrouplist(account, entry.pw_gid)
        if entry.pw_uid == 0:
            return None
        real = folder.resolve(strict=True)
        for path in (*reversed(real.parents), real):
            status = path.stat()
            if hasattr(os, "listxattr") and ACCESS_LIST in os.listxattr(path):
                return None
            shift = 6 if status.st_uid == entry.pw_uid else 3 if status.st_gid in groups else 0
            if not status.st_mode >> shift & _ENTER:
                return path
    except (KeyError, OSError):
        return None
    return None
