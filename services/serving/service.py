"""Use cases on pools: create, change, read and delete them.

A pool's *revision* counts the changes of the spec that plans and instances are made from. Whether plans are carried out
is not part of it: changing that supersedes no plan.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from services.contracts import serving
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.problems import FieldError
from services.kit.problems import ProblemError, conflict
from services.kit.routes import one_page, read_cursor
from services.kit.starts import check_start
from services.serving.carbon import CarbonZones
from services.serving.named import ANY_ID, Named
from services.serving.planning.plans import Plans
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.instances import by_state, minute_name
from services.serving.repository.pools import PoolRecord
from services.serving.repository.specs import SpecRows


class Pools(Named[PoolRecord, serving.Pool]):
    """What callers may do with pools. Users see their tenant's, operators all."""

    kind = "Pool"

    def __init__(self, repository: ServingRepository, zones: CarbonZones, plans: Plans, plan_interval_s: float) -> None:
        super().__init__(repository)
        self._zones, self._plans = zones, plans
        self._plan_interval = timedelta(seconds=plan_interval_s)

    def _rows(self, queries: Queries) -> SpecRows[PoolRecord]:
        return queries.pools

    async def _show(self, queries: Queries, records: Sequence[PoolRecord], caller: Identity) -> list[serving.Pool]:
        names = [each.name for each in records]
        stale, counts = await queries.pools.stale(names, self._plan_interval), await queries.instances.counts(names)
        return [
            serving.Pool.of(
                each,
                is_deleted=each.deleted_at is not None,
                is_plan_stale=each.name in stale,
                instances=by_state(counts[each.name]),
            )
            for each in records
        ]

    async def put(
        self, name: str, spec: serving.PoolSpec, caller: Identity, if_match: str | None = None
    ) -> tuple[serving.Pool, bool]:
        """Create a pool, or replace its spec; return it, and whether it is new. The same spec changes nothing.

        Raises:
            ProblemError: 422 for an unknown zone or signal, or a command that is too large; 412 unless the pool is at
                ``if_match``; 409 for one that is being deleted, or for a model that another pool of the tenant serves.
        """
        check_start({f"/modes/{at}": mode for at, mode in enumerate(spec.modes)})
        await self._zones.check({f"/places/{at}": (each.zone, each.signal) for at, each in enumerate(spec.places)})
        async with self._repository.writing() as queries:
            if if_match not in (None, "*") and if_match != etag(await self._locked(queries, name, caller)):
                raise ProblemError(412, ProblemCode.CONFLICT, f"Pool {name} was changed meanwhile; read it again.")
            pool, is_new = await self._set(queries, name, spec, caller, may_be_new=if_match is None)
            await _check_models(queries, pool)
            return pool, is_new

    async def set_mode(self, name: str, mode: serving.PlanMode, caller: Identity) -> serving.Pool:
        """Have plans carried out or proposed; ``ProblemError``: 404 without a pool, 409 if it is being deleted."""
        async with self._repository.writing() as queries:
            pool = await self._locked(queries, name, caller)
            spec = serving.PoolSpec.as_stored({**pool.document, "mode": mode})
            return (await self._set(queries, name, spec, caller, may_be_new=False))[0]

    async def _before_deletion(self, queries: Queries, record: PoolRecord) -> None:
        if record.deleted_at is None:
            await queries.plans.supersede(record.name)

    async def _replace(self, queries: Queries, record: PoolRecord, spec: serving.PoolSpec, caller: Identity) -> None:
        is_revised = spec.model_copy(update={"mode": record.spec.mode}) != record.spec
        revision = record.revision + is_revised
        await queries.pools.set_spec(record.name, spec, revision=revision)
        await queries.audit(caller, "pool.changed", record.name, revision=revision, mode=str(spec.mode))

    async def instances(self, name: str, query: serving.InstanceQuery, caller: Identity) -> serving.InstanceList:
        """Return a page of a pool's instances, newest first; ``ProblemError``: 404 without a pool, 422: cursor."""
        async with self._repository.reading() as queries:
            pool = await queries.pools.find(name, caller)
            before = read_cursor(query.cursor, ANY_ID)
            found = await queries.instances.page(pool, states=query.state, before=before, limit=query.limit + 1)
            items, cursor = one_page(found, query.limit, lambda instance: instance.id)
            clocks = await queries.clocks.now([each.job_id for each in items if each.job_id is not None])
        items = [each.model_copy(update={"clock": clocks.get(each.job_id or "")}) for each in items]
        return serving.InstanceList(items=items, next_cursor=cursor)

    async def clocks(self, name: str, query: serving.ClockHistoryQuery, caller: Identity) -> serving.ClockHistory:
        """Return a page of the minutes of a pool's clocks, newest first; ``ProblemError`` as for ``instances``."""
        async with self._repository.reading() as queries:
            pool = await queries.pools.find(name, caller)
            position = read_cursor(query.cursor, rf"[0-9]{{1,11}}\.{ANY_ID}")
            found = await queries.clocks.history(pool, query, _minute_of(position) if position else None)
        items, cursor = one_page(found, query.limit, lambda each: minute_name(each.start_at, each.instance))
        return serving.ClockHistory(items=items, next_cursor=cursor)

    async def plan_now(self, name: str, caller: Identity) -> serving.PoolPlanDetail:
        """Have a pool planned, or return its plan under way; ``ProblemError``: 404 without it, 409 if it is deleted."""
        async with self._repository.writing() as queries:  # first: nothing is done that is not written down
            await self._locked(queries, name, caller)
            await queries.audit(caller, "pool.plan_requested", name)
        return await self._plans.find(name, await self._plans.submit(name, serving.PlanTrigger.REQUEST, caller))

    async def accept(self, name: str, plan_id: str, caller: Identity) -> serving.PoolPlanDetail:
        """Put a proposed plan in force, once; ``ProblemError``: 404, or 409 for no proposal, or an outdated one."""
        await self._plans.find(name, plan_id)
        await self._plans.apply(plan_id, caller)
        return await self._plans.find(name, plan_id)

    async def plan(self, name: str, plan_id: str, caller: Identity) -> serving.PoolPlanDetail:
        """Return a complete plan; ``ProblemError``: 404 if there is no such pool or plan that the caller may see."""
        async with self._repository.reading() as queries:
            await queries.pools.find(name, caller)
        return await self._plans.find(name, plan_id)

    async def plans(self, name: str, query: serving.PoolPlanQuery, caller: Identity) -> serving.PoolPlanList:
        """Return a page of a pool's plans, newest first; ``ProblemError`` as for ``instances``."""
        async with self._repository.reading() as queries:
            await queries.pools.find(name, caller)
        return await self._plans.page(name, query)


def etag(pool: serving.Pool | PoolRecord) -> str:
    return f'"{pool.revision}-{pool.spec.mode}"'


def _minute_of(position: str) -> tuple[datetime, str]:
    at_s, _, instance = position.partition(".")
    return datetime.fromtimestamp(int(at_s), UTC), instance


async def _check_models(queries: Queries, pool: serving.Pool) -> None:
    """Refuse a model that another pool of the same tenant serves: a request could go to either."""
    models = pool.spec.models
    taken = await queries.routing.other_pool_of(pool.name, models, pool.tenant_id) if models else None
    if taken is not None:
        detail = f"Pool {taken[0]} serves the model {taken[1]}; a model is served by one pool of a tenant."
        raise conflict(detail, errors=[FieldError(pointer="/models", detail=detail)])
