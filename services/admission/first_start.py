"""The first tenant and the first admin key, created exactly once even if processes start together or are killed."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.access import SUPERUSER
from services.admission.keys import KEY_PATTERN, key_hash, new_secret
from services.admission.repository.access import AccessRepository
from services.contracts.identity import KeySpec, Role, TenantSpec, UserSpec
from services.contracts.invalid import NAME_PATTERN
from services.db.engine import is_connection_error
from services.kit import files
from services.kit.logging import Log

log = Log(__name__)

DEFAULT_TENANT = "default"
KEY_FILE = "admin.key"
FIRST_LABEL = "made at the first start"
NEW_LABEL = "made by admin-key --new"
OWN_LABELS = (FIRST_LABEL, NEW_LABEL)  #: Labels of the admin keys that an installation makes itself
FIRST_USER = "admin"
RETRY_EVERY_S = 0.25


async def ensure_first_admin_patiently(
    engine: AsyncEngine, data_dir: Path, account: str = "", patience_s: float = 20
) -> str | None:
    """Call ``ensure_first_admin``, waiting for a database that is still starting."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return await ensure_first_admin(engine, data_dir, account)
        except Exception as error:
            if not is_connection_error(error) or time.monotonic() > deadline_s:
                raise
            log.warning("admin_key.no_database", error=str(error))
        await asyncio.sleep(RETRY_EVERY_S)


async def ensure_first_admin(engine: AsyncEngine, data_dir: Path, account: str = "") -> str | None:
    """Create the tenant `default` and an admin key, unless one exists; return the key's secret if it was created.

    If ``account`` is given, the installation's own admin keys that have no owner are given to a user with that account.

    The secret is on disk, readable by its owner only, before its hash is in the database: a process that was killed in
    between will find it at the next start and store the same key. An advisory lock lets one process at a time do this.
    """
    async with engine.begin() as connection:
        repository = AccessRepository(connection)
        await repository.lock_admin_keys()
        if await repository.has_admin_key():
            await _own_keys(repository, account)
            return None
        secret = _kept_secret(data_dir / KEY_FILE)
        await repository.insert_tenant(TenantSpec(id=DEFAULT_TENANT))
        spec = KeySpec(tenant_id=DEFAULT_TENANT, role=Role.ADMIN, label=FIRST_LABEL)
        key = await repository.insert_key(spec, key_hash(secret))
        await _own_keys(repository, account)
    log.info("admin_key.created", key_id=key.id, file=str(data_dir / KEY_FILE))
    return secret


async def _own_keys(repository: AccessRepository, account: str) -> None:
    """Give the installation's own keys to the user with this account, creating the user if need be."""
    if account in ("", SUPERUSER) or not await repository.has_unowned_admin_key(OWN_LABELS):
        return
    name = account if re.fullmatch(NAME_PATTERN, account) else FIRST_USER
    await repository.insert_user(DEFAULT_TENANT, UserSpec(name=name, account=account))
    user = await repository.user(DEFAULT_TENANT, name)
    if user is not None:
        await repository.own_admin_keys(OWN_LABELS, user.id)


def _kept_secret(path: Path) -> str:
    """Return the secret in ``path``; a new one is on disk before it is returned."""
    try:
        if re.fullmatch(KEY_PATTERN, secret := path.read_text().strip()):
            return secret
    except FileNotFoundError:
        pass
    secret = new_secret()
    write_secret(path, secret)
    return secret


def write_secret(path: Path, secret: str) -> None:
    """Write a secret to ``path``, readable by its owner only, and return once it is on disk."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    files.replace(path, f"{secret}\n".encode())


def show_secret(secret: str, data_dir: Path) -> None:
    """Print the key when the process was started by hand.

    Under the supervisor, output goes to log files, and the command line shows the key instead.
    """
    if "WATTSHIFT_SUPERVISED" not in os.environ:
        print(f"admin key, kept in {data_dir / KEY_FILE}: {secret}", file=sys.stdout, flush=True)
