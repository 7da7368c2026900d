"""Submits plans, decides their outcomes, and puts one in force.

A decision is made under the row lock of the pool and then that of the plan, and only once: a plan that is
applied is in force in the same transaction, so that a crash leaves it either undecided or carried out.
"""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from services.contracts.background import Draft, WorkFailure, WorkFailureCode, WorkProblem, WorkState
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.serving import (
    PlanMode,
    PlanOutcome,
    PlanTrigger,
    PoolPlanDetail,
    PoolPlanList,
    PoolPlanQuery,
    PoolPlanResult,
    PoolSpec,
)
from services.kit.background.work_queue import sha256
from services.kit.ids import new_id
from services.kit.logging import Log
from services.kit.problems import ProblemError, conflict, not_found
from services.kit.routes import one_page, read_cursor
from services.serving.planning.cluster import gpus_by_place, misfits
from services.serving.planning.events import Standing, is_any_less
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.cluster import read_cluster
from services.serving.repository.plans import LockedPool, PlanRecord, PlanRepository, Slot
from services.serving.repository.pools import PoolRecord
from services.serving.settings import ServingSettings

log = Log(__name__)

PLAN_ID = r"plan_[0-9a-z]{26}"
MOST_PENDING = 100_000
"""Of one tenant: a pool has one or two, and pools are made by operators."""
PENDING = (WorkState.QUEUED, WorkState.RUNNING)


class Plans:
    """Plans of pools, and their outcomes."""

    def __init__(self, repository: ServingRepository, store: PlanRepository, settings: ServingSettings) -> None:
        self._repository, self._store = repository, store
        self._interval = timedelta(seconds=settings.plan_interval_s)
        self._lead = timedelta(seconds=settings.plan_lead_s)
        self._late = timedelta(seconds=settings.plan_late_s)
        self._retry = timedelta(seconds=settings.plan_retry_s)

    async def submit(
        self,
        pool: str,
        trigger: PlanTrigger,
        caller: Identity | None = None,
        *,
        deadline_at: datetime | None = None,
        after: Standing | None = None,
    ) -> str:
        """Have a pool planned; return the plan's id.

        The clock plans a slot once, however many services submit it. A request returns the plan that is being made, if
        there is one.

        Args:
            caller: Who requested it, for a request.
            deadline_at: When an answer is late; by default some time after the plan begins, and for a first plan at its
                end.
            after: For an event, the plan that it is about. However many services notice the event, one plan is made.

        Raises:
            ProblemError: 404 if there is no such pool, 409 for one that is being deleted.
        """
        async with self._repository.reading() as queries:
            slot = await queries.plans.slot(pool, interval=self._interval, lead=self._lead)
            if slot is None:
                raise not_found("pool")
            if slot.pool.deleted_at is not None:
                raise conflict(f"Pool {pool} is being deleted.")
            if trigger is PlanTrigger.REQUEST and (pending := await queries.plans.pending(slot.pool)):
                return pending
        # A pool that nothing was planned for yet has no plan to keep: any answer within its interval is a good one.
        interval = self._interval_of(slot.pool)
        patience = interval if slot.pool.plan_id is None else min(self._late, interval / 2)
        if after is not None:
            slot = replace(slot, slot_at=after.slot_at, from_at=slot.now)
        draft = _draft(slot, trigger, caller, deadline_at or slot.from_at + patience, after)
        submitted = await self._store.submit(draft, MOST_PENDING)
        if submitted.is_new:
            log.info("plan.submitted", id=submitted.id, pool=pool, trigger=trigger, revision=slot.pool.revision)
        return submitted.id

    async def due(self) -> list[tuple[str, datetime | None]]:
        """Return the pools that are due by the clock, each with the deadline of earlier attempts if there were any."""
        async with self._repository.reading() as queries:
            return await queries.plans.due(interval=self._interval, lead=self._lead, retry=self._retry)

    async def undecided(self) -> list[str]:
        """Return the plans without an outcome, oldest first."""
        async with self._repository.reading() as queries:
            return await queries.plans.undecided()

    async def decide(self, plan_id: str) -> PlanOutcome | None:
        """Decide the outcome of a plan, and put it in force if it is applied; None while it is still awaited."""
        async with self._repository.writing() as queries:
            found = await queries.plans.lock(plan_id)
            if found is None or found[1].outcome is not None:
                return None
            pool, plan = found
            outcome, failure = self._outcome(pool, plan), None
            if outcome is PlanOutcome.APPLIED and (lacking := await _lacking(queries, plan)):
                outcome, failure = PlanOutcome.FAILED, WorkFailure(code=WorkFailureCode.OUTDATED, detail=lacking)
            if outcome is not None:
                await queries.plans.decide(plan, outcome, failure)
        if outcome is not None:
            log.info(f"plan.{outcome}", id=plan_id, pool=plan.pool, why=failure and failure.detail)
        return outcome

    async def apply(self, plan_id: str, caller: Identity | None) -> None:
        """Put a proposed plan in force; applying the plan in force again changes nothing.

        Raises:
            ProblemError: 404 if there is no such plan, 409 ``invalid_transition`` for one that is not a proposal,
                ``conflict`` if the pool was changed, a newer plan applied or its GPUs taken since.
        """
        async with self._repository.writing() as queries:
            found = await queries.plans.lock(plan_id)
            if found is None:
                raise not_found("plan")
            locked, plan = found
            if locked is not None and locked.pool.plan_id == plan_id:
                return
            if locked is None or not _is_for(plan, locked):
                detail = f"Pool {plan.pool} was changed after this plan was made; plan the pool again."
                raise conflict(detail)
            if plan.outcome is not PlanOutcome.PROPOSED:
                what = plan.outcome or plan.state
                raise ProblemError(409, ProblemCode.INVALID_TRANSITION, f"The plan is not a proposal: it is {what}.")
            if _is_older(plan, locked):
                raise conflict("A newer plan is in force.")
            if lacking := await _lacking(queries, plan):
                raise conflict(f"{lacking} Plan the pool again.")
            await queries.plans.decide(plan, PlanOutcome.APPLIED)
            if caller is not None:
                await queries.audit(caller, "pool.plan_applied", plan.pool, plan=plan_id)
        log.info("plan.applied", id=plan_id, pool=plan.pool)

    async def page(self, pool: str, query: PoolPlanQuery) -> PoolPlanList:
        """Return one page of a pool's plans, newest first; ``ProblemError``: 422 for an invalid cursor."""
        before = read_cursor(query.cursor, PLAN_ID)
        async with self._repository.reading() as queries:
            found = await queries.plans.page(pool, outcomes=query.outcome, before=before, limit=query.limit + 1)
        items, cursor = one_page(found, query.limit, lambda plan: plan.id)
        return PoolPlanList(items=items, next_cursor=cursor)

    async def find(self, pool: str, plan_id: str) -> PoolPlanDetail:
        """Return a complete plan of a pool; ``ProblemError``: 404 if there is no such plan of this pool."""
        async with self._repository.reading() as queries:
            plan = await queries.plans.find(pool, plan_id)
        if plan is None:
            raise not_found("plan")
        return plan

    def _interval_of(self, pool: PoolRecord) -> timedelta:
        minutes = pool.document.get("plan_every_min")
        return self._interval if minutes is None else timedelta(minutes=minutes)

    def _outcome(self, locked: LockedPool | None, plan: PlanRecord) -> PlanOutcome | None:
        if locked is None or not _is_for(plan, locked) or plan.state is WorkState.CANCELLED:
            return PlanOutcome.SUPERSEDED
        if plan.state is WorkState.FAILED:
            return PlanOutcome.FAILED
        if plan.state in PENDING or plan.ended_at is None:
            return PlanOutcome.LATE if plan.deadline_at < locked.now else None
        # It may have been in time while nobody was there to apply it.
        if plan.ended_at > plan.deadline_at or plan.from_at + self._interval_of(locked.pool) <= locked.now:
            return PlanOutcome.LATE
        if _is_older(plan, locked):
            return PlanOutcome.SUPERSEDED
        return PlanOutcome.PROPOSED if locked.pool.document["mode"] == PlanMode.FIXED else PlanOutcome.APPLIED


