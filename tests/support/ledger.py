"""The ledger's days and their end, when a test wants it."""

from __future__ import annotations

from datetime import date, timedelta

from services.db import locks
from services.db.database import Database
from services.kit.ids import utc_now
from services.telemetry.repository.retention import fold
from services.telemetry.repository.seals import Sign, close_day

TABLES = (
    "energy_usages, energy_days, energy_hours, ledger_lanes, ledger_batches, ledger_days, ledger_heads, ledger_sums"
)


def unsigned(text: str) -> tuple[None, None]:
    """Sign nothing, as where there is no key."""
    return None, None


async def end_day(database: Database, sign: Sign = unsigned) -> date:
    """State what the ledger has now, as the next day."""
    async with database.connection() as connection:
        last = await connection.fetchval("SELECT max(day) FROM ledger_days")
    day = max(utc_now().date(), (last or date.min) + timedelta(days=1))
    await close_day(database, sign, day)
    return day


async def fold_now(database: Database, keep_s: float, sign: Sign = unsigned) -> int:
    """End the day, and combine what is older than ``keep_s``."""
    await end_day(database, sign)
    return await fold(database, sign, keep_s)


_DELETE = """
WITH RECURSIVE found AS (
    SELECT name::regclass AS id FROM unnest($1::text[]) AS name
    UNION SELECT c.conrelid::regclass FROM pg_constraint c JOIN found ON c.confrelid = found.id AND c.contype = 'f'
)
SELECT string_agg(format('DELETE FROM %s', id), '; ') FROM found
"""


async def delete_rows(database: Database, tables: str) -> None:
    """Do as ``empty_ledger``, which takes ten times as long where there are few rows."""
    async with database.transaction() as connection:
        await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(await connection.fetchval(_DELETE, f"{TABLES}, {tables}".split(", ")))


async def empty_ledger(database: Database, *more: str) -> None:
    """Remove all lines, and all rows of ``more`` tables, which nothing else may do; not while the ledger is kept up."""
    async with database.transaction() as connection:
        await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
        await connection.execute("SET LOCAL session_replication_role = replica")
        await connection.execute(f"TRUNCATE {', '.join((TABLES, *more))} CASCADE")
