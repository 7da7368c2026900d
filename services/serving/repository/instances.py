"""The controller's queries."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import RowMapping, bindparam, func, insert, select, text, update

from services.contracts.apps import AppSpec, FleetSpec
from services.contracts.clocks import ClockPolicy
from services.contracts.nodes import ClockMinute, Listener
from services.contracts.pools import PoolsResult
from services.contracts.serving import (
    ClockHistoryQuery,
    InstanceClock,
    InstanceClockMinute,
    InstancePod,
    InstanceState,
    PoolInstance,
    PoolSpec,
)
from services.core.domain.jobs import JobState
from services.core.domain.reasons import Reason
from services.db.tables import pool_instances
from services.kit.readable import BY_NAME, Unread, each_readable, readable
from services.serving.controller.advance import Change
from services.serving.controller.diff import Combination, Life
from services.serving.instances import (
    APP_PREFIX,
    LEFT_AS_PLANNED,
    Blueprint,
    Instance,
    InstanceJob,
    InstanceTerms,
    app_blueprint,
    pool_blueprint,
    read_terms,
)
from services.serving.repository.pools import PoolRecord
from services.serving.repository.specs import Rows, record_of

_POOLS = "SELECT name, tenant_id, spec::text AS spec, revision, plan_id, deleted_at, created_at, updated_at FROM pools"
ALL_POOLS = text(f"{_POOLS} ORDER BY name")
LOCK_POOL = text(f"{_POOLS} WHERE name = :name FOR UPDATE SKIP LOCKED")

_APPS = """
SELECT a.name, a.tenant_id, a.spec::text AS spec, f.spec::text AS fleet, a.planned_revision, a.revision, a.plan_id,
       a.target, a.deleted_at, a.created_at, a.updated_at
  FROM apps a JOIN fleets f ON f.name = a.fleet
"""
ALL_APPS = text(f"{_APPS} ORDER BY a.name")
LOCK_APP = text(f"{_APPS} WHERE a.name = :name FOR UPDATE OF a SKIP LOCKED")

_IN_CLUSTER = "tenant_id = :tenant AND state <> 'ended' AND terms #>> '{place,cluster}' = :cluster"
LOCK_IN_CLUSTER = text(f"""
{_POOLS}
 WHERE tenant_id = :tenant AND (
       spec @> jsonb_build_object('places', jsonb_build_array(jsonb_build_object('cluster', CAST(:cluster AS text))))
    OR name IN (SELECT pool FROM pool_instances WHERE {_IN_CLUSTER}))
 ORDER BY name FOR UPDATE
""")

LIVE = text("""
SELECT i.id, i.pool, i.tenant_id, i.place, i.mode, i.partition, i.request_class, i.terms::text AS terms, i.state,
       i.listener AS known_listener, i.sealed_key, i.checks_key, i.pod,
       i.url, i.reason, i.detail, i.created_at, i.ready_at, i.silent_since, i.draining_at, i.stopping_at,
       coalesce(i.job_id, s.job_ids[1]) AS job_id, j.state AS job_state, j.reason AS job_reason,
       j.detail AS job_detail, j.cancel_requested, coalesce(j.queued_at, j.submitted_at) AS queued_at,
       n.address, a.master_port, a.running_at, r.listener
  FROM pool_instances i
  LEFT JOIN submissions s ON i.job_id IS NULL AND s.tenant_id = i.tenant_id AND s.idempotency_key = i.id
  LEFT JOIN jobs j ON j.id = coalesce(i.job_id, s.job_ids[1])
  LEFT JOIN live_gangs a ON a.job_id = j.id AND a.state = 'running' AND j.state = 'running'
  LEFT JOIN known_nodes n ON n.id = a.leader
  LEFT JOIN rank_reports r ON r.allocation_id = a.id AND r.node_id = n.id
 WHERE i.state <> 'ended' AND (CAST(:pool AS text) IS NULL OR i.pool = :pool)
 ORDER BY i.id
""")
"""If a process was killed between submitting a job and storing its id, the job is found by the instance's key."""

LIVES = text("""
SELECT place, mode, created_at, ready_at,
       CASE WHEN state IN ('stopping', 'ended') AND coalesce(reason, '') <> ALL(CAST(:planned AS text[]))
            THEN coalesce(stopping_at, ended_at) END AS failed_at
  FROM pool_instances WHERE pool = :key AND created_at > :since ORDER BY created_at DESC, id DESC LIMIT 1000
""")
PLAN = text("SELECT revision, result -> 'plan' AS plan FROM pool_plans WHERE id = :plan")


