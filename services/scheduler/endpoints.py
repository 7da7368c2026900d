"""The scheduler's API: policies, rounds and nodes' power. Reached through the gateway."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from redis.asyncio import Redis

from services.contracts import policies
from services.contracts.codes import ProblemCode
from services.contracts.explanations import StartEstimate
from services.contracts.jobs import JobSpec
from services.contracts.nodes import NodePower, Topology, TopologyFile, TopologyLevel
from services.contracts.predictions import JobPrediction, LengthModelList
from services.contracts.problems import FieldError
from services.contracts.profiles import JobProfile, LearnedCurve
from services.contracts.queries import PlanQuery
from services.contracts.schema import Name
from services.core.domain.errors import DomainError, PolicyConfigError
from services.core.domain.jobs import JobState
from services.core.policies import registry
from services.core.policies.parameters import describe_parameters
from services.kit.identity import Operator, ProjectCaller
from services.kit.problems import ProblemError, conflict, invalid, not_found, unavailable
from services.kit.projects import spec_in_project
from services.kit.readable import Unread
from services.kit.redis import hint
from services.kit.routes import from_state, not_a_cursor
from services.scheduler.learning.learned import curve_of, table_of
from services.scheduler.loop import Scheduler
from services.scheduler.planning.dry_run import DryRuns
from services.scheduler.power.hooks import PowerHook
from services.scheduler.repository import node_power, predictions, profiles, rounds
from services.scheduler.repository.profiles import LearnedRow
from services.scheduler.repository.rounds import ActivePolicyRow
from services.scheduler.service import PowerRefusedError, SchedulerService, shares_of
from services.scheduler.settings import SchedulerSettings

router = APIRouter(prefix="/v1")

NOT_POWERED: dict[int | str, dict[str, Any]] = {
    409: {
        "description": "The node's state does not allow it: `conflict`; "
        "or no power hook covers the node: `capability_missing`."
    }
}

LARGEST_ROUND = 2**63 - 1


Service = Annotated[SchedulerService, from_state("service")]
Settings = Annotated[SchedulerSettings, from_state("settings")]
Hints = Annotated[Redis, from_state("redis")]
Hook = Annotated[PowerHook, from_state("power_hook")]
Loop = Annotated[Scheduler, from_state("scheduler")]
DryRunning = Annotated[DryRuns, from_state("dry_runs")]
Round = Annotated[int, Path(ge=0, le=LARGEST_ROUND)]


@router.post("/jobs:estimate", tags=["jobs"])
async def estimate_job(spec: JobSpec, caller: ProjectCaller, dry_runs: DryRunning) -> StartEstimate:
    """Estimate when a job would start and what it would emit.

    Nothing is submitted, and nothing is reserved. Values that cannot be known are null.
    """
    if spec.service is not None:
        raise invalid("/service", "Only the controller of pools may ask for a service instance.")
    return await dry_runs.estimate(spec_in_project(spec, caller.project), caller.tenant_id)


@router.get("/policies", tags=["policies"])
async def list_policies(_: ProjectCaller, service: Service) -> policies.PolicyList:
    """List policies."""
    row = await service.database.run(rounds.active_policy)
    active = row.policy if row else None
    entries = dict(registry.POLICIES)
    if active is not None and (entry := registry.entry_of(active)) is not None:
        entries.setdefault(active, entry)  # with ``fair+`` before its name, it is not among the others
    return policies.PolicyList(items=[_description(name, entry, active) for name, entry in entries.items()])


@router.get("/policies/active", tags=["policies"])
async def get_active_policy(_: ProjectCaller, service: Service, settings: Settings) -> policies.ActivePolicy:
    """Get the active policy."""
    return _active(await service.database.run(rounds.active_policy), settings)


@router.put(
    "/policies/active",
    tags=["policies"],
    responses={409: {"description": "Another request changed the policy at the same time: `conflict`."}},
)
async def choose_policy(
    choice: policies.PolicyChoice, caller: Operator, service: Service, settings: Settings, redis: Hints
) -> policies.ActivePolicy:
    """Choose the policy and its parameters."""
    name = registry.policy_name(choice.name)
    if registry.entry_of(name) is None:
        pointer = FieldError(pointer="/name", detail=f"One of {registry.known_policies()}.")
        raise ProblemError(404, ProblemCode.UNKNOWN_POLICY, _unknown(choice.name), errors=[pointer])
    registry.build_policy(name, choice.parameters)
    row = await service.set_policy(name, choice.parameters, caller)
    await hint(redis, "policy")
    return _active(row, settings)


@router.get("/shares", tags=["policies"])
async def get_shares(_: Operator, service: Service) -> policies.TenantShares:
    """Show how the GPUs are shared between tenants."""
    found = await service.shares()
    if found is None:
        raise unavailable("The scheduler")
    return shares_of(*found)


@router.get("/topology", tags=["nodes"])
async def get_topology(caller: ProjectCaller, service: Service, loop: Loop) -> Topology:
    """Show the levels of the network, and the largest gang that each has room for; the file only to operators."""
    levels = [TopologyLevel(**each._asdict()) for each in loop.level_rooms]
    file = await service.database.run(rounds.topology) if caller.is_operator else ""
    return Topology(file=file, free_gpus=loop.free_gpus, levels=levels)


@router.put("/topology", tags=["nodes"])
async def set_topology(given: TopologyFile, caller: Operator, service: Service, redis: Hints) -> TopologyFile:
    """Say where nodes are in the network, by a file; gangs that run stay where they are."""
    try:
        is_set = await service.set_topology(given.file, caller)
    except DomainError as error:
        raise invalid("/file", f"The file says {error}.") from None
    if not is_set:
        raise unavailable("The scheduler")
    await hint(redis, "topology")
    return given


@router.get("/policies/{name}", tags=["policies"])
async def get_policy(name: str, _: ProjectCaller, service: Service) -> policies.PolicyDescription:
    """Get a policy."""
    row = await service.database.run(rounds.active_policy)
    if (entry := registry.entry_of(name)) is not None:
        return _description(registry.policy_name(name), entry, row.policy if row else None)
    raise ProblemError(404, ProblemCode.UNKNOWN_POLICY, _unknown(name))


@router.get("/plans", tags=["policies"])
async def list_plans(_: Operator, service: Service, query: Annotated[PlanQuery, Query()]) -> policies.PlanList:
    """List scheduling rounds, newest first."""
    rows = await service.database.run(rounds.plans, _before(query.cursor), query.limit + 1)
    items = [each for each in rows[: query.limit] if not isinstance(each, Unread)]
    if len(rows) <= query.limit:
        return policies.PlanList(items=items)
    last = rows[query.limit - 1]
    return policies.PlanList(items=items, next_cursor=last.name if isinstance(last, Unread) else str(last.round))


@router.get("/plans/{round_number}", tags=["policies"])
async def get_plan(round_number: Round, _: Operator, service: Service) -> policies.PlanSummary:
    """Get a scheduling round."""
    for found in await service.database.run(rounds.plan, round_number):
        return found
    raise not_found("plan")


@router.post("/nodes/{node_id}/sleep", tags=["nodes"], responses=NOT_POWERED)
async def sleep_node(node_id: Name, operator: Operator, service: Service, redis: Hints, hook: Hook) -> NodePower:
    """Power down an idle node.

    The node is woken again when a job is planned on it.
    """
    await _power(service, node_id)
    _check_hook(hook, node_id)
    with _refusals():
        await service.sleep(node_id, operator)
    return await _hinted(service, redis, node_id)


@router.post("/nodes/{node_id}/wake", tags=["nodes"], responses=NOT_POWERED)
async def wake_node(node_id: Name, operator: Operator, service: Service, redis: Hints, hook: Hook) -> NodePower:
    """Wake a node."""
    await _power(service, node_id)
    _check_hook(hook, node_id)
    with _refusals():
        await service.wake(node_id, operator)
    return await _hinted(service, redis, node_id)


@router.post("/nodes/{node_id}/pin-awake", tags=["nodes"])
async def pin_node_awake(node_id: Name, operator: Operator, service: Service, redis: Hints) -> NodePower:
    """Keep a node awake.

    The node is woken if it is off, and plans do not power it down until it is unpinned.
    """
    await _power(service, node_id)
    await service.pin(node_id, True, operator)
    return await _hinted(service, redis, node_id)


@router.post("/nodes/{node_id}/unpin", tags=["nodes"])
async def unpin_node(node_id: Name, operator: Operator, service: Service, redis: Hints) -> NodePower:
    """Let plans power a node down again."""
    await _power(service, node_id)
    await service.pin(node_id, False, operator)
    return await _hinted(service, redis, node_id)


async def _power(service: SchedulerService, node_id: str) -> NodePower:
    for found in await service.database.run(node_power.node_power, node_id):
        return found
    raise not_found("node")


async def _hinted(service: SchedulerService, redis: Redis, node_id: str) -> NodePower:
    await hint(redis, "node", node=node_id)
    return await _power(service, node_id)


def _check_hook(hook: PowerHook, node_id: str) -> None:
    if not hook.covers(node_id):
        detail = "This node cannot be powered: SCHEDULER_NODE_POWER is none, or its file does not name the node."
        raise ProblemError(409, ProblemCode.CAPABILITY_MISSING, detail)


@contextmanager
def _refusals() -> Generator[None]:
    try:
        yield
    except PowerRefusedError as error:
        raise conflict(str(error)) from None


@router.get("/jobs/{job_id}/profile", tags=["jobs"])
async def get_job_profile(job_id: Name, caller: ProjectCaller, service: Service) -> JobProfile:
    """Get the measured effect of power limits and clocks on jobs of this kind."""
    job = await service.database.run(profiles.job, job_id)
    if job is None or not caller.sees(job.tenant_id, job.project):
        raise not_found("job")
    # Curves are learned from all jobs of a kind, whatever their project, so that a key of one project gets none.
    curves, measurements = await service.profile(job.kind)
    return JobProfile(
        job_id=job_id,
        kind=job.name,
        curves=[_curve(row, job.gpus) for row in curves] if caller.project is None else [],
        measurements=[each for each in measurements if caller.is_operator or each.job_id == job_id],
        in_force=await service.database.run(profiles.in_force, job_id),
    )


@router.get("/predictions/models", tags=["policies"])
async def list_length_models(_: Operator, service: Service) -> LengthModelList:
    """List the versions of the job length model, with their errors."""
    return LengthModelList(items=await service.database.run(predictions.models))


@router.get(
    "/predictions/{job_id}",
    tags=["jobs"],
    responses={409: {"description": "No prediction was made for this job: `conflict`."}},
)
async def get_job_prediction(job_id: Name, caller: ProjectCaller, service: Service) -> JobPrediction:
    """Get the predicted run time of a job, with its uncertainty."""
    row = await service.database.run(predictions.prediction, job_id)
    if row is None or not caller.sees(row.tenant_id, row.project):
        raise not_found("job")
    if row.predicted_at is None or row.group_id is None or row.gpu_s is None:
        why = (
            "It had already ended." if JobState(row.state).is_final else "It is predicted when it first waits for GPUs."
        )
        raise conflict(f"The length of this job was not predicted. {why}")
    return JobPrediction.of(
        row,
        job_id=job_id,
        group_id=f"{row.group_id:016x}",
        duration_s=row.gpu_s / row.min_gpus,
        error_gpu_s=None if row.actual_gpu_s is None else row.gpu_s - row.actual_gpu_s,
    )


def _curve(row: LearnedRow, wanted: int) -> LearnedCurve:
    table = table_of(row)
    gpus = min(row.measured_gpus, key=lambda size: abs(size - wanted), default=wanted)
    curve = curve_of(table, gpus) if table else None
    columns: dict[str, list[float]] = {
        name: getattr(curve, name).tolist() if curve else [] for name in ("values", "speed", "power_w")
    }
    return LearnedCurve.of(row, gpus=gpus, **columns)


def _before(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (cursor.isascii() and cursor.isdigit()) or int(cursor) > LARGEST_ROUND:
        raise not_a_cursor()
    return int(cursor)


def _description(policy: str, entry: registry.PolicyEntry, active: str | None) -> policies.PolicyDescription:
    parameters = [
        policies.PolicyParameter.of(each, unit=each.unit or None, choices=list(each.choices) or None)
        for each in describe_parameters(entry.config)
    ]
    return policies.PolicyDescription(
        name=policy, summary=entry.summary, source=entry.paper, active=policy == active, parameters=parameters
    )


def _unknown(name: str) -> str:
    said = registry.unknown_policy(name)
    return f"{said[:1].upper()}{said[1:]}."


def _active(row: ActivePolicyRow | None, settings: SchedulerSettings) -> policies.ActivePolicy:
    if row is None:
        raise unavailable("The scheduler")
    parameters, problem = row.parameters, None
    try:
        policy: Any = registry.build_policy(row.policy, parameters)
        parameters = asdict(policy.config)
    except PolicyConfigError as error:
        problem = f"{error.pointer.lstrip('/')}: {error}" if error.pointer else str(error)
    return policies.ActivePolicy(
        name=row.policy,
        parameters=parameters,
        problem=problem,
        since=row.policy_since,
        changed_by=row.policy_changed_by,
        round_interval_s=settings.round_interval_s,
    )
