"""Use cases on pools: make one or change it, see how it stands, delete it.

A pool's *revision* counts the changes of what plans and instances are made from. Whether plans are carried out is not
among these: switching it supersedes nothing that is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import RowMapping, Select, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.contracts.identity import Identity
from services.contracts.problems import FieldError, ProblemCode
from services.contracts.queries import PageQuery
from services.contracts.schema import NAME_PATTERN
from services.contracts.serving import (
    InstanceList,
    InstanceQuery,
    PlanMode,
    PlanOutcome,
    PlanQuery,
    Pool,
    PoolInstance,
    PoolList,
    PoolPlanDetail,
    PoolPlanList,
    PoolSpec,
)
from services.db.tables.pools import pool_instances, pool_plans, pools
from services.kit.cursors import read_cursor, write_cursor
from services.kit.problems import ProblemError
from services.serving.carbon import CarbonZones
from services.serving.planning.plans import Plans, ended_as
from services.serving.repository.pools import audit, find_pool, live_instances

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
INSTANCE_ID = r"[a-z]+_[0-9a-z]{26}"
INSTANCE_FIELDS = tuple(PoolInstance.model_fields)


@dataclass(frozen=True)
class PutPool:
    """A pool as it was made or changed."""

    pool: Pool
    is_new: bool


class Pools:
    """What callers may do with pools. Users see their tenant's, operators all."""

    def __init__(self, engine: AsyncEngine, zones: CarbonZones, plans: Plans, plan_interval_s: float) -> None:
        self._engine = engine
        self._zones = zones
        self._plans = plans
        self._plan_interval = timedelta(seconds=plan_interval_s)

    async def put(self, name: str, spec: PoolSpec, caller: Identity, if_match: str | None = None) -> PutPool:
        """Make a pool, or give one another spec; the spec it has changes nothing.

        Raises:
            ProblemError: 422 for a zone or signal that there is not, 412 unless the pool is at ``if_match``, 409 for
                one that is being deleted.
        """
        await self._check_places(spec)
        async with self._engine.begin() as connection:
            is_new = if_match is None and await _insert(connection, name, spec, caller)
            if not is_new:
                row = await self._locked(connection, name, caller, if_match)
                await _replace(connection, row, spec, caller)
            return PutPool(await self._read(connection, name), is_new)

    async def set_mode(self, name: str, mode: PlanMode, caller: Identity) -> Pool:
        """Have plans carried out or only proposed from now on.

        Raises:
            ProblemError: 404 where there is no such pool, 409 for one that is being deleted.
        """
        async with self._engine.begin() as connection:
            row = await self._locked(connection, name, caller)
            await _replace(connection, row, PoolSpec.model_validate({**row["spec"], "mode": mode}), caller)
            return await self._read(connection, name)

    async def delete(self, name: str, caller: Identity) -> Pool:
        """Have a pool's instances drained, and then the pool gone; deleting it again changes nothing.

        Raises:
            ProblemError: 404 where there is no such pool.
        """
        async with self._engine.begin() as connection:
            row = await find_pool(connection, name, caller, "update")
            if row["deleted_at"] is None:
                values = {"deleted_at": func.now(), "updated_at": func.now()}
                await connection.execute(update(pools).where(pools.c.name == name).values(values))
                await _cancel_plans(connection, name)
                await audit(connection, caller, "pool.deleted", name)
            return await self._read(connection, name)

    async def find(self, name: str, caller: Identity) -> Pool:
        """Return a pool as it stands.

        Raises:
            ProblemError: 404 where there is none that the caller may see.
        """
        async with self._engine.connect() as connection:
            await find_pool(connection, name, caller)
            return await self._read(connection, name)

    async def page(self, query: PageQuery, caller: Identity) -> PoolList:
        """Return one page of pools, by name.

        Raises:
            ProblemError: 422 for a cursor that is not one.
        """
        asked = self._standing().order_by(pools.c.name).limit(query.limit + 1)
        if not caller.is_operator:
            asked = asked.where(pools.c.tenant_id == caller.tenant_id)
        if after := read_cursor(query.cursor, NAME_PATTERN):
            asked = asked.where(pools.c.name > after)
        async with self._engine.connect() as connection:
            items = await _with_instances(connection, asked)
        more = len(items) > query.limit
        items = items[: query.limit]
        return PoolList(items=items, next_cursor=write_cursor(items[-1].name) if more else None)

    async def instances(self, name: str, query: InstanceQuery, caller: Identity) -> InstanceList:
        """Return one page of a pool's instances, newest first.

        Raises:
            ProblemError: 404 where there is no pool that the caller may see, 422 for a cursor that is not one.
        """
        c = pool_instances.c
        columns = [c[field] for field in INSTANCE_FIELDS]
        async with self._engine.connect() as connection:
            row = await find_pool(connection, name, caller)
            # Those of an earlier pool of this name may have been another tenant's.
            asked = select(*columns).where(c.pool == name, c.created_at >= row["created_at"], c.state.in_(query.state))
            if before := read_cursor(query.cursor, INSTANCE_ID):
                asked = asked.where(c.id < before)
            rows = (await connection.execute(asked.order_by(c.id.desc()).limit(query.limit + 1))).mappings().all()
        items = [PoolInstance.model_validate(dict(found)) for found in rows[: query.limit]]
        return InstanceList(items=items, next_cursor=write_cursor(items[-1].id) if len(rows) > query.limit else None)

    async def plan_now(self, name: str, caller: Identity) -> PoolPlanDetail:
        """Have a pool planned, or return the plan that is being made.

        Raises:
            ProblemError: 404 where there is no such pool, 409 for one that is being deleted.
        """
        async with self._engine.begin() as connection:  # first: whatever dies, nothing is done that is not written down
            await self._locked(connection, name, caller)
            await audit(connection, caller, "pool.plan_requested", name)
        return await self._plans.find(name, await self._plans.submit(name, "request", caller))

    async def accept(self, name: str, plan_id: str, caller: Identity) -> PoolPlanDetail:
        """Put a proposal in force; again changes nothing.

        Raises:
            ProblemError: 404 where there is no such plan of this pool, 409 where it is no proposal, or an outdated one.
        """
        await self._plans.find(name, plan_id)
        await self._plans.apply(plan_id, caller)
        return await self._plans.find(name, plan_id)

    async def plan(self, name: str, plan_id: str, caller: Identity) -> PoolPlanDetail:
        """Return a plan whole.

        Raises:
            ProblemError: 404 where there is no such pool or plan that the caller may see.
        """
        async with self._engine.connect() as connection:
            await find_pool(connection, name, caller)
        return await self._plans.find(name, plan_id)

    async def plans(self, name: str, query: PlanQuery, caller: Identity) -> PoolPlanList:
        """Return one page of a pool's plans, newest first.

        Raises:
            ProblemError: 404 where there is no pool that the caller may see, 422 for a cursor that is not one.
        """
        async with self._engine.connect() as connection:
            await find_pool(connection, name, caller)
        return await self._plans.page(name, query)

    async def _check_places(self, spec: PoolSpec) -> None:
        zones = await self._zones.signals()
        if zones is None:  # what cannot be checked now is for the plans to say
            return
        for index, place in enumerate(spec.places):
            if place.zone not in zones:
                detail = f"There is no zone {place.zone}; the zones are {', '.join(sorted(zones))}."
                raise _invalid(ProblemCode.UNKNOWN_ZONE, f"/places/{index}/zone", detail)
            if place.signal is not None and place.signal not in zones[place.zone]:
                detail = f"Zone {place.zone} has {', '.join(sorted(zones[place.zone]))}, not {place.signal}."
                raise _invalid(ProblemCode.INVALID_REQUEST, f"/places/{index}/signal", detail)

    async def _locked(
        self, connection: AsyncConnection, name: str, caller: Identity, if_match: str | None = None
    ) -> RowMapping:
        row = await find_pool(connection, name, caller, "update")
        if row["deleted_at"] is not None:
            raise ProblemError(409, ProblemCode.CONFLICT, f"Pool {name} is being deleted; its instances are drained.")
        if if_match is not None and if_match not in ("*", etag(await self._read(connection, name))):
            raise ProblemError(412, ProblemCode.CONFLICT, f"Pool {name} was changed meanwhile; read it again.")
        return row

    async def _read(self, connection: AsyncConnection, name: str) -> Pool:
        (pool,) = await _with_instances(connection, self._standing().where(pools.c.name == name))
        return pool

    def _standing(self) -> Select[Any]:
        slot_at = func.date_bin(self._plan_interval, func.now(), EPOCH)
        # A plan that is no longer kept is an old one.
        is_stale = func.coalesce(pool_plans.c.slot_at < slot_at, pools.c.plan_id.is_not(None))
        joined = pools.outerjoin(pool_plans, pool_plans.c.id == pools.c.plan_id)
        return select(pools, is_stale.label("is_plan_stale")).select_from(joined)


