"""Queries on pools and on their reported traffic."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Integer, RowMapping, cast, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from services.contracts.serving import PoolSpec
from services.db.tables import pool_plans, pool_traffic, pools
from services.serving.repository.specs import Rows, SpecRows, record_of

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class PoolRecord:
    """A row of ``pools``."""

    name: str
    tenant_id: str
    key_id: str
    document: dict[str, Any]  #: The spec in its stored form
    revision: int
    plan_id: str | None  #: The plan in force
    planned_at: datetime | None
    deleted_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def spec(self) -> PoolSpec:
        """The spec as an operator submitted it."""
        return PoolSpec.as_stored(self.document)


class PoolRows(SpecRows[PoolRecord]):
    """Queries on pools."""

    table, what = pools, "pool"

    def _record(self, row: RowMapping) -> PoolRecord:
        return pool_record(row)

    async def remove(self, name: str) -> None:
        """Remove a pool and its reported traffic."""
        await self._connection.execute(delete(pool_traffic).where(pool_traffic.c.pool == name))
        await super().remove(name)

    async def stale(self, names: Collection[str], plan_interval: timedelta) -> set[str]:
        """Return which of these pools run by a plan that was made for an earlier interval."""
        slot_at = func.date_bin(planned_every(plan_interval), func.now(), EPOCH)
        # A plan that is no longer kept is an old one.
        is_stale = func.coalesce(pool_plans.c.slot_at < slot_at, pools.c.plan_id.is_not(None))
        joined = pools.outerjoin(pool_plans, pool_plans.c.id == pools.c.plan_id)
        query = select(pools.c.name).select_from(joined).where(pools.c.name.in_(names), is_stale)
        return set((await self._connection.execute(query)).scalars())


def pool_record(row: RowMapping) -> PoolRecord:
    return record_of(PoolRecord, row, document=row["spec"])


def planned_every(default: timedelta) -> ColumnElement[timedelta]:
    """Return how often a pool is planned, as an expression for queries on ``pools``."""
    minutes = cast(pools.c.spec["plan_every_min"].astext, Integer)
    return func.coalesce(func.make_interval(0, 0, 0, 0, 0, minutes), default)


Counts = dict[str, dict[str, int]]
"""Requests of a window: by what partitions are counted as and by class, classes without any left out."""


class TrafficRows(Rows):
    """Queries on windows of traffic."""

    async def replace(self, pool: str, source: str, windows: Sequence[tuple[datetime, Counts]]) -> None:
        """Write windows by their starts, replacing earlier reports of the same source."""
        rows = [{"pool": pool, "start_at": at, "source": source, "counts": counts} for at, counts in windows]
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
