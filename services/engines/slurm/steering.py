"""What to change in Slurm so that its jobs are as decided. Pure: levels are compared, and only differences are changed.

A hold is a begin time ``hold_s`` ahead, renewed when half of it is gone: without us, Slurm starts the job by itself.
Released jobs exchange the priorities that they have among themselves, so that they start in the order of the plan and
pass nobody whom they would not have passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineMode, EngineShare
from services.engines.slurm.reading import NOTE, TAG, SlurmJob
from services.engines.slurm.settings import SlurmSettings

FIRST_HOLD_S = 120
"""New jobs may be given a begin time so far ahead by ``deploy/slurm/job_submit.lua``, so that there is time to plan."""
REQUEUE_DELAY_S = 300
"""Slurm itself lets a requeued job wait for a while; a begin time further ahead was asked for by somebody."""
_SIZES = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_MOST_COMMENT = 1_000


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to be done in Slurm.

    Attributes:
        updates: Fields to set, by the numbers of jobs; jobs with the same ones are together.
        signals: Jobs to be sent a signal, and which.
        shrinks: Jobs to leave so many nodes.
        requeues, cancels: Numbers of jobs.
    """

    updates: Sequence[tuple[tuple[int, ...], tuple[tuple[str, str], ...]]] = ()
    signals: Sequence[tuple[int, str]] = ()
    shrinks: Sequence[tuple[int, int]] = ()
    requeues: Sequence[int] = ()
    cancels: Sequence[int] = ()

    @property
    def size(self) -> int:
        """How many jobs are changed."""
        updated = sum(len(numbers) for numbers, _ in self.updates)
        return updated + len(self.signals) + len(self.shrinks) + len(self.requeues) + len(self.cancels)


@dataclass
class Memory:
    """What the bridge remembers of a job while it lives; all of it can be forgotten.

    Attributes:
        natural: The priority that Slurm gave it.
        signalled_s: When it was sent its signal, by the revision of the decision.
        signalled: That revision.
        refusals: How often Slurm refused a revision, and its words.
    """

    natural: int = 0
    signalled_s: float = 0.0
    signalled: int = 0
    refusals: dict[int, int] = field(default_factory=dict[int, int])
    refused: str = ""


def why_not(job: SlurmJob, settings: SlurmSettings, now_s: float) -> str:
    """Return why a job is left alone; empty if it is steered."""
    if settings.partitions and not set(job.partition.split(",")) & set(settings.partitions):
        return "its partition is not steered"
    if set(job.partition.split(",")) & set(settings.leave_partitions):
        return "its partition is left alone"
    if job.qos in settings.leave_qos:
        return "its QOS is left alone"
    if "off" in job.options:
        return "its user opted out"
    if job.special or not job.batch:
        return job.special or "it is interactive"
    if job.waits and job.priority == 0:
        return "it is held in Slurm"
    ahead_s = job.eligible_s - now_s
    ours_s = settings.hold_s + 60 if job.tag else REQUEUE_DELAY_S if job.restarts else FIRST_HOLD_S
    if job.waits and (ahead_s > ours_s or not job.eligible_s):
        return "it has a begin time of its own" if job.eligible_s else "it is not eligible yet"
    return ""


def report_of(
    job: SlurmJob,
    external_id: str,
    decision: EngineDecision | None,
    memory: Memory,
    settings: SlurmSettings,
    now_s: float,
) -> EngineJob:
    """Return what the control plane is told of a job."""
    reason = why_not(job, settings, now_s)
    low, high, step = sizes_of(job)
    revision = decision.revision if decision and is_followed(job, decision, now_s) else 0
    refused = ""
    if decision and memory.refusals.get(decision.revision, 0) >= 3:
        revision, refused = decision.revision, memory.refused
    gpu_type = settings.gpu_models.get(job.gpu_type, job.gpu_type)
    return EngineJob(
        external_id=external_id,
        number=str(job.number),
        name=job.name[:200],
        user=job.user[:100],
        account=job.account[:200],
        queue=job.partition.split(",")[0][:200],
        state=job.state,  # pyright: ignore[reportArgumentType]
        steered=not reason,
        why_not=reason,
        stoppable=job.requeue and job.batch,
        shrinkable=job.by_node and len(job.shares) > 1,
        gpus=job.gpus if job.state == "running" else low,
        max_gpus=max(high, job.gpus) if job.state == "running" else high,
        step_gpus=1 if job.state == "running" else step,
        gpu_model=gpu_type or None,
        time_limit_s=job.time_limit_s,
        deadline=deadline_of(job, external_id),
        submitted_at=_instant(job.submit_s),
        started_at=_instant(job.start_s) if job.state == "running" else None,
        requeues=job.restarts,
        ended_at=_instant(job.end_s) if job.end_s and job.state not in ("running", "pending") else None,
        exit_code=job.exit_code,
        shares=[EngineShare(node=node, devices=list(numbers)) for node, numbers in sorted(job.shares.items())],
        detail="" if job.state in ("running", "pending") or job.reason == "None" else job.reason[:500],
        revision=revision,
        refused=refused[:500],
    )


