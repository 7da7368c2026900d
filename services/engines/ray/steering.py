"""What jobs are told, and what is reported of them. Pure.

Ray places: the plan says when a job starts, its size and its grid zone, and Ray puts the bundles of its placement group
on nodes of that zone. Ray does not say which of a node's GPUs a job holds until it uses them, so the bridge assigns
indices itself.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil

from services.contracts import engines
from services.engines.ray.entries import Entry, Told
from services.engines.ray.reading import RayJob, RayNode
from services.engines.ray.settings import RaySettings
from services.kit.bridges.devices import numbered

OPTED_OUT, NOT_OURS = "its user opted out", "it does not run by wattshift.ray"
QUEUE = "ray"
"""Ray has no queues: all jobs are in one."""
OVERDUE = 124  #: The exit status of ``wattshift.ray`` where a command reached its time limit
_ASKS_PER_S = 200
_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A job, and what is known of it."""

    job: RayJob
    entry: Entry | None  #: The last known state of its entry point; None for a job without one
    devices: Mapping[str, Sequence[int]] | None = None


def told_of(
    entry: Entry,
    decision: engines.EngineDecision | None,
    settings: RaySettings,
    zones: Collection[str],
    entries: int,
    *,
    heard: bool,
) -> Told:
    """Return what an entry point should do.

    Args:
        zones: The zones that Ray's nodes declare as a resource: a placement group can be bound only to these.
        entries: How many entry points ask.
        heard: Whether the control plane has answered recently; if not, all start.
    """
    again_s = max(_AGAIN_S, entries / _ASKS_PER_S)
    free = settings.mode is not engines.EngineMode.CONTROL or not heard or not entry.steer
    if free:
        return Told(action="run", note="Wattshift leaves it alone.", again_s=again_s, for_s=settings.hold_s)
    if decision is None:
        return Told(action="hold", note="waits for the next plan", again_s=again_s, for_s=settings.hold_s)
    released = decision.action is engines.EngineAction.RELEASE
    stops = decision.action is engines.EngineAction.REQUEUE  # what is cancelled, Ray stops itself
    return Told(
        action="run" if released else "stop" if stops else "hold",
        gpus=_size(entry, decision.gpus) if released else None,
        zone=decision.zone if released and decision.zone in zones else None,
        grace_s=decision.grace_s,
        note=decision.note,
        again_s=again_s,
        for_s=settings.hold_s,
    )


def report_of(seen: Seen, decision: engines.EngineDecision | None, settings: RaySettings) -> engines.EngineJob | None:
    """Return the report of a job for the control plane; None if it has no GPUs and asks for none."""
    job, entry = seen.job, seen.entry
    devices = seen.devices or {}
    held = sum(map(len, devices.values()))
    if entry is None and not held:
        return None
    state = state_of(job, entry)
    runs = state is engines.EngineJobState.RUNNING
    low, high, step = (held, held, 1) if entry is None else (entry.gpus, entry.max_gpus, entry.step_gpus)
    if entry is not None and runs and held:
        low, high, step = held, max(high, held), 1
    reason = NOT_OURS if entry is None else "" if entry.steer else OPTED_OUT
    return engines.EngineJob(
        external_id=job.external_id,
        number=job.number[:100],
        name=job.number[:200],
        user=job.user,
        queue=QUEUE,
        state=state,
        steered=not reason,
        why_not=reason,
        stoppable=entry is not None and entry.stoppable,
        gpus=low,
        max_gpus=high,
        step_gpus=step,
        gpu_model=entry.gpu_model if entry else None,
        time_limit_s=entry.time_limit_s if entry else None,
        deadline=_deadline_of(job, entry) if entry else None,
        submitted_at=job.submitted_at,
        started_at=(entry.began_at if entry and entry.began_at else job.submitted_at) if runs else None,
        ended_at=job.ended_at,
        requeues=_requeues(entry) if entry else None,
        exit_code=job.exit_code,
        shares=[engines.EngineShare(node=node, devices=list(found)) for node, found in sorted(devices.items()) if runs],
        detail=job.message if state.is_over and state is not engines.EngineJobState.SUCCEEDED else "",
        revision=decision.revision if decision and is_followed(job, entry, decision) else 0,
    )


def state_of(job: RayJob, entry: Entry | None) -> engines.EngineJobState:
    """Return the state of a job; while its entry point waits, the job waits too, although Ray calls it running."""
    if job.state.is_over:
        overdue = entry is not None and entry.time_limit_s is not None and job.exit_code == OVERDUE
        return engines.EngineJobState.TIMEOUT if overdue else job.state
    runs = job.state is engines.EngineJobState.RUNNING and (entry is None or entry.is_running)
    return engines.EngineJobState.RUNNING if runs else engines.EngineJobState.PENDING


def is_followed(job: RayJob, entry: Entry | None, decision: engines.EngineDecision) -> bool:
    if job.state.is_over or entry is None:
        return job.state.is_over
    match decision.action:
        case engines.EngineAction.RELEASE:
            return entry.state != "waits"
        case engines.EngineAction.HOLD:
            return entry.state != "starts"
        case engines.EngineAction.REQUEUE:
            return entry.state == "waits"
        case (
            engines.EngineAction.CANCEL | engines.EngineAction.SHRINK
        ):  # the latter is decided of no job here: none is shrinkable
            return False


def nodes_of(nodes: Sequence[RayNode], settings: RaySettings) -> list[engines.EngineNode]:
    return [
        engines.EngineNode(
            name=node.name,
            gpus=node.gpus,
            gpu_model=settings.gpu_models.get(node.accelerator, node.accelerator)[:63] or "GPU",
            memory_gib=settings.gpu_memory_gib,
            queues=[QUEUE],
            zone=node.zone,
        )
        for node in nodes
    ]


def devices_of(
    wanted: Mapping[str, Mapping[str, float]], nodes: Sequence[RayNode], held: Mapping[str, Mapping[str, Sequence[int]]]
) -> dict[str, dict[str, list[int]]]:
    """Return which GPUs jobs count as holding, by job and our names of nodes; those that held some before keep them.

    Args:
        wanted: GPUs by job and Ray's ids of nodes; a fraction of a GPU counts as one.
        held: The previous result.
    """
    known = {node.id: node.name for node in nodes}
    named = {
        name: {known[node]: ceil(gpus) for node, gpus in places.items() if node in known}
        for name, places in sorted(wanted.items())
    }
    return numbered(named, {node.name: node.gpus for node in nodes}, held)


def _size(entry: Entry, gpus: int | None) -> int:
    return entry.gpus if gpus is None else min(max(gpus, entry.gpus), entry.max_gpus)


def _requeues(entry: Entry) -> int:
    """Return how often it has started to wait again: after each run but the present one."""
    return entry.run - 1 if entry.is_running else entry.run


def _deadline_of(job: RayJob, entry: Entry) -> datetime | None:
    if entry.deadline is not None or entry.flexible_s is None or entry.time_limit_s is None:
        return entry.deadline
    return job.submitted_at + timedelta(seconds=min(entry.time_limit_s + entry.flexible_s, 1e9))
