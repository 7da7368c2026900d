"""Which tables have been written to, by PostgreSQL's own counts, so that writers need do nothing."""

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

# A transaction's writes are counted a moment after its end: within a second where its session has more to do.
_WRITES = text("""
SELECT c.relname AS name,
       sum(pg_stat_get_tuples_inserted(c.oid) + pg_stat_get_tuples_updated(c.oid)
           + pg_stat_get_tuples_deleted(c.oid))::bigint AS writes
FROM pg_class c WHERE c.relkind = 'r' AND c.relname = ANY(:tables) GROUP BY c.relname
""")


async def read_writes(connection: AsyncConnection, tables: Sequence[str]) -> dict[str, int]:
    """Return how many rows have ever been written or deleted, by table."""
    rows = await connection.execute(_WRITES, {"tables": list(tables)})
    return {str(name): int(writes) for name, writes in rows}