@lru_cache(maxsize=1_024)
def _read_blueprint(document: str) -> Blueprint:
    return pool_blueprint(PoolSpec.as_stored(document))


@lru_cache(maxsize=1_024)
def _read_app_blueprint(document: str, fleet: str) -> Blueprint:
    return app_blueprint(AppSpec.as_stored(document), FleetSpec.as_stored(fleet))


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan's instances: by place and mode, then by class."""

    revision: int
    partition: str | None
    target: dict[Combination, dict[str | None, int]]


@dataclass(frozen=True, slots=True)
class InstanceOwner:
    """A pool or an application, as the controller needs it."""

    key: str  #: What its instances have as ``pool``: a pool's name, or ``app:`` and an application's name
    name: str
    tenant_id: str
    blueprint: Blueprint
    revision: int
    plan_id: str | None
    is_deleted: bool
    changed_at: datetime
    is_app: bool = False
    target: PlanInForce | None = None  #: What an application should have; a pool has a plan instead
    leave: frozenset[str] = frozenset()  #: Instances of an application that leave at once, before others of their kind


@dataclass(frozen=True, slots=True)
class NewInstance:
    """An instance that the plan in force wants."""

    id: str
    owner: InstanceOwner
    place: str
    mode: str
    partition: str | None
    request_class: str
    terms: InstanceTerms
    sealed_key: bytes | None


_OWN = ("id", "place", "mode", "partition", "request_class", "sealed_key")


class InstanceRows(Rows):
    """Queries on instances and, as the controller needs them, on pools, applications and plans."""

    async def owners(self) -> list[InstanceOwner]:
        """Return the pools and applications that can be read."""
        pools = readable(await self._rows(ALL_POOLS), _pool, "pool", BY_NAME)
        return pools + readable(await self._rows(ALL_APPS), _app, "app", BY_NAME)

    async def lock(self, owner: InstanceOwner) -> InstanceOwner | None:
        """Return and lock a pool or an application; None if it is gone, or another process holds the lock."""
        query, read = (LOCK_APP, _app) if owner.is_app else (LOCK_POOL, _pool)
        row = await self._row(query, {"name": owner.name})
        return None if row is None else read(row)

    async def lock_in(self, cluster: str, tenant_id: str) -> tuple[list[InstanceOwner], bool]:
        """Return and lock a tenant's pools that name a cluster or have instances there, and whether all can be read."""
        rows = await self._rows(LOCK_IN_CLUSTER, {"cluster": cluster, "tenant": tenant_id})
        found = readable(rows, _pool, "pool", BY_NAME)
        return found, len(found) == len(rows)

    async def live(self) -> list[Instance]:
        """Return the instances that have not ended and can be read, the oldest first."""
        return readable(await self._rows(LIVE, {"pool": None}), _instance, "instance")

    async def live_of(self, owner: InstanceOwner) -> list[Instance]:
        """Return an owner's instances that have not ended, the oldest first.

        If one cannot be read, this fails: another one would be started in its place.
        """
        return [_instance(row) for row in await self._rows(LIVE, {"pool": owner.key})]

    async def plan(self, plan_id: str) -> PlanInForce | None:
        """Return a plan; None if it names no instances, not even zero of them."""
        row = (await self._connection.execute(PLAN, {"plan": plan_id})).one_or_none()
        if row is None or row.plan is None:
            return None
        plan = PoolsResult.as_stored(row.plan)
        if plan.partition is None:
            return None
        target: dict[Combination, dict[str | None, int]] = {}
        for each in plan.instances:
            classes = target.setdefault((each.location, each.mode), {})
            classes[each.request_class] = classes.get(each.request_class, 0) + each.count
        return PlanInForce(row.revision, plan.partition, target)

    async def lives(self, key: str, since: datetime) -> list[Life]:
        """Return the lives of the newest instances of a pool or an application since a moment, newest first."""
        planned = [reason.value for reason in LEFT_AS_PLANNED]
        rows = await self._connection.execute(LIVES, {"key": key, "since": since, "planned": planned})
        return [Life((row.place, row.mode), row.created_at, row.ready_at, row.failed_at) for row in rows]

    async def counts(self, keys: Collection[str]) -> dict[str, dict[tuple[InstanceState, str], int]]:
        """Return how many instances owners have, by state and mode; those that ended are left out."""
        c = pool_instances.c
        query = select(c.pool, c.state, c.mode, func.count()).where(c.pool.in_(keys), c.state != InstanceState.ENDED)
        found: dict[str, dict[tuple[InstanceState, str], int]] = {key: {} for key in keys}
        for key, state, mode, count in await self._connection.execute(query.group_by(c.pool, c.state, c.mode)):
            found[key][InstanceState(state), mode] = count
        return found

    async def change(self, changes: Sequence[tuple[Instance, Change]]) -> None:
        """Write one change for each instance; none has changed since it was read, because their pools are locked."""
        by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        for each, change in changes:
            values = {f"new_{name}": value for name, value in change.items()}
            by_columns[tuple(change)].append({"row_id": each.id, "row_state": each.state.value, **values})
        c = pool_instances.c
        for columns, rows in by_columns.items():
            query = update(pool_instances).where(c.id == bindparam("row_id"), c.state == bindparam("row_state"))
            await self._connection.execute(query.values({name: bindparam(f"new_{name}") for name in columns}), rows)

    async def set_pods(self, pods: Sequence[tuple[Instance, InstancePod]]) -> None:
        """Write what is known of instances' pods, where that has changed."""
        await self.change([(one, {"pod": pod.model_dump(mode="json")}) for one, pod in pods if pod != one.pod])

    async def add(self, instances: Sequence[NewInstance]) -> None:
        await self._connection.execute(
            insert(pool_instances),
            [
                {name: getattr(each, name) for name in _OWN}
                | {"pool": each.owner.key, "tenant_id": each.owner.tenant_id, "plan_id": each.owner.plan_id}
                | {"terms": each.terms.model_dump(mode="json"), "state": InstanceState.WANTED.value}
                for each in instances
            ],
        )

    async def page(
        self, pool: PoolRecord, *, states: Sequence[InstanceState], before: str | None, limit: int
    ) -> list[PoolInstance | Unread]:
        """Return a pool's instances, newest first."""
        c = pool_instances.c
        columns = [c[field] for field in PoolInstance.model_fields if field != "clock"]
        # Those of an earlier pool of this name may have been another tenant's.
        query = select(*columns).where(c.pool == pool.name, c.created_at >= pool.created_at, c.state.in_(states))
        if before is not None:
            query = query.where(c.id < before)
        rows = await self._rows(query.order_by(c.id.desc()).limit(limit))
        return each_readable(rows, lambda row: PoolInstance.model_validate(dict(row)), "instance")


