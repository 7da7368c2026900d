"""Queries on fleets: their specs, their GPUs, the instances on them, and their plans."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson
from pydantic import TypeAdapter
from sqlalchemy import RowMapping, Select, delete, func, insert, or_, select, text, update

from services.contracts.apps import FleetEvaluation, FleetPlanState, FleetPlanTrigger, FleetSearch, FleetSpec
from services.contracts.identity import Identity
from services.contracts.routing import EVERY_TENANT
from services.contracts.serving import InstanceState
from services.core.domain.counted import counted
from services.core.domain.mig import placed
from services.db.gpu_partitions import RELEASE, WANT
from services.db.tables import apps, fleet_plans, fleets, gpu_partitions
from services.kit.readable import Unread, each_readable
from services.serving.fleets.assignment import (
    UNKNOWN,
    Assignment,
    Gpu,
    GpuState,
    Placed,
    Sizes,
    ordered,
)
from services.serving.fleets.steps import Progress
from services.serving.fleets.triggers import Basis, LastPlan
from services.serving.instances import APP_PREFIX
from services.serving.repository.specs import SpecRows, record_of

STORED_ASSIGNMENT, STORED_BASIS, STORED_PROGRESS = TypeAdapter(Assignment), TypeAdapter(Basis), TypeAdapter(Progress)
ACTIVE = (FleetPlanState.SOLVING, FleetPlanState.MEASURING, FleetPlanState.CARRYING_OUT)

GPUS = text("""
SELECT p.owner, p.node_id, p.gpu, p.sizes, p.state, p.detail, n.devices,
       u.id IS NOT NULL AND NOT EXISTS (
           SELECT FROM unusable_gpus h WHERE h.node_id = p.node_id AND h.gpu = p.gpu) AS is_up,
       (SELECT min(c.job_id) FROM held_devices c
         WHERE c.node_id = p.node_id AND c.gpu = p.gpu
           AND c.spec #>> '{service,fleet}' IS DISTINCT FROM p.owner) AS used_by,
       n.id IS NULL OR n.zone = f.spec ->> 'zone' AND n.labels @> coalesce(f.spec -> 'node_labels', '{}')
           AND NOT EXISTS (SELECT FROM jsonb_array_elements(n.devices) d
                            WHERE (d ->> 'index')::int = p.gpu AND d ->> 'parent' IS NULL
                              AND d ->> 'model' <> f.spec ->> 'gpu_model') AS fits
  FROM gpu_partitions p JOIN fleets f ON f.name = p.owner LEFT JOIN known_nodes n ON n.id = p.node_id
  LEFT JOIN usable_nodes u ON u.id = p.node_id AND u.engine = 'wattshift' AND NOT u.draining
 WHERE p.owner = ANY(CAST(:fleets AS text[])) ORDER BY p.node_id, p.gpu
""")

CANDIDATES = text("""
SELECT n.id AS node_id, (d ->> 'index')::int AS gpu, n.devices,
       EXISTS (SELECT FROM held_devices c WHERE c.node_id = n.id AND c.gpu = (d ->> 'index')::int) AS is_held
  FROM usable_nodes n, jsonb_array_elements(n.devices) d
 WHERE n.engine = 'wattshift' AND NOT n.draining AND n.zone = :zone AND n.labels @> CAST(:labels AS jsonb)
   AND d ->> 'model' = :model AND d ->> 'parent' IS NULL
   AND NOT EXISTS (SELECT FROM unusable_gpus h WHERE h.node_id = n.id AND h.gpu = (d ->> 'index')::int)
   AND NOT EXISTS (SELECT FROM gpu_partitions q WHERE q.node_id = n.id AND q.gpu = (d ->> 'index')::int
                    AND (q.owner IS NOT NULL OR q.sizes <> '[]'))
 ORDER BY is_held, n.id, gpu
""")
"""GPUs that a fleet may take: nobody's, and cut by no operator; those that nothing runs on first."""

PLACED = text("""
SELECT DISTINCT ON (i.id) i.id, i.pool, i.mode, i.state, c.node_id, c.gpu
  FROM pool_instances i LEFT JOIN held_devices c ON c.job_id = i.job_id
 WHERE i.state <> 'ended' AND i.pool = ANY(CAST(:keys AS text[])) ORDER BY i.id
""")


@dataclass(frozen=True)
class Candidate:
    """A GPU that a fleet may take."""

    gpu: Gpu
    sizes: Sizes  #: How it is cut
    is_free: bool  #: Whether nothing runs on it


@dataclass(frozen=True)
class FleetRecord:
    """A row of ``fleets``."""

    name: str
    tenant_id: str
    spec: FleetSpec
    revision: int
    assignment: Assignment
    only_proposes: str | None
    failures: int
    retry_at: datetime | None
    deleted_at: datetime | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class PlanRecord(LastPlan):
    """A row of ``fleet_plans``."""

    id: str
    fleet: str
    detail: str | None
    problem: dict[str, Any] | None
    result: dict[str, Any] | None
    progress: Progress | None
    search: FleetSearch | None
    ended_at: datetime | None

    @property
    def short(self) -> list[str]:
        """The applications whose limits it does not keep, as it was found that nothing keeps them."""
        return [each["name"] for each in (self.result or {}).get("applications", ()) if not each["keeps_limits"]]

    @property
    def shortage(self) -> str | None:
        """What it says of those, and of the applications that there is no GPU for; None if there are neither."""
        with_gpus = f"with {counted(len(self.basis.gpus), 'GPU')}"
        said = [f"No configuration keeps the limits of {', '.join(self.short)} {with_gpus}."] if self.short else []
        if self.progress is not None:
            there = {kind[0] for kinds in self.progress.after.values() for kind in kinds}
            left = self.basis.revisions.keys() - there - {""}
            said += [f"There is nothing for {', '.join(sorted(left))} {with_gpus}."] if left else []
        return " ".join(said) or None


class FleetRows(SpecRows[FleetRecord]):
    """Queries on fleets."""

    table, what = fleets, "fleet"

    def _record(self, row: RowMapping) -> FleetRecord:
        assignment = STORED_ASSIGNMENT.validate_python(row["assignment"])
        return record_of(FleetRecord, row, spec=FleetSpec.as_stored(row["spec"]), assignment=assignment)

    def _seen(self, query: Select[Any], caller: Identity | None) -> Select[Any]:
        """Leave out the fleets that no application of the caller's tenant may use."""
        if caller is None or caller.is_operator:
            return query
        tenants = fleets.c.spec["tenants"]
        return query.where(or_(tenants.contains([EVERY_TENANT]), tenants.contains([caller.tenant_id])))

    async def names(self) -> list[str]:
        return list((await self._connection.execute(select(fleets.c.name).order_by(fleets.c.name))).scalars())

    async def set_assignment(self, name: str, assignment: Assignment) -> None:
        """Write which instances belong on which GPU."""
        await self.change(name, assignment=STORED_ASSIGNMENT.dump_python(assignment, mode="json"))

    async def remove(self, name: str) -> None:
        await self._connection.execute(delete(fleet_plans).where(fleet_plans.c.fleet == name))
        await super().remove(name)

    async def is_ordered(self, zone: str) -> bool:
        """Return whether an order of the grid is in force in a zone."""
        query = text("SELECT EXISTS (SELECT FROM orders_in_force WHERE zone IS NULL OR zone = :zone)")
        return bool((await self._connection.execute(query, {"zone": zone})).scalar_one())

    # GPUs

    async def gpus(self, names: Collection[str]) -> dict[str, list[GpuState]]:
        found: dict[str, list[GpuState]] = defaultdict(list)
        for row in await self._rows(GPUS, {"fleets": list(names)}):
            sizes = present_sizes(row["devices"] or [], row["gpu"])
            found[row["owner"]].append(
                GpuState(
                    at=(row["node_id"], row["gpu"]),
                    sizes=UNKNOWN if sizes is None else sizes,
                    wanted=ordered(row["sizes"]),
                    state=row["state"],
                    is_up=row["is_up"] and sizes is not None,
                    detail=row["detail"] or "",
                    used_by=row["used_by"],
                    fits=row["fits"],
                )
            )
        return found

    async def candidates(self, spec: FleetSpec) -> list[Candidate]:
        """Return GPUs that a fleet may take, free ones first."""
        values = {"zone": spec.zone, "labels": orjson.dumps(spec.node_labels).decode(), "model": spec.gpu_model}
        return [
            Candidate((row["node_id"], row["gpu"]), sizes, is_free=not row["is_held"])
            for row in await self._rows(CANDIDATES, values)
            if (sizes := present_sizes(row["devices"], row["gpu"])) is not None
        ]

    async def want(self, gpu: Gpu, sizes: Sizes, fleet: str) -> bool:
        """Have a fleet's GPU cut; return False if it belongs to somebody else."""
        document = [] if sizes == UNKNOWN else [place.sevenths for place in placed(sizes)]
        c = gpu_partitions.c
        known = await self._connection.execute(
            select(c.sizes, c.owner, c.state).where(c.node_id == gpu[0], c.gpu == gpu[1]).with_for_update()
        )
        row = known.one_or_none()
        if row is not None and row.state != "failed" and (row.sizes, row.owner) == (document, fleet):
            return True
        found = await self._connection.exec_driver_sql(WANT, (*gpu, orjson.dumps(document).decode(), fleet))
        return found.one_or_none() is not None

    async def release(self, gpu: Gpu, fleet: str) -> None:
        """Give a fleet's GPU back."""
        await self._connection.exec_driver_sql(RELEASE, (*gpu, fleet))

    async def placed(self, app_names: Collection[str]) -> list[Placed]:
        """Return the instances of applications that have not ended, with the GPUs they hold."""
        keys = [APP_PREFIX + name for name in app_names]
        return [
            Placed(
                id=row["id"],
                kind=(row["pool"].removeprefix(APP_PREFIX), *variant_and_slice(row["mode"])),
                state=InstanceState(row["state"]),
                gpu=None if row["node_id"] is None else (row["node_id"], row["gpu"]),
            )
            for row in await self._rows(PLACED, {"keys": keys})
        ]

    # Plans

    async def newest_plan(self, fleet: str) -> PlanRecord | None:
        c = fleet_plans.c
        # Neither ids nor times tell when the clock was set back; but the next is made when the last one is over.
        order = (c.state.in_(ACTIVE).desc(), c.made_at.desc(), c.id.desc())
        row = await self._row(select(fleet_plans).where(c.fleet == fleet).order_by(*order).limit(1))
        return None if row is None else _plan(row)

    async def plan(self, fleet: str, plan_id: str) -> PlanRecord | None:
        row = await self._row(select(fleet_plans).where(fleet_plans.c.fleet == fleet, fleet_plans.c.id == plan_id))
        return None if row is None else _plan(row)

    async def plans(self, fleet: str, before: str | None, limit: int) -> list[PlanRecord | Unread]:
        query = select(fleet_plans).where(fleet_plans.c.fleet == fleet).order_by(fleet_plans.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(fleet_plans.c.id < before)
        return each_readable(await self._rows(query), _plan, "plan")

    async def evaluations(self, fleet: str, start_at: datetime, end_at: datetime) -> list[FleetEvaluation]:
        """Return the evaluations of searches by measurement that began in a period, in order."""
        c = fleet_plans.c
        query = select(c.search).where(
            c.fleet == fleet, c.search.is_not(None), c.made_at < end_at, func.coalesce(c.ended_at, end_at) >= start_at
        )
        searches = [FleetSearch.as_stored(each) for each in (await self._connection.execute(query)).scalars()]
        found = [each for search in searches for each in search.evaluations]
        return sorted((each for each in found if start_at <= each.begun_at < end_at), key=lambda each: each.begun_at)

    async def add_plan(
        self,
        plan_id: str,
        fleet: str,
        trigger: FleetPlanTrigger,
        basis: Basis,
        gco2_per_kwh: float,
        *,
        problem: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> PlanRecord:
        """Add a plan that is to be solved, or BASE, which is carried out at once; what was proposed is superseded."""
        c = fleet_plans.c
        proposed = update(fleet_plans).where(c.fleet == fleet, c.state == FleetPlanState.PROPOSED)
        await self._connection.execute(proposed.values(state=FleetPlanState.SUPERSEDED))
        state = FleetPlanState.SOLVING if progress is None else FleetPlanState.CARRYING_OUT
        values = {"id": plan_id, "fleet": fleet, "trigger": trigger, "state": state, "gco2_per_kwh": gco2_per_kwh}
        values |= {"basis": _stored(basis), "problem": problem, "progress": _stored(progress)}
        added = await self._connection.execute(insert(fleet_plans).values(values).returning(*c))
        return _plan(added.mappings().one())

    async def change_plan(self, plan: PlanRecord, state: FleetPlanState, **values: Any) -> PlanRecord:
        """Change a plan, and return it as changed; if it is no longer active, it ends now."""
        ended = {} if state in ACTIVE else {"ended_at": func.now()}
        stored = {name: _stored(value) for name, value in values.items()}
        statement = update(fleet_plans).where(fleet_plans.c.id == plan.id)
        await self._connection.execute(statement.values(state=state, **ended, **stored))
        return replace(plan, state=state, **values)

    async def apps_of(self, names: Collection[str], caller: Identity) -> dict[str, dict[str, datetime]]:
        """Return when fleets' applications were made that a caller may see and that are not being deleted, by fleet."""
        c = apps.c
        query = select(c.fleet, c.name, c.created_at).where(c.fleet.in_(names), c.deleted_at.is_(None))
        if not caller.is_operator:
            query = query.where(c.tenant_id == caller.tenant_id)
        found: dict[str, dict[str, datetime]] = {name: {} for name in names}
        for fleet, name, created_at in await self._connection.execute(query.order_by(c.name)):
            found[fleet][name] = created_at
        return found


def variant_and_slice(mode: str) -> tuple[str, str]:
    """Return the variant and the slice of an instance's mode, such as ``b7.3g``."""
    variant, _, size = mode.rpartition(".")
    return variant, size


def present_sizes(devices: Sequence[Mapping[str, Any]], gpu: int) -> Sizes | None:
    """Return how a GPU is cut, by its node's devices; None if the node has no such GPU."""
    slices = [each.get("sevenths", 7) for each in devices if each.get("parent") == gpu]
    if slices:
        return ordered(slices)
    own = next((each for each in devices if each["index"] == gpu and each.get("parent") is None), None)
    if own is None:
        return None
    return UNKNOWN if own.get("mig_enabled") else ()


def _stored(value: object) -> object:
    """Return a column of a plan in its stored form."""
    if isinstance(value, Basis):
        return STORED_BASIS.dump_python(value, mode="json")
    if isinstance(value, Progress):
        return STORED_PROGRESS.dump_python(value, mode="json")
    return value.model_dump(mode="json") if isinstance(value, FleetSearch) else value


def _plan(row: RowMapping) -> PlanRecord:
    return record_of(
        PlanRecord,
        row,
        trigger=FleetPlanTrigger(row["trigger"]),
        state=FleetPlanState(row["state"]),
        basis=STORED_BASIS.validate_python(row["basis"]),
        progress=None if row["progress"] is None else STORED_PROGRESS.validate_python(row["progress"]),
        search=None if row["search"] is None else FleetSearch.as_stored(row["search"]),
    )
