"""Jobs: reading, cancelling, holding and releasing them, one or a page at a time."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Row, RowMapping, Select, and_, func, insert, or_, select, text, true, update

from services.admission.agents import Agent
from services.admission.capacity import DeviceKind, kinds_of
from services.admission.repository import Repository
from services.admission.steering import Decision, Steered
from services.contracts.engines import OURS
from services.contracts.identity import Identity
from services.contracts.jobs import Job, JobCounts, JobFootprint, JobProgress, JobSpec, Share
from services.contracts.queries import JobQuery
from services.core.domain.jobs import JobState
from services.core.domain.topology import read_topology
from services.db.tables import (
    budgets,
    cell_energy,
    cell_jobs,
    footprints,
    gangs,
    job_events,
    jobs,
    live_gangs,
    node_agents,
    reported_work,
    users,
)
from services.kit.readable import Unread, each_readable

_FINAL = [state.value for state in JobState if state.is_final]
_with_gangs = jobs.outerjoin(live_gangs, live_gangs.c.job_id == jobs.c.id)

_warnings = (
    select(func.array_agg(budgets.c.detail))
    .where(
        budgets.c.tenant_id == jobs.c.tenant_id,
        budgets.c.project.in_(("", jobs.c.project)),
        budgets.c.exceeded,
        budgets.c.action == "warn",
        jobs.c.ended_at.is_(None),
    )
    .scalar_subquery()
    .label("warnings")
)

_FIGURES = "energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s"

_in_cells = (
    select(*(func.sum(cell_energy.c[name]).label(name) for name in _FIGURES))
    .where(cell_energy.c.job_id == jobs.c.id)
    .lateral("in_cells")
)

_WITH_ALL: Select[Any] = select(
    jobs,
    live_gangs.c.gpus,
    live_gangs.c.shares,
    live_gangs.c.power_limit_w,
    live_gangs.c.clock_mhz,
    live_gangs.c.batch_size,
    live_gangs.c.running_at,
    live_gangs.c.stop_requested_at,
    reported_work.c.done,
    reported_work.c.total,
    reported_work.c.updated_at.label("progress_at"),
    reported_work.c.saved_at,
    reported_work.c.save_every_s,
    reported_work.c.save_s,
    *((func.coalesce(footprints.c[name], 0) + func.coalesce(_in_cells.c[name], 0)).label(name) for name in _FIGURES),
    cell_jobs.c.seen,
    users.c.name.label("user_name"),
    _warnings,
).select_from(
    _with_gangs.outerjoin(reported_work, reported_work.c.job_id == jobs.c.id)
    .outerjoin(footprints, footprints.c.job_id == jobs.c.id)
    .outerjoin(cell_jobs, and_(cell_jobs.c.job_id == jobs.c.id, cell_jobs.c.cell == jobs.c.cell))
    .outerjoin(_in_cells, true())
    .outerjoin(users, users.c.id == jobs.c.user_id)
)

_CAPACITY = text("""
    SELECT id, labels, device->>'model' AS model, (device->>'memory_gib')::float AS memory_gib, zone, count(*) AS count,
        coalesce((device->>'sevenths')::int, 7) AS sevenths, device->>'parent' IS NOT NULL AS is_slice,
        coalesce((device->>'can_partition')::bool OR (device->>'mig_enabled')::bool, false) AS can_cut
    FROM known_nodes, jsonb_array_elements(devices) AS device WHERE NOT measures_only
    GROUP BY 1, 2, 3, 4, 5, 7, 8, 9
