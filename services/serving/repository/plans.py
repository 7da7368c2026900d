"""Queries on plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Select, case, delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.background import WorkFailure, WorkState
from services.contracts.serving import EVENTS, RESCUES, PlanOutcome, PoolPlanDetail, PoolPlanSummary
from services.db.background import LIVE, WorkRepository
from services.db.tables import pool_plans, pools
from services.kit.readable import Unread, each_readable
from services.serving.repository.pools import EPOCH, PoolRecord, planned_every, pool_record
from services.serving.repository.specs import Rows, record_of

EVERY = "coalesce(make_interval(mins => (q.spec ->> 'plan_every_min')::int), CAST(:interval AS interval))"
"""How often a pool ``q`` is planned."""

SUMMARY = tuple(pool_plans.c[name] for name in PoolPlanSummary.model_fields)

DUE = text(f"""
SELECT q.name, t.deadline_at
  FROM pools q
  LEFT JOIN LATERAL (
       SELECT min(p.deadline_at) AS deadline_at, max(p.decided_at) AS failed_at,
              bool_or(p.outcome IS DISTINCT FROM 'failed') AS stands
         FROM (SELECT * FROM pool_plans WHERE pool = q.name ORDER BY submitted_at DESC, id DESC LIMIT 100) p
        WHERE p.slot_at = date_bin({EVERY}, now() + CAST(:lead AS interval), 'epoch')
          AND p.revision = q.revision AND p.submitted_at >= q.created_at) t ON true
 WHERE q.deleted_at IS NULL AND NOT coalesce(t.stands, false)
   AND (t.failed_at IS NULL OR t.failed_at <= now() - CAST(:retry AS interval) AND t.deadline_at > now())
 ORDER BY q.name
""")
"""Pools without a plan of this revision for their slot, or with failed ones alone while its deadline has not passed."""

UNDECIDED = text("""
SELECT p.id
  FROM pool_plans p LEFT JOIN pools q ON q.name = p.pool
 WHERE p.outcome IS NULL
   AND (p.state NOT IN ('queued', 'running') OR p.deadline_at < now()
        OR q.name IS NULL OR q.deleted_at IS NOT NULL OR q.revision <> p.revision)
 ORDER BY p.submitted_at, p.id
""")

TURN_TO_APPLY = text("SELECT pg_advisory_xact_lock(hashtextextended('serving-apply', 0))")
STANDING = text(f"""
SELECT q.name, s.id, e.event_at
  FROM pools q
  JOIN LATERAL (
       SELECT id, outcome FROM pool_plans
        WHERE pool = q.name AND revision = q.revision AND submitted_at >= q.created_at
          AND (outcome IN ('applied', 'proposed') OR outcome = 'failed' AND failure ->> 'code' = 'outdated')
        ORDER BY submitted_at DESC, id DESC LIMIT 1) s ON true
  LEFT JOIN LATERAL (
       SELECT max(submitted_at) AS event_at FROM pool_plans
        WHERE pool = q.name AND trigger IN ({", ".join(f"'{event}'" for event in sorted(EVENTS))})) e ON true
 WHERE q.deleted_at IS NULL
   AND NOT EXISTS (SELECT FROM pool_plans WHERE pool = q.name AND outcome IS NULL AND revision = q.revision)
 ORDER BY q.name
