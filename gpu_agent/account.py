"""The accounts that jobs run as, on a host where the agent is root: its own choice, or that of a job's user."""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from services.core.domain.errors import DomainError

SUPERUSER = "root"
_NEEDED_RIGHTS = 1 << 0 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_SETGID and CAP_SETUID."""


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

    def can_enter(self, folder: Path) -> bool:
        """Return whether the account may enter a folder, by trying: access lists and remote file systems count too."""
        done = subprocess.run(
            ["/bin/sh", "-c", 'cd -P -- "$0"', str(folder)],
            cwd="/",
            env={},
            user=self.user_id,
            group=self.group_id,
            extra_groups=self.groups,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode == 0

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


def account_of_job(name: str) -> Account | None:
    """Return the account that a job's user asks for; None if it is the agent's own.

    Raises:
        DomainError: This node cannot run jobs as that account; the message is a sentence for the job's owner.
    """
    asked = f"its user's jobs run as the account {name}, "
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise DomainError(f"{asked}which does not exist on this node") from None
    if entry.pw_uid == 0 and name != SUPERUSER:
        raise DomainError(f"{asked}which has the user id 0; only {SUPERUSER} itself may")
    if entry.pw_uid == os.geteuid():
        return None
    if not _may_change_accounts():
        own = f"user id {os.geteuid()}"
        raise DomainError(f"{asked}but the agent of this node runs as {own} and may not become another account")
    return find_account(name)


def _may_change_accounts() -> bool:
    """Return whether this process may become another user: root may, unless its container forbids it."""
    if os.geteuid() != 0:
        return False
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")]
    return not found or found[0] & _NEEDED_RIGHTS == _NEEDED_RIGHTS
