"""The key of each instance of a pool: random, sealed in its row, and opened only for its node and the routers."""

import secrets

from services.db.sealing import Sealer

_PLACE = "instance key"


def new_instance_key(sealer: Sealer, tenant_id: str, instance: str) -> bytes | None:
    """Return a new key, sealed; None if the installation has no key to seal with."""
    return sealer.seal(secrets.token_urlsafe(32), _PLACE, tenant_id, instance) if sealer.has_key else None


def open_instance_key(sealer: Sealer, sealed: bytes, tenant_id: str, instance: str) -> str:
    """Return the key of an instance; ``SealError`` if it was sealed under another key of the installation."""
    return sealer.open(sealed, _PLACE, tenant_id, instance)