""")
"""Pools for which no plan is being made, with the newest that was not in vain."""


@dataclass(frozen=True)
class MadePlan:
    """A plan as it was made, with result and spec in their stored form."""

    pool: str
    spec: dict[str, Any]
    result: dict[str, Any]
    outcome: PlanOutcome | None
    from_at: datetime
    slot_at: datetime


@dataclass(frozen=True)
class Slot:
    """A pool and the interval that it would be planned for now."""

    pool: PoolRecord
    now: datetime  #: The database's time
    slot_at: datetime  #: When the interval begins by the clock
    from_at: datetime  #: When the plan begins


@dataclass(frozen=True)
class PlanRecord:
    """A row of ``pool_plans``; ``made_at`` is when the pool that it was made for was created."""

    id: str
    pool: str
    revision: int
    state: WorkState
    outcome: PlanOutcome | None
    from_at: datetime
    deadline_at: datetime
    submitted_at: datetime
    ended_at: datetime | None
    made_at: datetime


@dataclass(frozen=True)
class LockedPool:
    """A pool whose row is locked; ``in_force_since`` is when the plan in force was submitted."""

    pool: PoolRecord
    now: datetime
    in_force_since: datetime | None


class PlanRepository(WorkRepository):
    """Queries on plans as work; the plan in force is kept however old it is."""

    async def forget_ended(self, keep_days: float) -> int:
        """Delete plans that ended that long ago and are not in force, and return how many."""
        in_force = select(pools.c.plan_id).where(pools.c.plan_id == pool_plans.c.id).exists()
        is_old = pool_plans.c.ended_at < func.now() - timedelta(days=keep_days)
        return await self._change(delete(pool_plans).where(is_old, ~in_force))


def plan_repository(engine: AsyncEngine) -> PlanRepository:
    """Return the queries on plans as work that workers claim."""
    is_rescue = pool_plans.c.trigger.in_(sorted(RESCUES))
    return PlanRepository(engine, pool_plans, None, "plan", (), urgent=is_rescue)


class PlanRows(Rows):
    """Queries on plans within a transaction."""

    async def due(self, *, interval: timedelta, lead: timedelta, retry: timedelta) -> list[tuple[str, datetime | None]]:
        """Return the pools that are due by the clock, each with the deadline of earlier attempts if there were any."""
        times = {"interval": interval, "lead": lead, "retry": retry}
        return [(row.name, row.deadline_at) for row in await self._connection.execute(DUE, times)]

    async def undecided(self) -> list[str]:
        """Return the plans without an outcome, oldest first."""
        return list((await self._connection.execute(UNDECIDED)).scalars())

    async def standing(self) -> list[tuple[str, str, datetime | None]]:
        """Return pools with the plan that events are compared with, and when they were last planned because of one.

        Pools that are being planned are left out.
        """
        return [(row.name, row.id, row.event_at) for row in await self._connection.execute(STANDING)]

    async def made(self, plan_id: str) -> MadePlan | None:
        """Return a plan that has a result."""
        c = pool_plans.c
        columns = (c.pool, c.problem["spec"].label("spec"), c.result, c.outcome, c.from_at, c.slot_at)
        row = await self._row(select(*columns).where(c.id == plan_id, c.result.is_not(None)))
        return None if row is None else record_of(MadePlan, row, outcome=row["outcome"] and PlanOutcome(row["outcome"]))

    async def slot(self, pool: str, *, interval: timedelta, lead: timedelta) -> Slot | None:
        """Return a pool and its next interval; None if there is no such pool."""
        slot_at = func.date_bin(planned_every(interval), func.now() + lead, EPOCH)
        from_at = func.greatest(slot_at, func.now())
        times = (slot_at.label("slot_at"), from_at.label("from_at"), func.now().label("now"))
        query = select(pools, *times).where(pools.c.name == pool)
        row = await self._row(query)
        return None if row is None else Slot(pool_record(row), row["now"], row["slot_at"], row["from_at"])

    async def pending(self, pool: PoolRecord) -> str | None:
        """Return the plan of a pool's present revision that is being made and may still be in time."""
        c = pool_plans.c
        query = select(c.id).where(
            c.pool == pool.name,
            c.revision == pool.revision,
            c.outcome.is_(None),
            c.state.in_(LIVE),
            c.deadline_at > func.now(),
            c.submitted_at >= pool.created_at,
        )
        return (await self._connection.execute(query.order_by(c.submitted_at.desc(), c.id.desc()).limit(1))).scalar()

    async def lock(self, plan_id: str) -> tuple[LockedPool | None, PlanRecord] | None:
        """Lock a plan's pool, if it still exists, and then the plan; return both."""
        c, connection = pool_plans.c, self._connection
        name = (await connection.execute(select(c.pool).where(c.id == plan_id))).scalar()
        if name is None:
            return None
        pool = None
        if (await connection.execute(select(pools.c.name).where(pools.c.name == name).with_for_update())).scalar():
            # Read after the lock: who had it may have put another plan in force.
            in_force = select(c.submitted_at).where(c.id == pools.c.plan_id).scalar_subquery()
            query = select(pools, func.now().label("now"), in_force.label("in_force_since"))
            found = (await connection.execute(query.where(pools.c.name == name))).mappings().one()
            pool = LockedPool(pool_record(found), found["now"], found["in_force_since"])
        columns = (*SUMMARY, c.problem["made_at"].astext.label("made_at"))
        locked = select(*columns).where(c.id == plan_id).with_for_update()
        row = (await connection.execute(locked)).mappings().one_or_none()
        if row is None:
            return None
        plan = record_of(
            PlanRecord,
            row,
            state=WorkState(row["state"]),
            outcome=None if row["outcome"] is None else PlanOutcome(row["outcome"]),
            made_at=datetime.fromisoformat(row["made_at"]),
        )
        return pool, plan

    async def take_turn_to_apply(self) -> None:
        """Wait until no other transaction is applying a plan; until this one ends, no other does."""
        await self._connection.execute(TURN_TO_APPLY)

    async def decide(self, plan: PlanRecord, outcome: PlanOutcome, failure: WorkFailure | None = None) -> None:
        """Write an outcome, and put the plan in force if it is applied; both rows must be locked."""
        c = pool_plans.c
        why = {} if failure is None else {"failure": failure.model_dump(mode="json")}
        await self._connection.execute(
            update(pool_plans)
            .where(c.id == plan.id, c.outcome.is_not_distinct_from(plan.outcome))
            .values(_ended_as(outcome) | why)
        )
        if outcome is not PlanOutcome.APPLIED:
            return
        in_force = update(pools).where(pools.c.name == plan.pool)
        await self._connection.execute(in_force.values(plan_id=plan.id, planned_at=func.now()))
        await self.supersede(plan.pool, c.submitted_at < plan.submitted_at)

    async def supersede(self, pool: str, *which: ColumnElement[bool]) -> None:
        """End the plans of a pool that are being made or proposed, all or those that are so."""
        c = pool_plans.c
        waits = or_(c.outcome.is_(None), c.outcome == PlanOutcome.PROPOSED)
        ended = update(pool_plans).where(c.pool == pool, waits, *which).values(_ended_as(PlanOutcome.SUPERSEDED))
        await self._connection.execute(ended)

    async def page(
        self, pool: str, *, outcomes: Sequence[PlanOutcome], before: str | None, limit: int
    ) -> list[PoolPlanSummary | Unread]:
        """Return a pool's plans, newest first."""
        query = _of_pool(pool, SUMMARY)
        if outcomes:
            query = query.where(pool_plans.c.outcome.in_(outcomes))
        if before is not None:
            query = query.where(pool_plans.c.id < before)
        rows = await self._rows(query.order_by(pool_plans.c.id.desc()).limit(limit))
        return each_readable(rows, lambda row: PoolPlanSummary.model_validate(dict(row)), "plan")

    async def find(self, pool: str, plan_id: str) -> PoolPlanDetail | None:
        """Return a complete plan of a pool, if there is one."""
        query = _of_pool(pool, (*SUMMARY, pool_plans.c.result)).where(pool_plans.c.id == plan_id)
        row = await self._row(query)
        return None if row is None else PoolPlanDetail.as_stored(dict(row))


def _of_pool(pool: str, columns: tuple[Any, ...]) -> Select[*tuple[Any, ...]]:
    # An earlier pool of this name may have been another tenant's.
    is_its = (pools.c.name == pool_plans.c.pool) & (pool_plans.c.submitted_at >= pools.c.created_at)
    query: Select[*tuple[Any, ...]] = select(*columns).join(pools, is_its).where(pool_plans.c.pool == pool)
    return query


def _ended_as(outcome: PlanOutcome) -> dict[str, Any]:
    """Return the columns to write with an outcome: work that is no longer needed is cancelled."""
    c = pool_plans.c
    is_live = c.state.in_(LIVE)
    return {
        "outcome": outcome,
        "decided_at": func.now(),
        "state": case((is_live, WorkState.CANCELLED), else_=c.state),
        "ended_at": case((is_live, func.now()), else_=c.ended_at),
        "claim": None,
        "lease_until": None,
    }