async def _lacking(queries: Queries, plan: PlanRecord) -> str:
    """Return where a plan's instances no longer fit, as a sentence; empty if they do fit.

    Until the transaction ends no other plan is applied, so that no two plans count on the same GPUs. GPUs that were
    already missing when the plan was made do not count.
    """
    await queries.plans.take_turn_to_apply()
    made = await queries.plans.made(plan.id)
    if made is None:
        return ""
    spec, result = PoolSpec.as_stored(made.spec), PoolPlanResult.as_stored(made.result)
    nodes = (await read_cluster(queries.connection)).nodes_for(plan.pool, by_plans_in_force=True)
    gpus = {place: has.models for place, has in gpus_by_place(spec, nodes).items()}
    if not is_any_less(gpus, result.forecasts.gpus):
        return ""
    places = misfits(spec, result.plan, nodes)
    which = f"{', '.join(places)} {'has' if len(places) == 1 else 'have'}"
    return f"Since the plan was made, {which} lost GPUs that it needs." if places else ""


def _draft(
    slot: Slot, trigger: PlanTrigger, caller: Identity | None, deadline_at: datetime, after: Standing | None
) -> Draft:
    pool = slot.pool
    key: dict[str, Any] = {"pool": pool.name, "made": pool.created_at, "revision": pool.revision, "slot": slot.slot_at}
    if after is not None:
        key |= {"event": trigger, "after": after.plan_id, "event_before": after.event_at}
    if trigger is PlanTrigger.REQUEST:
        key["asked"] = slot.now  # not from_at: ahead of a slot that is the same for two minutes
    digest = sha256("plan", key)
    document = {"made_at": pool.created_at, "spec": pool.document}
    columns = {
        "pool": pool.name,
        "revision": pool.revision,
        "trigger": trigger,
        "slot_at": slot.slot_at,
        "from_at": slot.from_at,
        "deadline_at": deadline_at,
    }
    key_id = pool.key_id if caller is None else caller.key_id
    return Draft(new_id("plan"), pool.tenant_id, key_id, WorkProblem(document, digest, columns), None, digest)


def _is_for(plan: PlanRecord, locked: LockedPool) -> bool:
    """Return whether the pool is the one that was planned, unchanged; a recreated pool restarts its revisions."""
    pool = locked.pool
    return pool.deleted_at is None and pool.revision == plan.revision and pool.created_at == plan.made_at


def _is_older(plan: PlanRecord, locked: LockedPool) -> bool:
    return locked.in_force_since is not None and plan.submitted_at < locked.in_force_since