def by_state(counts: Mapping[tuple[InstanceState, str], int]) -> dict[InstanceState, int]:
    """Return how many instances there are by state alone."""
    found: dict[InstanceState, int] = {}
    for (state, _), count in sorted(counts.items()):
        found[state] = found.get(state, 0) + count
    return found


def _pool(row: RowMapping) -> InstanceOwner:
    return _owner(row, row["name"], _read_blueprint(row["spec"]))


def _app(row: RowMapping) -> InstanceOwner:
    blueprint = _read_app_blueprint(row["spec"], row["fleet"])
    target: dict[Combination, dict[str | None, int]] = {}
    for variant, size, count in row["target"]["wanted"]:
        target[blueprint.place, f"{variant}.{size}"] = {variant: count}
    plan, leave = PlanInForce(row["planned_revision"], None, target), frozenset[str](row["target"]["leave"])
    return _owner(row, APP_PREFIX + row["name"], blueprint, is_app=True, target=plan, leave=leave)


def _owner(row: RowMapping, key: str, blueprint: Blueprint, **more: Any) -> InstanceOwner:
    is_deleted, changed_at = row["deleted_at"] is not None, max(row["created_at"], row["updated_at"])
    columns = {name: row[name] for name in ("name", "tenant_id", "revision", "plan_id")}
    return InstanceOwner(key=key, blueprint=blueprint, is_deleted=is_deleted, changed_at=changed_at, **columns, **more)


def _instance(row: RowMapping) -> Instance:
    terms, process = read_terms(row["terms"])
    pod = None if row["pod"] is None else InstancePod.as_stored(row["pod"])
    return record_of(
        Instance,
        row,
        state=InstanceState(row["state"]),
        terms=terms,
        process=process,
        job=_pod_job(pod) if pod else None if row["job_state"] is None else _job(row),
        pod=pod,
        ended_at=None,
        listener=None if row["known_listener"] is None else Listener(row["known_listener"]),
    )