def sizes_of(job: SlurmJob) -> tuple[int, int, int]:
    """Return the smallest and the largest size of a job, and the step between sizes.

    Only a job that asks for GPUs by node can be started at another size than it was submitted with: on one node, or,
    if its user says so, on another number of nodes.
    """
    found = _SIZES.fullmatch(job.options.get("gpus", ""))
    if not found or not job.per_node or (job.nodes_wanted != 1 and not job.by_node):
        return job.gpus, job.gpus, 1
    low, high, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if job.by_node:
        step = job.per_node
    if not 1 <= low <= high or step < 1 or (job.by_node and low % step):
        return job.gpus, job.gpus, 1
    return low, high - (high - low) % step, step


def deadline_of(job: SlurmJob, external_id: str) -> datetime | None:
    """Return by when a job is to be done: by Slurm's own deadline, or by how long its user lets it be delayed."""
    flexible = job.options.get("flexible", "")
    if flexible.isdigit() and job.time_limit_s:
        submitted = external_id.partition("@")[2]  # its submission time is another one after a requeue
        begun_s = int(submitted) if submitted.isdigit() else job.submit_s
        return _instant(min(begun_s + int(job.time_limit_s) + int(flexible), 2**32))
    return _instant(job.deadline_s) if job.deadline_s else None


def is_followed(job: SlurmJob, decision: EngineDecision, now_s: float) -> bool:
    """Return whether a job is as decided."""
    match decision.action:
        case EngineAction.RELEASE:
            return not job.waits or job.eligible_s <= now_s
        case EngineAction.CANCEL:
            return job.state not in ("pending", "running")
        case EngineAction.REQUEUE:
            return job.state != "running"
        case EngineAction.SHRINK:
            return job.state != "running" or job.gpus <= (decision.gpus or job.gpus)
        case EngineAction.HOLD:
            return not job.waits or job.eligible_s > now_s


def is_same_run(job: SlurmJob, report: EngineJob | None) -> bool:
    """Return whether a job waits or runs as it was reported, and not once more since."""
    if report is None or (job.state, job.restarts) != (report.state, report.requeues):
        return False
    return job.waits or report.started_at == _instant(job.start_s)


