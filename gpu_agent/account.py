"""The user that jobs run as, on a host where the agent is root so that it may set clocks and limits."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from services.core.domain.errors import DomainError


@dataclass(frozen=True)
class Account:
    """An ordinary user of this host."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    def own(self, path: Path) -> None:
        """Make the account the owner of a file or folder."""
        os.chown(path, self.user_id, self.group_id, follow_symlinks=False)


def find_account(name: str) -> Account | None:
    """Return the account of that name; None for the empty name: jobs run as the agent does.

    Raises:
        DomainError: There is no such user, or this process is not root and cannot become another.
    """
    if not name:
        return None
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise DomainError(f"there is no user {name!r} to run jobs as") from None
    if os.geteuid() not in (0, entry.pw_uid):
        raise DomainError(f"running jobs as {name!r} takes an agent that runs as root")
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return Account(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir, entry.pw_shell)