""")


USER_LABEL = "user"
"""The label by which the command line names who submitted a job; it counts for jobs that belong to no user."""


_CONDITIONS: dict[str, Callable[[Any], ColumnElement[bool]]] = {
    "tenant": lambda tenant_id: jobs.c.tenant_id == tenant_id,
    "user": lambda user: or_(
        users.c.name == user, and_(jobs.c.user_id.is_(None), jobs.c.labels.contains({USER_LABEL: user}))
    ),
    "state": jobs.c.state.in_,
    "project": lambda project: jobs.c.project == project,
    "name": lambda name: jobs.c.name == name,
    "label": lambda labels: and_(*(jobs.c.labels.contains({key: value}) for key, value in labels_of(labels))),
    "q": lambda part: jobs.c.name.icontains(part, autoescape=True),
    "submitted_after": lambda at: jobs.c.submitted_at > at,
    "submitted_before": lambda at: jobs.c.submitted_at < at,
    "id_prefix": lambda prefix: jobs.c.id.startswith(prefix, autoescape=True),
    "number": lambda number: and_(jobs.c.number == number, jobs.c.array_id.is_(None)),
    "array": lambda array_id: jobs.c.array_id == array_id,
    "cursor": lambda job_id: jobs.c.id < job_id,
}
"""What each field of a query asks of a job, if it is given."""


def labels_of(given: Sequence[str]) -> list[tuple[str, str]]:
    """Return the labels of a query, ``key=value`` each, as pairs."""
    return [(key, value) for key, _, value in (label.partition("=") for label in given)]


def conditions(wanted: JobQuery) -> list[ColumnElement[bool]]:
    """Return a query as SQL; its ``cursor`` is the id of the last job of the page before."""
    found = [ask(value) for name, ask in _CONDITIONS.items() if (value := getattr(wanted, name))]
    return found if wanted.tasks else [*found, jobs.c.array_id.is_(None)]


class Allocated(NamedTuple):
    """One of a job's gangs: its nodes by node rank, the GPUs on each, and their agents."""

    id: str
    generation: int
    node_ids: tuple[str, ...]
    gpus: tuple[int, ...]
    agents: dict[str, Agent]


def steered(row: RowMapping) -> Steered:
    return Steered(**{**row, "state": JobState(row["state"])})


def _agent(found: Any) -> Agent:
    return Agent(found.agent_url.rstrip("/"), found.enrolment, found.certificate_sha256)


