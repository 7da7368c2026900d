"""What operators did."""

from services.contracts.identity import Identity
from services.db.database import Connection
from services.scheduler.repository.documents import Json

AUDIT = "INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ($1, $2, $3, $4, $5)"


async def note(connection: Connection, caller: Identity, action: str, target: str, data: Json | None = None) -> None:
    """Record who did what to what."""
    await connection.execute(AUDIT, caller.tenant_id, caller.key_id, action, target, data or {})