def _pod_job(pod: InstancePod) -> InstanceJob:
    """Return what stands for the job of an instance that is a pod."""
    waits = pod.reason == Reason.NOT_ENOUGH_FREE_GPUS
    return InstanceJob(
        state=JobState.CANCELLED if pod.is_gone else JobState.QUEUED if waits else JobState.RUNNING,
        reason=pod.reason,
        detail=pod.detail,
        queued_at=pod.since if waits else None,
        url=pod.url,
        running_at=pod.since if pod.url else None,
    )


def _job(row: RowMapping) -> InstanceJob:
    address: str | None = row["address"]
    host = f"[{address}]" if address is not None and ":" in address else address
    return InstanceJob(
        state=JobState(row["job_state"]),
        reason=row["job_reason"],
        detail=row["job_detail"],
        cancel_requested=row["cancel_requested"],
        queued_at=row["queued_at"],
        url=None if host is None else f"http://{host}:{row['master_port']}",
        running_at=row["running_at"],
        listener=None if row["listener"] is None else Listener(row["listener"]),
    )


NOW = text("""
SELECT a.job_id, a.shares -> 0 -> 'devices' AS devices, n.readings,
       m.policy, m.dry_run, m.exceeded::float8 / m.decisions AS exceeded_share,
       m.unobserved::float8 / m.decisions AS unobserved_share, m.model_error, m.unused
  FROM live_gangs a
  JOIN known_nodes n ON n.id = a.leader AND n.state = 'up'
  LEFT JOIN LATERAL (
       SELECT * FROM server_clocks c WHERE c.job_id = a.job_id ORDER BY c.start_at DESC LIMIT 1) m ON true
 WHERE a.job_id = ANY(CAST(:jobs AS text[])) AND a.state = 'running'
""")
HISTORY = text("""
SELECT i.id AS instance, c.*
  FROM pool_instances i JOIN server_clocks c ON c.job_id = i.job_id
 WHERE i.pool = :pool AND i.created_at >= :made_at
   AND (CAST(:instance AS text) IS NULL OR i.id = :instance)
   AND (CAST(:since AS timestamptz) IS NULL OR c.start_at >= :since)
   AND (CAST(:until AS timestamptz) IS NULL OR c.start_at < :until)
   AND (CAST(:before_at AS timestamptz) IS NULL OR (c.start_at, i.id) < (:before_at, CAST(:before_id AS text)))
 ORDER BY c.start_at DESC, i.id DESC LIMIT :limit
""")
"""Instances of an earlier pool of this name may have been another tenant's."""

_MINUTE = {*ClockMinute.model_fields, "instance", "job_id"}


class ClockRows(Rows):
    """Queries on clocks."""

    async def now(self, jobs: Collection[str]) -> dict[str, InstanceClock]:
        rows = await self._rows(NOW, {"jobs": list(jobs)})
        return {row["job_id"]: _clock(row) for row in rows}

    async def history(
        self, pool: PoolRecord, query: ClockHistoryQuery, before: tuple[datetime, str] | None
    ) -> list[InstanceClockMinute | Unread]:
        """Return minutes of clocks, newest first, one more than asked; if given, those before a minute and instance."""
        before_at, before_id = before or (None, None)
        terms = query.model_dump(include={"instance", "since", "until"}) | {"limit": query.limit + 1}
        terms |= {"pool": pool.name, "made_at": pool.created_at, "before_at": before_at, "before_id": before_id}
        rows = await self._rows(HISTORY, terms)
        return each_readable(
            rows,
            lambda row: InstanceClockMinute.model_validate({name: row[name] for name in _MINUTE}),
            "minute",
            lambda row: minute_name(row["start_at"], row["instance"]),
        )


def minute_name(start_at: datetime, instance: str) -> str:
    """Return the position of a minute of an instance in their list."""
    return f"{start_at.timestamp():.0f}.{instance}"


def _clock(row: RowMapping) -> InstanceClock:
    devices = set(row["devices"])
    readings = [each for each in row["readings"] if each["index"] in devices]
    measured = [each["clock_mhz"] for each in readings if each["clock_mhz"] is not None]
    wanted = next((each["latency_clock_mhz"] for each in readings if each.get("latency_clock_mhz") is not None), None)
    known = {"clock_mhz": min(measured, default=None), "wanted_mhz": wanted}
    if wanted is None or row["policy"] is None:  # what the newest minute says is over, or has not arrived
        return InstanceClock.model_validate({**known, "policy": ClockPolicy.DEFAULT})
    names = ("policy", "dry_run", "exceeded_share", "unobserved_share", "model_error", "unused")
    return InstanceClock.model_validate({**known, **{name: row[name] for name in names}})