class JobRepository(Repository):
    """Single jobs, and pages of them."""

    async def page(self, wanted: JobQuery) -> list[Job | Unread]:
        """Return a page of jobs and one more, newest first, and what stands for one that cannot be read."""
        query = _WITH_ALL.where(*conditions(wanted)).order_by(jobs.c.id.desc()).limit(wanted.limit + 1)
        return each_readable(await self._connection.execute(query), _job, "job", attrgetter("id"))

    async def counts(self, caller: Identity) -> JobCounts:
        """Count the jobs that have not ended and that the caller may see."""
        query = (
            select(jobs.c.state, jobs.c.reason, func.count().label("jobs"), func.sum(live_gangs.c.gpus).label("gpus"))
            .select_from(_with_gangs)
            .where(jobs.c.state.not_in(_FINAL), *_visible(caller))
            .group_by(jobs.c.state, jobs.c.reason)
        )
        found, waiting = Counter[str](), Counter[str]()
        for row in await self._connection.execute(query):
            found[row.state] += row.jobs
            found["gpus"] += row.gpus or 0
            if row.state in (JobState.QUEUED, JobState.HELD):
                waiting[row.reason or "new"] += row.jobs
        return JobCounts(**found, waiting=waiting)

    async def find(self, job_id: str, caller: Identity) -> Job | None:
        """Return a job if it exists and the caller may see it."""
        query = _WITH_ALL.where(jobs.c.id == job_id, *_visible(caller))
        row = (await self._connection.execute(query)).one_or_none()
        return None if row is None else _job(row)

    async def submitter(self, job_id: str) -> str | None:
        """Return the user whose key submitted a job; None if the key belonged to no user."""
        return await self._value(select(jobs.c.user_id).where(jobs.c.id == job_id))

    async def lock(self, job_id: str, caller: Identity) -> Steered | None:
        """Return what commands on a job depend on, if the caller may see it; lock it until the transaction ends."""
        query = select(*(jobs.c[name] for name in Steered._fields)).where(jobs.c.id == job_id, *_visible(caller))
        return await self._one(query.with_for_update(), steered)

    async def change(self, job_id: str, decision: Decision) -> None:
        """Set columns of a job that this transaction has locked."""
        values = {**decision.values, **dict.fromkeys(decision.now, func.now())}
        await self._connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))

    async def add_event(self, job_id: str, tenant_id: str, event: str, **data: Any) -> None:
        await self._connection.execute(
            insert(job_events).values(job_id=job_id, tenant_id=tenant_id, type=event, data=data)
        )

    async def allocation(self, job_id: str, generation: int | None) -> Allocated | None:
        """Return a job's gang of that generation, or its newest."""
        query = select(gangs.c.id, gangs.c.generation, gangs.c.shares).where(gangs.c.job_id == job_id)
        if generation is not None:
            query = query.where(gangs.c.generation == generation)
        row = (await self._connection.execute(query.order_by(gangs.c.generation.desc()).limit(1))).one_or_none()
        if row is None:
            return None
        node_ids = tuple(share["node_id"] for share in row.shares)
        known = await self._connection.execute(select(node_agents).where(node_agents.c.id.in_(node_ids)))
        gpus = tuple(len(share["devices"]) for share in row.shares)
        agents = {node.id: _agent(node) for node in known}
        return Allocated(row.id, row.generation, node_ids, gpus, agents)

    async def allocation_ended(self, allocation_id: str) -> bool:
        query = select(func.count()).where(live_gangs.c.id == allocation_id)
        return not (await self._connection.execute(query)).scalar_one()

    async def agents_up(self) -> dict[str, Agent]:
        node = node_agents.c
        reached = select(node_agents).where(node.state == "up", node.agent_url != "")  # a bridge to an engine has none
        known = await self._connection.execute(reached.order_by(node.id))
        return {node.id: _agent(node) for node in known}

    async def capacity(self) -> list[DeviceKind]:
        """Return the devices of all registered nodes."""
        rows = [(id, labels, DeviceKind(*kind)) for id, labels, *kind in await self._connection.execute(_CAPACITY)]
        file = (await self._connection.execute(text("SELECT file FROM known_topology"))).scalar()
        return kinds_of(rows, read_topology(file or ""))


def _visible(caller: Identity) -> list[ColumnElement[bool]]:
    if caller.is_operator:
        return []
    found = [jobs.c.tenant_id == caller.tenant_id]
    return found if caller.project is None else [*found, jobs.c.project == caller.project]


def _job(row: Row[Any]) -> Job:
    spec = JobSpec.as_stored(row.spec)
    seen: dict[str, Any] = row.seen or {}
    return Job.of(
        row,
        user=row.user_name,
        spec=spec,
        gpus=row.gpus or seen.get("gpus") or 0,
        placement=[Share(node_id=share["node_id"], devices=share["devices"]) for share in row.shares or ()],
        stop_at=spec.stop_at(row.running_at, row.stop_requested_at) if row.engine == OURS else None,
        cell=row.cell or None,
        checkpoint_nodes=row.bound_to or [] if row.state in (JobState.QUEUED, JobState.HELD) else [],
        warnings=row.warnings or [],
        progress=_progress(row, spec, seen),
        footprint=JobFootprint.of(row),
    )


def _progress(row: Row[Any], spec: JobSpec, seen: dict[str, Any]) -> JobProgress | None:
    if seen.get("progress"):
        return JobProgress.as_stored(seen["progress"])
    if row.done is None:
        return None
    total = row.total if row.total is not None else spec.work and spec.work.total
    return JobProgress.of(row, total=total, unit=spec.work and spec.work.unit, updated_at=row.progress_at)
