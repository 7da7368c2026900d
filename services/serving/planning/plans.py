"""The rows of plans: making them, deciding what becomes of them, putting one in force.

Whoever decides holds the row lock of the pool and then that of the plan, and a decision is made once: a plan that is
applied is in force in the same transaction, so that a crash leaves it either undecided or carried out.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from sqlalchemy import case, delete, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from services.contracts.background import Draft, WorkProblem, WorkState
from services.contracts.identity import Identity
from services.contracts.problems import ProblemCode
from services.contracts.serving import (
    PlanMode,
    PlanOutcome,
    PlanQuery,
    PoolPlanDetail,
    PoolPlanList,
    PoolPlanSummary,
)
from services.db.background import LIVE, WorkRepository, WorkRow
from services.db.tables.pools import pool_plans, pools
from services.kit.background.work_queue import sha256
from services.kit.cursors import read_cursor, write_cursor
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.problems import ProblemError, not_found
from services.serving.repository.pools import audit
from services.serving.settings import ServingSettings

log = Log(__name__)

Trigger = Literal["clock", "request"]

PLAN_ID = r"plan_[0-9a-z]{26}"
MOST_PENDING = 100_000
"""Of one tenant: a pool has one or two, and pools are made by operators."""

_SUMMARY = tuple(pool_plans.c[name] for name in PoolPlanSummary.model_fields)

DUE = text("""
SELECT q.name, t.deadline_at
  FROM pools q
  LEFT JOIN LATERAL (
       SELECT min(p.deadline_at) AS deadline_at, max(p.decided_at) AS failed_at,
              bool_or(p.outcome IS DISTINCT FROM 'failed') AS stands
         FROM (SELECT * FROM pool_plans WHERE pool = q.name ORDER BY id DESC LIMIT 100) p
        WHERE p.slot_at = date_bin(CAST(:interval AS interval), now() + CAST(:lead AS interval), 'epoch')
          AND p.revision = q.revision AND p.submitted_at >= q.created_at) t ON true
 WHERE q.deleted_at IS NULL AND NOT coalesce(t.stands, false)
   AND (t.failed_at IS NULL OR t.failed_at <= now() - CAST(:retry AS interval) AND t.deadline_at > now())
 ORDER BY q.name
""")
"""Pools without a plan of this revision for the slot, or with failed ones alone while its deadline has not passed."""

UNDECIDED = text("""
SELECT p.id
  FROM pool_plans p LEFT JOIN pools q ON q.name = p.pool
 WHERE p.outcome IS NULL
   AND (p.state NOT IN ('queued', 'running') OR p.deadline_at < now()
        OR q.name IS NULL OR q.deleted_at IS NOT NULL OR q.revision <> p.revision)
 ORDER BY p.submitted_at, p.id
