"""The first tenant and the first admin key, made exactly once whoever starts and whoever is killed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.access import insert_key
from services.admission.keys import is_secret, new_secret
from services.contracts.identity import KeySpec, Role, TenantLimits
from services.db import locks
from services.db.engine import is_connection_error
from services.db.tables.admission import api_keys, tenants
from services.kit.logging import Log

log = Log(__name__)

DEFAULT_TENANT = "default"
KEY_FILE = "admin.key"
RETRY_EVERY_S = 0.25


async def ensure_first_admin_patiently(engine: AsyncEngine, data_dir: Path, patience_s: float = 20) -> str | None:
    """Do as ``ensure_first_admin``, and wait for a database that is starting up beside us."""
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return await ensure_first_admin(engine, data_dir)
        except Exception as error:
            if not is_connection_error(error) or time.monotonic() > deadline_s:
                raise
            log.warning("admin_key.no_database", error=str(error))
        await asyncio.sleep(RETRY_EVERY_S)


async def ensure_first_admin(engine: AsyncEngine, data_dir: Path) -> str | None:
    """Make the tenant `default` and an admin key, unless there is an admin key; return the key's secret if it was made.

    The secret is on disk, readable by its owner only, before its hash is in the database: whoever is killed in between
    finds it there at the next start and stores the same key. The advisory lock lets one process at a time look.
    """
    async with engine.begin() as connection:
        await connection.execute(text(f"SELECT pg_advisory_xact_lock({locks.FIRST_START})"))
        admins = await connection.execute(select(api_keys.c.id).where(api_keys.c.role == Role.ADMIN).limit(1))
        if admins.one_or_none() is not None:
            return None
        secret = _kept_secret(data_dir / KEY_FILE)
        tenant = {"id": DEFAULT_TENANT, "limits": TenantLimits().model_dump()}
        await connection.execute(insert(tenants).values(tenant).on_conflict_do_nothing())
        key, _ = await insert_key(
            connection, KeySpec(tenant_id=DEFAULT_TENANT, role=Role.ADMIN, label="made at the first start"), secret
        )
    log.info("admin_key.created", key_id=key.id, file=str(data_dir / KEY_FILE))
    return secret


def _kept_secret(path: Path) -> str:
    """Return the secret in ``path``; a new one is on disk before it is returned."""
    try:
        if is_secret(secret := path.read_text().strip()):
            return secret
    except FileNotFoundError:
        pass
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = new_secret()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secret + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return secret


def show_secret(secret: str, data_dir: Path) -> None:
    """Print the key for whoever started this process by hand; under the supervisor, output is kept in log files, and
    the command line shows the key instead."""
    if "WATTSHIFT_SUPERVISED" not in os.environ:
        print(f"admin key, kept in {data_dir / KEY_FILE}: {secret}", file=sys.stdout, flush=True)