def changes_of(
    jobs: Sequence[tuple[SlurmJob, str]],
    decisions: Mapping[str, EngineDecision],
    memories: Mapping[str, Memory],
    settings: SlurmSettings,
    now_s: float,
    *,
    heard: bool,
    older: Mapping[str, EngineAction] = {},
) -> Changes:
    """Return what to change so that jobs are as decided.

    Args:
        jobs: Those that wait or run, with our names for them.
        decisions: What is decided, by those names; a job without a decision is held until there is one.
        memories: What is remembered of each of them.
        settings: Of the bridge.
        now_s: UTC seconds.
        heard: Whether the control plane has answered lately; if not, no hold is begun or renewed.
        older: Of these jobs the very run is over that Slurm shows, as it came back with an older state; what to do.
    """
    if settings.mode is not EngineMode.CONTROL:
        return Changes()
    steered = [(job, name) for job, name in jobs if not why_not(job, settings, now_s)]
    fields: dict[int, dict[str, str]] = {}
    signals: list[tuple[int, str]] = []
    shrinks: list[tuple[int, int]] = []
    requeues: list[int] = []
    cancels: list[int] = []
    for job, name in steered:
        decision = decisions.get(name)
        memory = memories[name]
        if name in older:
            if older[name] is EngineAction.REQUEUE:
                requeues.append(job.number)
            elif settings.cancel_ended:
                cancels.append(job.number)
            continue
        if decision and memory.refusals.get(decision.revision, 0) >= 3:
            continue
        if decision and decision.action is EngineAction.CANCEL:
            cancels.append(job.number)
            continue
        if not job.waits:
            if job.tag != name:  # a requeue changes its submission, by which a new bridge would take it for another
                fields[job.number] = _tagged(job, name)
            if (
                decision
                and not is_followed(job, decision, now_s)
                and _has_had_grace(job, decision, memory, now_s, signals)
            ):
                if decision.action is EngineAction.SHRINK and job.per_node:
                    shrinks.append((job.number, max((decision.gpus or job.gpus) // job.per_node, 1)))
                elif decision.action is EngineAction.REQUEUE:
                    requeues.append(job.number)
            continue
        fields[job.number] = _waiting(job, name, decision, settings, now_s, heard=heard)
    rankable = [(job, name) for job, name in steered if name not in older]
    for number, priority in priorities_of(rankable, decisions, memories, now_s).items():
        fields.setdefault(number, {})["priority"] = str(priority)
    together: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, wanted in fields.items():
        if wanted:
            together.setdefault(tuple(sorted(wanted.items())), []).append(number)
    updates = [(tuple(sorted(numbers)), wanted) for wanted, numbers in together.items()]
    return Changes(updates, signals, shrinks, requeues, cancels)


def priorities_of(
    jobs: Sequence[tuple[SlurmJob, str]],
    decisions: Mapping[str, EngineDecision],
    memories: Mapping[str, Memory],
    now_s: float,
) -> dict[int, int]:
    """Return new priorities of jobs that wait and are ranked: their own ones, in the order of their ranks.

    Equal priorities are spread upwards by one each, as an order needs different ones.
    """
    ranked = [
        (decision.rank, job, memories[name])
        for job, name in jobs
        if job.waits and (decision := decisions.get(name)) is not None and decision.rank is not None
    ]
    ranked.sort(key=lambda each: (each[0], each[1].number))
    own = sorted((memory.natural or job.priority for _, job, memory in ranked), reverse=True)
    wanted = list(own)
    for at in range(len(wanted) - 2, -1, -1):
        wanted[at] = max(wanted[at], wanted[at + 1] + 1)
    pairs = zip(ranked, wanted, strict=True)
    return {job.number: priority for (_, job, _), priority in pairs if job.priority != priority}


def _waiting(
    job: SlurmJob, name: str, decision: EngineDecision | None, settings: SlurmSettings, now_s: float, *, heard: bool
) -> dict[str, str]:
    """Return the fields to set of a job that waits."""
    wanted = {} if job.tag == name else _tagged(job, name)
    if decision and decision.note:
        note = ";".join(decision.note.split())
        if (text := f"{job.own_comment}{NOTE}{note}"[:_MOST_COMMENT]) != job.comment:
            wanted["comment"] = text
    if decision and decision.action is EngineAction.RELEASE:
        if job.eligible_s > now_s:
            wanted["starttime"] = "now"
        low, high, _ = sizes_of(job)
        if decision.gpus and low < high and decision.gpus != job.gpus and job.by_node:
            wanted["numnodes"] = str(decision.gpus // job.per_node)
        elif decision.gpus and low < high and decision.gpus != job.gpus:
            typed = f"{job.gpu_type}:" if job.gpu_type else ""
            wanted["gres"] = f"gpu:{typed}{decision.gpus}"
        return wanted
    if heard and job.eligible_s < now_s + settings.hold_s / 2:
        wanted["starttime"] = begin_time(now_s + settings.hold_s)
    return wanted


def _tagged(job: SlurmJob, name: str) -> dict[str, str]:
    return {"admincomment": f"wattshift:{name} {TAG.sub('', job.admin_comment).strip()}".strip()}


def _has_had_grace(
    job: SlurmJob, decision: EngineDecision, memory: Memory, now_s: float, signals: list[tuple[int, str]]
) -> bool:
    """Return whether a running job may lose GPUs now: where its user asks for it, first a signal, and then a grace."""
    signal = job.options.get("signal", "")
    if signal and memory.signalled != decision.revision:
        signals.append((job.number, signal))
        return False
    grace = job.options.get("grace", "")
    grace_s = min(float(grace), decision.grace_s) if grace.isdigit() else decision.grace_s
    return not signal or now_s - memory.signalled_s >= grace_s


def begin_time(at_s: float) -> str:
    """Return a moment as Slurm reads it in UTC, to the next minute: so jobs that are held at once are held together."""
    return f"{datetime.fromtimestamp(-(-at_s // 60) * 60, UTC):%Y-%m-%dT%H:%M:%S}"


def _instant(time_s: int) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)
