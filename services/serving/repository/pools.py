"""Queries on pools, and the audit log of operators' actions on them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Integer, RowMapping, Select, cast, delete, func, insert, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.identity import Identity
from services.contracts.serving import InstanceState, Pool, PoolSpec
from services.db.tables.admission import audit_log
from services.db.tables.pools import pool_instances, pool_plans, pool_traffic, pools
from services.kit.problems import not_found

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Lock = Literal["share", "update"]


@dataclass(frozen=True)
class PoolRecord:
    """A row of ``pools``.

    Attributes:
        document: The spec as it is stored.
        plan_id: The plan in force.
    """

    name: str
    tenant_id: str
    key_id: str
    document: dict[str, Any]
    revision: int
    plan_id: str | None
    planned_at: datetime | None
    deleted_at: datetime | None
    created_at: datetime
    updated_at: datetime

    @property
    def spec(self) -> PoolSpec:
        """The spec as an operator submitted it."""
        return PoolSpec.model_validate(self.document)


class PoolRows:
    """Queries on pools."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def find(self, name: str, caller: Identity, lock: Lock | None = None) -> PoolRecord:
        """Return a pool, locked on request: ``share`` keeps it from being changed, ``update`` also from being locked by
        others.

        Raises:
            ProblemError: 404 where there is none that the caller may see.
        """
        query = select(pools).where(pools.c.name == name)
        if not caller.is_operator:
            query = query.where(pools.c.tenant_id == caller.tenant_id)
        if lock is not None:
            query = query.with_for_update(read=lock == "share")
        row = (await self._connection.execute(query)).mappings().one_or_none()
        if row is None:
            raise not_found("pool")
        return pool_record(row)

    async def add(self, name: str, spec: PoolSpec, caller: Identity) -> bool:
        """Create a pool, and return whether there was none of that name."""
        values = {
            "name": name,
            "tenant_id": caller.tenant_id,
            "key_id": caller.key_id,
            "spec": spec.model_dump(mode="json"),
        }
        statement = upsert(pools).values(values).on_conflict_do_nothing().returning(pools.c.name)
        return (await self._connection.execute(statement)).one_or_none() is not None

    async def set_spec(self, name: str, spec: PoolSpec, revision: int) -> None:
        """Replace a pool's spec."""
        values = {"spec": spec.model_dump(mode="json"), "revision": revision, "updated_at": func.now()}
        await self._connection.execute(update(pools).where(pools.c.name == name).values(values))

    async def mark_deleted(self, name: str) -> None:
        """Mark a pool for removal once its last instance has ended."""
        values = {"deleted_at": func.now(), "updated_at": func.now()}
        await self._connection.execute(update(pools).where(pools.c.name == name).values(values))

    async def remove(self, name: str) -> None:
        """Remove a pool and its reported traffic."""
        await self._connection.execute(delete(pool_traffic).where(pool_traffic.c.pool == name))
        await self._connection.execute(delete(pools).where(pools.c.name == name))

    async def show(self, name: str, plan_interval: timedelta) -> Pool:
        """Return an existing pool as callers see it."""
        (pool,) = await self._shown(_with_staleness(plan_interval).where(pools.c.name == name))
        return pool

    async def page(
        self, plan_interval: timedelta, *, tenant_id: str | None, after: str | None, limit: int
    ) -> list[Pool]:
        """Return pools by name, of one tenant if one is given."""
        query = _with_staleness(plan_interval).order_by(pools.c.name).limit(limit)
        if tenant_id is not None:
            query = query.where(pools.c.tenant_id == tenant_id)
        if after is not None:
            query = query.where(pools.c.name > after)
        return await self._shown(query)

    async def audit(self, caller: Identity, action: str, target: str, **data: Any) -> None:
        """Record an operator's action."""
        values = {"tenant_id": caller.tenant_id, "key_id": caller.key_id, "action": action, "target": target}
        await self._connection.execute(insert(audit_log).values(**values, data=data))

    async def _shown(self, query: Select[Any]) -> list[Pool]:
        rows = (await self._connection.execute(query)).mappings().all()
        counts = await self._live_instances([row["name"] for row in rows])
        fields = ("name", "tenant_id", "revision", "spec", "created_at", "updated_at", "plan_id", "planned_at")
        return [
            Pool.model_validate(
                {field: row[field] for field in fields}
                | {
                    "is_deleted": row["deleted_at"] is not None,
                    "is_plan_stale": row["is_plan_stale"],
                    "instances": counts[row["name"]],
                }
            )
            for row in rows
        ]

    async def _live_instances(self, names: Collection[str]) -> dict[str, dict[InstanceState, int]]:
        """Return how many instances each of these pools has, by state; those that ended are left out."""
        c = pool_instances.c
        query = select(c.pool, c.state, func.count()).where(c.pool.in_(names), c.state != InstanceState.ENDED)
        found: dict[str, dict[InstanceState, int]] = {name: {} for name in names}
        for pool, state, count in await self._connection.execute(query.group_by(c.pool, c.state)):
            found[pool][InstanceState(state)] = count
        return found


def pool_record(row: RowMapping) -> PoolRecord:
    """Return a row of ``pools`` as a record."""
    return PoolRecord(
        name=row["name"],
        tenant_id=row["tenant_id"],
        key_id=row["key_id"],
        document=row["spec"],
        revision=row["revision"],
        plan_id=row["plan_id"],
        planned_at=row["planned_at"],
        deleted_at=row["deleted_at"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def planned_every(default: timedelta) -> ColumnElement[timedelta]:
    """Return how often a pool is planned, where a query selects from ``pools``."""
    minutes = cast(pools.c.spec["plan_every_min"].astext, Integer)
    return func.coalesce(func.make_interval(0, 0, 0, 0, 0, minutes), default)


def _with_staleness(plan_interval: timedelta) -> Select[Any]:
    slot_at = func.date_bin(planned_every(plan_interval), func.now(), EPOCH)
    # A plan that is no longer kept is an old one.
    is_stale = func.coalesce(pool_plans.c.slot_at < slot_at, pools.c.plan_id.is_not(None))
    joined = pools.outerjoin(pool_plans, pool_plans.c.id == pools.c.plan_id)
    return select(pools, is_stale.label("is_plan_stale")).select_from(joined)
