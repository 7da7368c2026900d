"""The audit log: what operators did, and what nodes said themselves, in the transaction of the change itself."""

from typing import Any

from services.contracts.identity import Identity
from services.db.database import Connection

_NOTE = "INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ($1, $2, $3, $4, $5)"


async def note(connection: Connection, caller: Identity | None, action: str, target: str, **data: Any) -> None:
    """Record what was done to what, and by whom; None: by the node itself, which has no key."""
    who = ("", "") if caller is None else (caller.tenant_id, caller.key_id)
    await connection.execute(_NOTE, *who, action, target, data)
