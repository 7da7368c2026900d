"""The audit log."""

from typing import Any

from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.identity import Identity
from services.db.tables.admission import audit_log


async def write_audit(connection: AsyncConnection, caller: Identity, action: str, target: str, **data: Any) -> None:
    """Record an action of an operator or admin, in the transaction of the action itself."""
    await connection.execute(
        insert(audit_log).values(
            tenant_id=caller.tenant_id, key_id=caller.key_id, action=action, target=target, data=data
        )
    )
