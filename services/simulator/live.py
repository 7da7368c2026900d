"""The current queue as a what-if run: every policy continues from the live state and predicts when each job runs.

A policy that takes too long, or fails, affects only its own answer.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from services.contracts.live import Earlier, EarlierRequest, LiveJob, LiveProfile, LiveState, LiveWindow
from services.core.domain.arrays import Floats, Ints
from services.core.domain.carbon import CarbonCurve
from services.core.domain.errors import DomainError, WattshiftError
from services.core.domain.gpus import GpuModel, gpu_model, likeliest_gpu_model
from services.core.domain.ids import NodeId
from services.core.domain.mig import WHOLE, SlicePlace, slice_index
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.topology import Topology
from services.core.domain.windows import Window
from services.core.policies.registry import policy_entry
from services.kit.logging import Log
from services.simulator.engine import Beginning, EngineOptions, SimulationResult, simulate
from services.simulator.workload import Behaviour, CarbonTrace, ClusterSpec, JobProfile, NodeGroup, Workload

HOUR_S = 3_600.0
HORIZON_S = 14 * 86_400.0
LONGEST_S = 20.0  #: Most wall-clock time for one policy
EARLIER_S = 5.0  #: Most wall-clock time for all simulations of one look for an earlier start
EARLIER_BY_S = 60.0  #: A start is earlier if it is by so much
ANY_BOARD = "A100-SXM4-40GB"

log = Log(__name__)

Report = Callable[[str, int, int], None]


class TooLongError(DomainError):
    """A policy took longer than it is allowed."""


@dataclass(frozen=True)
class LiveRun:
    """A live state, in the form the engine takes."""

    state: LiveState
    workload: Workload
    cluster: ClusterSpec
    trace: CarbonTrace
    beginning: Beginning
    engine: EngineOptions


def read_live(path: Path) -> LiveRun:
    """Return the run that a live state describes; ``DomainError`` if it is none, or nothing waits or runs in it."""
    try:
        state = LiveState.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DomainError(f"this is not a live state: {error.error_count()} fields are wrong") from error
    return live_run(state)


def live_run(state: LiveState) -> LiveRun:
    """Return the run described by a live state; ``DomainError``: nothing waits or runs in it."""
    if not state.jobs:
        raise DomainError("no job waits or runs here now")
    if not state.nodes:
        raise DomainError("no node is up now that has a GPU for jobs")
    names = [f"{kind.gpu_model}#{at}" for at, kind in enumerate(state.kinds)]
    boards = [
        replace(likeliest_gpu_model(kind.gpu_model) or gpu_model(ANY_BOARD), name=name, idle_w=kind.idle_w)
        for kind, name in zip(state.kinds, names, strict=True)
    ]
    jobs = sorted(state.jobs, key=lambda job: (job.submitted_s, job.id))
    engine = EngineOptions(
        round_interval_s=state.round_interval_s,
        host_idle_w=0.0,
        until_s=state.at_s + HORIZON_S,
        topology=_topology(state),
        tenant_gpu_quota=state.tenant_gpu_quota,
        tenant_guarantees=state.tenant_guarantees,
        windows=tuple(map(_window, state.windows)),
    )
    trace = CarbonTrace(state.zone, state.signal, _curve(state))
    cluster = ClusterSpec(tuple(_group(state, at, boards[node.kind]) for at, node in enumerate(state.nodes)))
    return LiveRun(state, _workload(state, jobs, names), cluster, trace, _beginning(state, jobs), engine)


def is_rigid(name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether a policy runs every job at the size its user asked for."""
    return not policy_entry(name).elastic and "gang" not in parameters