""")


@dataclass(frozen=True)
class Due:
    """A pool to be planned; the deadline is that of earlier attempts, if there were any."""

    pool: str
    deadline_at: datetime | None


class PlanRepository(WorkRepository):
    """Queries on plans as on any work; the plan in force is kept however old it is."""

    async def forget_ended(self, keep_days: float) -> int:
        """Delete what ended that long ago and is not in force, and return how many."""
        in_force = select(pools.c.plan_id).where(pools.c.plan_id == pool_plans.c.id).exists()
        is_old = pool_plans.c.ended_at < func.now() - timedelta(days=keep_days)
        return await self._change(delete(pool_plans).where(is_old, ~in_force))


def plan_repository(engine: AsyncEngine) -> PlanRepository:
    """Return the queries on plans."""
    return PlanRepository(engine, pool_plans, None, "plan", _SUMMARY)


class Plans:
    """Plans of pools, and what becomes of them."""

    def __init__(self, engine: AsyncEngine, store: PlanRepository, settings: ServingSettings) -> None:
        self._engine = engine
        self._store = store
        self._interval = timedelta(seconds=settings.plan_interval_s)
        self._lead = timedelta(seconds=settings.plan_lead_s)
        self._late = timedelta(seconds=settings.plan_late_s)
        self._retry = timedelta(seconds=settings.plan_retry_s)

    async def submit(
        self,
        pool: str,
        trigger: Trigger,
        caller: Identity | None = None,
        *,
        deadline_at: datetime | None = None,
    ) -> str:
        """Have a pool planned; return the plan's id.

        The clock plans a slot once, however many services ask for it. A request is answered with the plan that is being
        made, if there is one.

        Args:
            pool: Its name.
            trigger: Who asks.
            caller: For a request.
            deadline_at: When an answer is late; by default some time after the plan begins, and for a first plan at its
                end.

        Raises:
            ProblemError: 404 where there is no such pool, 409 for one that is being deleted.
        """
        slot_at = func.date_bin(self._interval, func.now() + self._lead, datetime(1970, 1, 1, tzinfo=UTC))
        from_at = func.greatest(slot_at, func.now())
        times = (slot_at.label("slot_at"), from_at.label("from_at"), func.now().label("now"))
        query = select(pools, *times).where(pools.c.name == pool)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).one_or_none()
            if row is None:
                raise not_found("pool")
            if row.deleted_at is not None:
                raise ProblemError(409, ProblemCode.CONFLICT, f"Pool {pool} is being deleted.")
            if trigger == "request" and (pending := await self._pending(connection, row)):
                return pending
        # A pool that nothing was planned for yet has no plan to keep: any answer within its half hour is a good one.
        patience = self._interval if row.plan_id is None else self._late
        draft = self._draft(row, trigger, caller, deadline_at or row.from_at + patience)
        submitted = await self._store.submit(draft, MOST_PENDING)
        if submitted.is_new:
            log.info("plan.submitted", id=submitted.id, pool=pool, trigger=trigger, revision=row.revision)
        return submitted.id

    async def due(self) -> list[Due]:
        """Return the pools that the clock wants planned."""
        times = {"interval": self._interval, "lead": self._lead, "retry": self._retry}
        async with self._engine.connect() as connection:
            return [Due(*row) for row in (await connection.execute(DUE, times)).all()]

    async def undecided(self) -> list[str]:
        """Return the plans that are to be judged, the oldest first."""
        async with self._engine.connect() as connection:
            return list((await connection.execute(UNDECIDED)).scalars())

    async def judge(self, plan_id: str) -> PlanOutcome | None:
        """Decide what becomes of a plan, and put it in force if that is it; None while it is to be waited for."""
        async with self._engine.begin() as connection:
            found = await _locked(connection, plan_id)
            if found is None or found[1].outcome is not None:
                return None
            pool, plan = found
            outcome = self._verdict(pool, plan)
            if outcome is not None:
                await _decide(connection, plan, outcome)
        if outcome is not None:
            log.info(f"plan.{outcome}", id=plan_id, pool=plan.pool)
        return outcome

    async def apply(self, plan_id: str, caller: Identity | None) -> None:
        """Put a proposal in force; applying the plan in force again changes nothing.

        Raises:
            ProblemError: 404 where there is no such plan, 409 ``invalid_transition`` for one that is no proposal,
                ``conflict`` where the pool was changed or a newer plan applied since.
        """
        async with self._engine.begin() as connection:
            found = await _locked(connection, plan_id)
            if found is None:
                raise not_found("plan")
            pool, plan = found
            if pool is not None and pool.plan_id == plan_id:
                return
            if pool is None or not _is_for(plan, pool):
                detail = f"Pool {plan.pool} was changed after this plan was made; have it planned anew."
                raise ProblemError(409, ProblemCode.CONFLICT, detail)
            if plan.outcome != PlanOutcome.PROPOSED:
                what = plan.outcome or plan.state
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, f"The plan is no proposal: it is {what}.")
            if _is_older(plan, pool):
                raise ProblemError(409, ProblemCode.CONFLICT, "A newer plan is in force.")
            await _decide(connection, plan, PlanOutcome.APPLIED)
            if caller is not None:
                await audit(connection, caller, "pool.plan_applied", pool.name, plan=plan_id)
        log.info("plan.applied", id=plan_id, pool=plan.pool)

    async def page(self, pool: str, query: PlanQuery) -> PoolPlanList:
        """Return one page of a pool's plans, newest first.

        Raises:
            ProblemError: 422 for a cursor that is not one.
        """
        asked = self._of_pool(pool, _SUMMARY)
        if query.outcome:
            asked = asked.where(pool_plans.c.outcome.in_(query.outcome))
        if before := read_cursor(query.cursor, PLAN_ID):
            asked = asked.where(pool_plans.c.id < before)
        async with self._engine.connect() as connection:
            rows = (await connection.execute(asked.order_by(pool_plans.c.id.desc()).limit(query.limit + 1))).all()
        items = [PoolPlanSummary.model_validate(row._asdict()) for row in rows[: query.limit]]
        return PoolPlanList(items=items, next_cursor=write_cursor(items[-1].id) if len(rows) > query.limit else None)

    async def find(self, pool: str, plan_id: str) -> PoolPlanDetail:
        """Return a pool's plan whole.

        Raises:
            ProblemError: 404 where there is no such plan of this pool.
        """
        asked = self._of_pool(pool, (*_SUMMARY, pool_plans.c.result)).where(pool_plans.c.id == plan_id)
        async with self._engine.connect() as connection:
            row = (await connection.execute(asked)).one_or_none()
        if row is None:
            raise not_found("plan")
        return PoolPlanDetail.model_validate(row._asdict())

    def _of_pool(self, pool: str, columns: tuple[Any, ...]) -> Any:
        # An earlier pool of this name may have been another tenant's.
        is_its = (pools.c.name == pool_plans.c.pool) & (pool_plans.c.submitted_at >= pools.c.created_at)
        return select(*columns).join(pools, is_its).where(pool_plans.c.pool == pool)

    async def _pending(self, connection: AsyncConnection, pool: WorkRow) -> str | None:
        c = pool_plans.c
        query = select(c.id).where(
            c.pool == pool.name,
            c.revision == pool.revision,
            c.outcome.is_(None),
            c.state.in_(LIVE),
            c.deadline_at > func.now(),
            c.submitted_at >= pool.created_at,
        )
        return (await connection.execute(query.order_by(c.id.desc()).limit(1))).scalar()

    def _draft(self, pool: WorkRow, trigger: Trigger, caller: Identity | None, deadline_at: datetime) -> Draft:
        key = {"pool": pool.name, "made": pool.created_at, "revision": pool.revision, "slot": pool.slot_at}
        if trigger == "request":
            key["asked"] = pool.now  # not from_at: ahead of a slot that is the same for two minutes
        digest = sha256("plan", key)
        document = {"made_at": pool.created_at, "spec": pool.spec}
        columns = {
            "pool": pool.name,
            "revision": pool.revision,
            "trigger": trigger,
            "slot_at": pool.slot_at,
            "from_at": pool.from_at,
            "deadline_at": deadline_at,
        }
        key_id = pool.key_id if caller is None else caller.key_id
        return Draft(new_id("plan"), pool.tenant_id, key_id, WorkProblem(document, digest, columns), None, digest)

    def _verdict(self, pool: WorkRow | None, plan: WorkRow) -> PlanOutcome | None:
        if pool is None or not _is_for(plan, pool) or plan.state == WorkState.CANCELLED:
            return PlanOutcome.SUPERSEDED
        if plan.state == WorkState.FAILED:
            return PlanOutcome.FAILED
        if plan.state in LIVE:
            return PlanOutcome.LATE if plan.deadline_at < pool.now else None
        # It may have been in time while nobody was there to apply it.
        if plan.ended_at > plan.deadline_at or plan.from_at + self._interval <= pool.now:
            return PlanOutcome.LATE
        if _is_older(plan, pool):
            return PlanOutcome.SUPERSEDED
        return PlanOutcome.PROPOSED if pool.spec["mode"] == PlanMode.FIXED else PlanOutcome.APPLIED


def _is_for(plan: WorkRow, pool: WorkRow) -> bool:
    """Return whether the pool is still what it was planned as; a pool made anew begins to count its revisions anew."""
    made_at = datetime.fromisoformat(plan.made_at)
    return pool.deleted_at is None and pool.revision == plan.revision and pool.created_at == made_at


def _is_older(plan: WorkRow, pool: WorkRow) -> bool:
    return pool.in_force_since is not None and plan.submitted_at < pool.in_force_since


async def _locked(connection: AsyncConnection, plan_id: str) -> tuple[WorkRow | None, WorkRow] | None:
    """Lock a plan's pool, if it is there still, and then the plan; return both."""
    c = pool_plans.c
    name = (await connection.execute(select(c.pool).where(c.id == plan_id))).scalar()
    if name is None:
        return None
    locked = select(pools, func.now().label("now")).where(pools.c.name == name).with_for_update()
    pool = (await connection.execute(locked)).one_or_none()
    if pool is not None:  # read after the lock: who had it may have put another plan in force
        in_force = select(c.submitted_at).where(c.id == pools.c.plan_id).scalar_subquery()
        query = select(pools, func.now().label("now"), in_force.label("in_force_since"))
        pool = (await connection.execute(query.where(pools.c.name == name))).one()
    columns: tuple[Any, ...] = (*_SUMMARY, c.slot_at, c.problem["made_at"].astext.label("made_at"))
    plan = (await connection.execute(select(*columns).where(c.id == plan_id).with_for_update())).one_or_none()
    return None if plan is None else (pool, plan)


async def _decide(connection: AsyncConnection, plan: WorkRow, outcome: PlanOutcome) -> None:
    """Write an outcome; both rows are locked."""
    c = pool_plans.c
    await connection.execute(
        update(pool_plans)
        .where(c.id == plan.id, c.outcome.is_not_distinct_from(plan.outcome))
        .values(ended_as(outcome))
    )
    if outcome is not PlanOutcome.APPLIED:
        return
    in_force = update(pools).where(pools.c.name == plan.pool)
    await connection.execute(in_force.values(plan_id=plan.id, planned_at=func.now()))
    waits = or_(c.outcome.is_(None), c.outcome == PlanOutcome.PROPOSED)
    older = (c.pool == plan.pool) & (c.submitted_at < plan.submitted_at) & waits
    await connection.execute(update(pool_plans).where(older).values(ended_as(PlanOutcome.SUPERSEDED)))


def ended_as(outcome: PlanOutcome) -> dict[str, Any]:
    """Return what is written with an outcome: work that is not wanted any more is cancelled."""
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
