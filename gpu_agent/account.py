"""The accounts that jobs run as: the tenant's, that of the job's user or, for the owner's jobs alone, the agent's."""

import hashlib
import os
import pwd
import re
import subprocess
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.contracts.commands import StartGang
from services.core.domain.errors import DomainError

SUPERUSER = "root"
_NEEDED_RIGHTS = 1 << 0 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_SETGID and CAP_SETUID."""
_SHELL = "/bin/sh"


class NoAccountError(DomainError):
    """This node has no account that the job may run as; the message is a sentence for the job's owner."""


@dataclass(frozen=True)
class Account:
    """A user that jobs run as: an existing user of this host, or one that belongs to a tenant."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...]
    home: str
    shell: str
    is_tenants: bool = False  #: Whether it belongs to a tenant; the host's list of users does not contain such accounts

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}

    @property
    def entry(self) -> str:
        """The account's line in a list of users."""
        return f"{self.name}:x:{self.user_id}:{self.group_id}::{self.home}:{self.shell}"

    def can_enter(self, folder: Path) -> bool:
        """Return whether the account may enter a folder, by trying it: access lists and remote file systems count."""
        return self._does('cd -P -- "$0"', folder)

    def make(self, folder: Path) -> bool:
        """Make a folder and its parents as the account; return whether the folder exists and can be entered."""
        return self._does('mkdir -p -- "$0" && cd -P -- "$0"', folder)

    def _does(self, words: str, folder: Path) -> bool:
        done = subprocess.run(
            ["/bin/sh", "-c", words, str(folder)],
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
        os.chown(path, self.user_id, self.group_id, follow_symlinks=False)


def shim_user(account: Account | None) -> list[tuple[str, str]]:
    """Return who a program runs as, as an entry of its shim's spec; none for this process's own user."""
    return [("user", " ".join(map(str, (account.user_id, account.group_id, *account.groups))))] if account else []


class TenantAccounts:
    """Gives each tenant a user id of its own, the same on all nodes.

    The id is derived from the tenant's. Where two tenants would get the same one, the second takes the next free id;
    ``folder`` records which tenant has which, in one file for each id.

    Args:
        folder: Where assigned ids are recorded; preferably a folder that all nodes share.
    """

    def __init__(self, first: int, last: int, folder: Path, homes: Path) -> None:
        self._first = first
        self._count = last - first + 1
        self._folder = folder
        self._homes = homes

    def account_of(self, tenant_id: str) -> Account:
        """Return the account of a tenant, with a home folder that nobody else can enter.

        Raises:
            DomainError: All ids are taken.
            OSError: The id cannot be recorded.
        """
        user_id = self._number(tenant_id)
        name = "tenant-" + (re.sub(r"[^a-z0-9_-]+", "-", tenant_id.lower()).strip("-")[:24] or str(user_id))
        home = self._homes / str(user_id)
        account = Account(name, user_id, user_id, (), str(home), _SHELL, is_tenants=True)
        home.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
        if home.lstat().st_uid != user_id:
            account.own(home)
        return account

    def _number(self, tenant_id: str) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        begin = int.from_bytes(hashlib.sha256(tenant_id.encode()).digest()[:8], "big") % self._count
        for step in range(self._count):
            user_id = self._first + (begin + step) % self._count
            path = self._folder / str(user_id)
            draft = self._folder / f".{user_id}.{os.getpid()}.{threading.get_ident()}"
            try:
                if path.read_text() == tenant_id:
                    return user_id
                continue
            except FileNotFoundError:
                draft.write_text(tenant_id)
            try:
                os.link(draft, path)  # whole or not at all, and the first of two agents alone
            except FileExistsError:
                if path.read_text() != tenant_id:
                    continue
            finally:
                draft.unlink(missing_ok=True)
            return user_id
        raise DomainError(f"all {self._count} user ids for tenants' jobs are taken (GPU_AGENT_TENANT_UIDS)")


class Identities:
    """Decides which account a job runs as.

    Args:
        tenants: The tenants' accounts; None where this agent cannot become another user.
        chosen: The account that jobs of the owner's tenants run as; None for their tenant's account or the agent's own.
        owners: The tenants of whoever runs this agent; an agent that cannot become another user runs only their jobs.
        reserved: User ids that processes of the control plane run as; no job gets one of them.
    """

    def __init__(
        self, tenants: TenantAccounts | None, chosen: Account | None, owners: Collection[str], reserved: Collection[int]
    ) -> None:
        self._tenants, self._chosen, self._owners, self._reserved = tenants, chosen, owners, reserved

    def account_of(self, start: StartGang) -> Account | None:
        """Return the account of a job; None for the agent's own.

        Raises:
            NoAccountError: This node has no account that the job may run as.
            DomainError: The account cannot be made now; the message is a sentence for the job's owner.
        """
        is_owners, account = start.tenant_id in self._owners, None
        if start.account is not None and start.account != SUPERUSER:
            account = account_of_job(start.account)
        elif self._chosen is not None and is_owners:
            account = self._chosen
        elif self._tenants is not None:
            try:
                account = self._tenants.account_of(start.tenant_id)
            except OSError:
                what = "the account of its tenant cannot be written down: the node's disk may be full"
                raise DomainError(what) from None
        if account is not None:
            if account.user_id in self._reserved or account.user_id == 0:
                what = f"jobs cannot run as the account {account.name}: processes of the control plane do"
                raise NoAccountError(what)
            return account
        if os.geteuid() == 0:
            raise NoAccountError("this node cannot run jobs as another user than root, and runs none as root")
        if not is_owners:
            raise NoAccountError(
                f"this node cannot tell tenants apart: its agent runs as user id {os.geteuid()} and may not become "
                f"another user, so it runs jobs of {' and '.join(sorted(self._owners)) or 'no tenant'} alone. "
                "Run the agent as root, or the tenant's jobs on another node"
            )
        return None

    def of_owners(self) -> dict[str, Account]:
        """Return the accounts of the owner's tenants, without the agent's own and those that cannot be made now."""
        found: dict[str, Account] = {}
        for tenant_id in self._owners:
            with suppress(DomainError, OSError):
                if account := self._chosen or (self._tenants and self._tenants.account_of(tenant_id)):
                    found[tenant_id] = account
        return found


def find_account(name: str) -> Account | None:
    """Return the account with that name; None for the empty name, which means that no account was chosen.

    Raises:
        DomainError: There is no such user, or this process is not root and cannot become another user.
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
    """Return the account that a job's user asks for, None for the agent's own; ``NoAccountError``: it is unusable."""
    asked, own = f"its user's jobs run as the account {name}, ", os.geteuid()
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise NoAccountError(f"{asked}which does not exist on this node") from None
    if entry.pw_uid == 0:
        raise NoAccountError(f"{asked}which has the user id 0, and no job runs as the superuser")
    if entry.pw_uid == own:
        return None
    if not may_change_accounts():
        why = f"but the agent of this node runs as user id {own} and may not become another account"
        raise NoAccountError(f"{asked}{why}")
    return find_account(name)


def may_change_accounts() -> bool:
    """Return whether this process may become another user: root may, unless its container forbids it."""
    if os.geteuid() != 0:
        return False
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    found = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")]
    return not found or found[0] & _NEEDED_RIGHTS == _NEEDED_RIGHTS
