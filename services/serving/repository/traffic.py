"""Queries on the reported traffic of pools."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.db.tables import pool_traffic, pools

Counts = dict[str, dict[str, int]]
"""Requests of a window: by what partitions are counted as and by class, classes without any left out."""


@dataclass(frozen=True)
class WindowCounts:
    """What one source saw of a pool in one window."""

    start_at: datetime
    counts: Counts


class TrafficRows:
    """Queries on windows of traffic."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def replace(self, pool: str, source: str, windows: Sequence[WindowCounts]) -> None:
        """Write windows, replacing earlier reports of the same source."""
        rows = [{"pool": pool, "start_at": each.start_at, "source": source, "counts": each.counts} for each in windows]
        statement = insert(pool_traffic)
        keys = ["pool", "start_at", "source"]
        replaced = {"counts": statement.excluded.counts}
        await self._connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=replaced), rows)

    async def recent(self, over: timedelta) -> dict[str, dict[datetime, Counts]]:
        """Return the windows of the last seconds by pool and start, all sources together."""
        c = pool_traffic.c
        query = select(c.pool, c.start_at, c.counts).where(c.start_at >= func.now() - over, c.start_at <= func.now())
        found: dict[str, dict[datetime, Counts]] = {}
        for pool, start_at, counts in await self._connection.execute(query.where(c.pool.in_(select(pools.c.name)))):
            total = found.setdefault(pool, {}).setdefault(start_at, {})
            for counted_as, by_class in counts.items():
                into = total.setdefault(counted_as, {})
                for name, count in by_class.items():
                    into[name] = into.get(name, 0) + count
        return found

    async def delete_older(self, keep_days: float) -> int:
        """Delete windows past their retention, and return how many."""
        kept = func.now() - timedelta(days=keep_days)
        return (await self._connection.execute(delete(pool_traffic).where(pool_traffic.c.start_at < kept))).rowcount
