"""Replace the installation's own admin key: ``python -m services.admission.admin_key``, for the data folder's owner.

It needs ``DATABASE_URL`` and ``WATTSHIFT_DATA_DIR`` and no key: whoever can read the database's password can also write
to the database. ``wattshift admin-key --new`` runs it.
"""

import asyncio
import os
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.first_start import DEFAULT_TENANT, KEY_FILE, NEW_LABEL, OWN_LABELS, write_secret
from services.admission.keys import key_hash, new_secret
from services.admission.repository.access import AccessRepository, write_audit
from services.contracts.identity import Identity, KeySpec, Role, TenantSpec
from services.db.engine import create_engine
from services.kit.settings import NOT_POSTGRES, exit_with, is_postgres


async def replace_admin_key(engine: AsyncEngine, data_dir: Path) -> list[str]:
    """Create an admin key, write it to ``admin.key`` and revoke the earlier ones; return the revoked keys' ids.

    Admin keys that people created themselves stay valid. The new key is in the database before the file names it: if
    the process is killed in between, the file's key is refused, and a second run creates another one.
    """
    secret = new_secret()
    async with engine.begin() as connection:
        repository = AccessRepository(connection)
        await repository.lock_admin_keys()
        revoked = await repository.revoke_admin_keys(OWN_LABELS)
        await repository.insert_tenant(TenantSpec(id=DEFAULT_TENANT))
        spec = KeySpec(tenant_id=DEFAULT_TENANT, role=Role.ADMIN, label=NEW_LABEL)
        key = await repository.insert_key(spec, key_hash(secret))
        owner = Identity(tenant_id=DEFAULT_TENANT, role=Role.ADMIN, key_id=key.id)
        await write_audit(connection, owner, "key.replaced", key.id, revoked=revoked)
    write_secret(data_dir / KEY_FILE, secret)
    return revoked


async def _replace(database_url: str, data_dir: Path) -> None:
    engine = create_engine(database_url, pool_size=1, application_name="admin-key")
    try:
        await replace_admin_key(engine, data_dir)
    finally:
        await engine.dispose()


def main() -> None:
    """Replace the key; exit 2 if ``DATABASE_URL`` names no PostgreSQL database."""
    url = os.environ.get("DATABASE_URL", "")
    if not is_postgres(url):
        exit_with(NOT_POSTGRES)
    asyncio.run(_replace(url, Path(os.environ["WATTSHIFT_DATA_DIR"])))


if __name__ == "__main__":
    main()
