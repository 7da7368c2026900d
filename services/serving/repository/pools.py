"""Queries that several use cases on pools make, each within its caller's transaction."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from sqlalchemy import RowMapping, func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.identity import Identity
from services.contracts.serving import InstanceState
from services.db.tables.admission import audit_log
from services.db.tables.pools import pool_instances, pools
from services.kit.problems import not_found

Lock = Literal["share", "update"]


async def find_pool(connection: AsyncConnection, name: str, caller: Identity, lock: Lock | None = None) -> RowMapping:
    """Return a pool's row, locked if asked: ``share`` keeps it from being changed, ``update`` from being read so.

    Raises:
        ProblemError: 404 where there is none that the caller may see.
    """
    query = select(pools).where(pools.c.name == name)
    if not caller.is_operator:
        query = query.where(pools.c.tenant_id == caller.tenant_id)
    if lock is not None:
        query = query.with_for_update(read=lock == "share")
    row = (await connection.execute(query)).mappings().one_or_none()
    if row is None:
        raise not_found("pool")
    return row


async def live_instances(connection: AsyncConnection, names: Collection[str]) -> dict[str, dict[InstanceState, int]]:
    """Return how many instances each of these pools has, by state; those that ended are left out."""
    c = pool_instances.c
    query = select(c.pool, c.state, func.count()).where(c.pool.in_(names), c.state != InstanceState.ENDED)
    found: dict[str, dict[InstanceState, int]] = {name: {} for name in names}
    for pool, state, count in await connection.execute(query.group_by(c.pool, c.state)):
        found[pool][InstanceState(state)] = count
    return found


async def audit(connection: AsyncConnection, caller: Identity, action: str, target: str, **data: Any) -> None:
    """Write down what an operator did."""
    await connection.execute(
        insert(audit_log).values(
            tenant_id=caller.tenant_id, key_id=caller.key_id, action=action, target=target, data=data
        )
    )