def etag(pool: Pool) -> str:
    """Return what names this spec of a pool."""
    return f'"{pool.revision}-{pool.spec.mode}"'


async def _insert(connection: AsyncConnection, name: str, spec: PoolSpec, caller: Identity) -> bool:
    values = {
        "name": name,
        "tenant_id": caller.tenant_id,
        "key_id": caller.key_id,
        "spec": spec.model_dump(mode="json"),
    }
    statement = upsert(pools).values(values).on_conflict_do_nothing().returning(pools.c.name)
    if (await connection.execute(statement)).one_or_none() is None:
        return False
    await audit(connection, caller, "pool.created", name)
    return True


async def _replace(connection: AsyncConnection, row: RowMapping, spec: PoolSpec, caller: Identity) -> None:
    """Give a pool whose row is locked another spec, if it is another one."""
    before, name = PoolSpec.model_validate(row["spec"]), row["name"]
    if spec == before:
        return
    is_revised = spec.model_copy(update={"mode": before.mode}) != before
    values = {"spec": spec.model_dump(mode="json"), "revision": row["revision"] + is_revised, "updated_at": func.now()}
    await connection.execute(update(pools).where(pools.c.name == name).values(values))
    data = {"revision": values["revision"], "mode": str(spec.mode)}
    await audit(connection, caller, "pool.changed", name, **data)


async def _cancel_plans(connection: AsyncConnection, pool: str) -> None:
    c = pool_plans.c
    open_ones = or_(c.outcome.is_(None), c.outcome == PlanOutcome.PROPOSED)
    values = ended_as(PlanOutcome.SUPERSEDED)
    await connection.execute(update(pool_plans).where(c.pool == pool, open_ones).values(values))


async def _with_instances(connection: AsyncConnection, query: Select[Any]) -> list[Pool]:
    rows = (await connection.execute(query)).mappings().all()
    counts = await live_instances(connection, [row["name"] for row in rows])
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


def _invalid(code: ProblemCode, pointer: str, detail: str) -> ProblemError:
    return ProblemError(422, code, detail, errors=[FieldError(pointer=pointer, detail=detail)])
