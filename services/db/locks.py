"""The advisory locks of the database, in one place, so that no two purposes share a number."""

from services.db.database import Connection

MIGRATION = 4_269_697_283  #: Held while the schema changes

LEADERSHIP = 4_269_697_284  #: Held by the scheduler that decides, for as long as it does

REPLAY = 4_269_697_285  #: Held while the start of a replay is looked up or set

ADMIN_KEYS = 4_269_697_286
"""Held while it is looked up which admin keys are valid, and that is changed: at the first start, and by admins."""

CARBON_LEARNING = 4_269_697_287  #: Held while forecasts of carbon intensity are learned: one replica does it for all

LEDGER_UPKEEP = 4_269_697_288  #: Held while old lines of the ledger are combined, or given back to idle

BATCHES = 4_269_697_289  #: Held by the serving process that works on batches, for as long as it does

GPUS_HELD = 4_269_697_290
"""Held while jobs of tenants with a limit of GPUs are started here, or any are given to a cell: each sees the other."""

SECRETS = 1  #: Held, together with a hash of the tenant's id, while one of the tenant's secrets is set

UPLOADS = 2
"""Held, together with a hash of the tenant's id, while one of the tenant's uploads begins: their sizes are added up."""


async def try_session_lock(connection: Connection, number: int) -> bool:
    """Take a lock for as long as the connection is open; return False if another connection has it."""
    return await connection.fetchval("SELECT pg_try_advisory_lock($1)", number)