def parameters_of(run: LiveRun, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each policy's parameters; the one in force has the installation's, unless the request sets some."""
    found = {name: dict(parameters) for name, parameters in chosen.items()}
    if run.state.policy in found:
        found[run.state.policy] = {**run.state.parameters, **found[run.state.policy]}
    return found


def live_document(run: LiveRun, parameters: Mapping[str, Mapping[str, Any]], report: Report) -> dict[str, Any]:
    """Return what happens to every job under each policy, as JSON values.

    Times are UTC seconds, rounded; emissions are gCO2 since the job began, without PUE. The columns of ``jobs`` are in
    the order of ``job_ids``, null for what does not happen within the horizon.
    """
    state = run.state
    return {
        "as_of_s": state.at_s,
        "horizon_s": HORIZON_S,
        "policy_in_force": state.policy,
        "zone": state.zone,
        "notes": state.notes,
        "job_ids": list(run.workload.ids),
        "policies": [_outcome(run, name, given, report) for name, given in parameters.items()],
    }


def _outcome(run: LiveRun, name: str, parameters: Mapping[str, Any], report: Report) -> dict[str, Any]:
    try:
        result = _simulated(run, name, parameters, partial(report, name), LONGEST_S)
    except WattshiftError as error:
        return {"policy": name, "failure": str(error)}
    report(name, result.completed, result.jobs)
    columns = result.columns
    carbon = np.where(np.isfinite(columns.ended_s), columns.carbon_gco2, np.nan)
    jobs = {
        "starts_at_s": _rounded(columns.started_s, 0),
        "ends_at_s": _rounded(columns.ended_s, 0),
        "carbon_gco2": _rounded(carbon, 3),
    }
    return {"policy": name, "summary": result.summary(), "jobs": jobs}


def _simulated(
    run: LiveRun,
    name: str,
    parameters: Mapping[str, Any],
    report: Callable[[int, int], None],
    most_s: float,
    until_started: str | None = None,
) -> SimulationResult:
    until_s = time.perf_counter() + most_s

    def progress(done: int, total: int) -> None:
        report(done, total)
        if time.perf_counter() > until_s:
            raise TooLongError(f"it took longer than {most_s:g} s")

    workload, rigid = run.workload, is_rigid(name, parameters)
    if rigid:  # as they are on the cluster: at their smallest gangs
        workload = replace(workload, requested_gpus=workload.min_gpus)
    return simulate(
        name,
        workload,
        run.cluster,
        run.trace,
        parameters=parameters,
        options=replace(run.engine, rigid=rigid),
        progress=progress,
        beginning=run.beginning,
        until_started=until_started,
    )


def earlier(asked: EarlierRequest) -> Earlier:
    """Return the first of some jobs that starts earlier than the one in whose place it would be submitted.

    None does where the first, which is the job as it is, would: then it needs no change. Each is simulated up to its
    start or the planned one, under the policy in force.
    """
    until_s, name = time.perf_counter() + EARLIER_S, asked.state.policy

    def start_s(jobs: Sequence[LiveJob], job_id: str, before_s: float) -> float:
        run = live_run(asked.state.model_copy(update={"jobs": [*jobs]}))
        run = replace(run, engine=replace(run.engine, until_s=before_s))
        left_s = until_s - time.perf_counter()
        result = _simulated(run, name, asked.state.parameters, lambda *_: None, left_s, until_started=job_id)
        found = result.columns.started_s
        at_s = found[run.workload.ids.index(job_id)]
        return float(at_s) if math.isfinite(at_s) else math.inf

    others = [job for job in asked.state.jobs if job.id != asked.job_id]
    planned_s = math.inf if asked.planned_s is None else asked.planned_s
    end_s = asked.state.at_s + HORIZON_S
    try:
        if len(others) < len(asked.state.jobs):
            planned_s = min(planned_s, start_s(asked.state.jobs, asked.job_id, min(planned_s, end_s)))
        before_s = min(planned_s - EARLIER_BY_S, end_s)
        for at, job in enumerate(asked.instead if before_s >= asked.state.at_s else ()):
            if job is not None and (starts_s := start_s([*others, job], job.id, before_s)) <= before_s:
                found = Earlier(change=at, starts_s=starts_s, planned_s=_open(planned_s))
                return found if at else Earlier()
    except WattshiftError as error:
        log.info("earlier.unknown", error=str(error))
    return Earlier()


def _rounded(column: Floats, digits: int) -> list[float | None]:
    return [_open(round(value, digits) if math.isfinite(value) else value) for value in column.tolist()]


def _open(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _curve(state: LiveState) -> CarbonCurve:
    """Return the intensities in steps of an hour or less, because the engine continues with the last day's steps."""
    known = CarbonCurve(np.array(state.times_s), np.array(state.intensity_gco2_per_kwh), state.end_s)
    times_s = np.union1d(known.times_s, np.arange(known.start_s, known.end_s, HOUR_S))
    return CarbonCurve(times_s, np.array([known.at(time_s) for time_s in times_s.tolist()]), known.end_s)


def _workload(state: LiveState, jobs: list[LiveJob], names: list[str]) -> Workload:
    def ints(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    smallest = ints([job.min_gpus for job in jobs])
    return Workload(
        ids=tuple(job.id for job in jobs),
        tenants=tuple(job.tenant for job in jobs),
        submitted_s=np.array([job.submitted_s for job in jobs]),
        work_s=np.array([job.work_s * (job.sevenths or WHOLE) / WHOLE for job in jobs]),
        requested_gpus=ints([job.asked_gpus or job.min_gpus for job in jobs]),
        min_gpus=smallest,
        max_gpus=ints([job.max_gpus for job in jobs]),
        step_gpus=ints([job.step_gpus for job in jobs]),
        profile=ints([job.profile for job in jobs]),
        profiles=tuple(_profile(at, each, names) for at, each in enumerate(state.profiles)),
        priority=ints([job.priority for job in jobs]),
        preemptible=np.array([job.preemptible for job in jobs], dtype=np.bool_),
        shareable=np.array([job.may_share_gpu for job in jobs], dtype=np.bool_),
        deadline_s=np.array([math.inf if job.deadline_s is None else job.deadline_s for job in jobs]),
        within={job.id: job.within for job in jobs if job.within is not None},
        near={job.id: job.near for job in jobs if job.near is not None},
        slice_sevenths=ints([job.sevenths or 0 for job in jobs]) if any(job.sevenths for job in jobs) else None,
        slice_memory_gib=np.array([job.memory_gib or 0.0 for job in jobs]),
        name="live",
        notes=tuple(state.notes),
    )


def _profile(at: int, profile: LiveProfile, names: list[str]) -> JobProfile:
    sizes = np.array(profile.gpus, dtype=np.int64)
    true = {
        names[kind]: Behaviour(sizes, np.array(rates.speed), np.array(rates.power_w))
        for kind, rates in profile.rates.items()
    }
    return JobProfile(f"profile {at}", true)


def _topology(state: LiveState) -> Topology:
    """Return the levels wider than a node, with the domains' numbers as their names."""
    return Topology(
        tuple(state.levels[1:]),
        {f"n{at}": tuple(map(str, node.domains[1:])) for at, node in enumerate(state.nodes)},
    )


def _window(found: LiveWindow) -> Window:
    gpus = {NodeId(f"n{at}"): gpus for at, gpus in found.gpus.items()}
    return Window(found.id, found.start_s, found.end_s, gpus, found.holder)


def _group(state: LiveState, at: int, board: GpuModel) -> NodeGroup:
    """Return a node as a group: its whole GPUs first, then those that are cut."""
    node, mine = state.nodes[at], [each for each in state.slices if each.node == at]
    cuts = [
        tuple(SlicePlace(each.sevenths, each.start) for each in mine if each.gpu == gpu)
        for gpu in range(1 + max((each.gpu for each in mine), default=-1))
    ]
    return NodeGroup(
        1,
        node.gpus + len(cuts),
        board,
        node.takes_work,
        cuts=(*([()] * node.gpus), *cuts) if cuts else (),
        slice_memory_gib={each.sevenths: each.memory_gib for each in mine},
    )


def _beginning(state: LiveState, jobs: list[LiveJob]) -> Beginning:
    held = {
        row: Placement(tuple(NodeShare(NodeId(f"n{share.node_id}"), tuple(share.devices)) for share in job.gang))
        for row, job in enumerate(jobs)
        if job.gang
    }
    for row, job in enumerate(jobs):
        if job.on_slice is not None:
            held[row] = _slice_of(state, job.on_slice)
    return Beginning(
        now_s=state.at_s,
        next_active_s=state.next_active_s,
        held=held,
        since_s=np.array([min(job.since_s, state.at_s) for job in jobs]),
        progress=np.array([job.progress for job in jobs]),
        attained_gpu_s=np.array([job.attained_gpu_s for job in jobs]),
        energy_j=np.array([job.energy_j for job in jobs]),
        carbon_gco2=np.array([job.carbon_gco2 for job in jobs]),
    )


def _slice_of(state: LiveState, at: int) -> Placement:
    found = state.slices[at]
    device = slice_index(state.nodes[found.node].gpus + found.gpu, found.start)
    return Placement((NodeShare(NodeId(f"n{found.node}"), (device,)),))
