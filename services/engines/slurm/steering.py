"""What to change in Slurm so that its jobs match the decisions. Pure: only differences between states are changed.

A hold is a begin time ``hold_s`` ahead, renewed when half of it is gone: without us, Slurm starts the job by itself. It
is written into the job's admin comment, so that a begin time which its user or Slurm has set is never taken for ours,
and never moved to an earlier one. Priorities are Slurm's own: none is ever set. Where a site asks for the plan's order,
nice values are, and given back as soon as there is no such order. Whoever changes what we have set has the last word.

Tasks of an array are planned one by one. Those that wait have one record in Slurm, and are changed together as long as
the same is decided of them; a change of some of them splits these off.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from services.contracts.engines import EngineAction, EngineDecision, EngineJob, EngineMode, EngineShare
from services.contracts.parallel import MAX_GANG_GPUS
from services.engines.slurm.reading import HOLD, NICE, NOTE, TAG, TASKS, SlurmJob, waits_for
from services.engines.slurm.settings import SlurmSettings

REQUEUE_DELAY_S = 300
"""Slurm itself lets a requeued job wait for a while; a begin time further ahead was asked for by somebody."""
TAKEN_BACK = "its begin time or nice value was changed in Slurm"
SET_BY_HAND = "its priority was set in Slurm"  #: So that Slurm takes no nice value of it, either
_SIZES = re.compile(r"(\d+)(?:-(\d+)(?:/(\d+))?)?")
_MOST_COMMENT = 1_000
_OURS = re.compile(r"wattshift(-hold|-nice)?:[^\s;]*;?")  #: A part of an admin comment


Update = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to make in Slurm; ``requeues`` and ``cancels``: numbers of jobs."""

    updates: Sequence[Update] = ()
    """Fields to set, by the numbers of jobs; those with the same fields are grouped, tasks as ``7_[0-9]``."""
    signals: Sequence[tuple[str, str]] = ()  #: Jobs to be sent a signal, and which
    shrinks: Sequence[tuple[str, int]] = ()  #: Jobs to shrink, and the number of nodes that each keeps
    requeues: Sequence[str] = ()
    cancels: Sequence[str] = ()

    @property
    def size(self) -> int:
        """The number of jobs that are changed; tasks of an array that are changed together count as one."""
        updated = sum(len(numbers) for numbers, _ in self.updates)
        return updated + len(self.signals) + len(self.shrinks) + len(self.requeues) + len(self.cancels)


@dataclass
class Memory:
    """What the bridge remembers of a job while it is alive; all of it can be forgotten.

    Attributes:
        refusals, refused: How often Slurm refused each revision, and its words.
    """

    signalled_s: float = 0.0  #: When it was sent its signal, for a decision's revision
    signalled: int = 0  #: The revision it was sent for
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
    if job.is_taken_back:
        return TAKEN_BACK
    if job.waits and not job.eligible_s and not job.waits_for:
        return "it is not eligible yet"
    if job.waits and job.others_begin_s > max(now_s + (REQUEUE_DELAY_S if job.restarts else 0), job.submit_s):
        return "it has a begin time of its own"
    return ""


def blocked_by(job: SlurmJob, reason: str) -> str:
    """Return what a job waits for other than GPUs, in our words or Slurm's; ``reason``: why it is left alone."""
    if not job.waits:
        return ""
    return reason or job.waits_for or waits_for(job.reason)


def report_of(
    job: SlurmJob,
    external_id: str,
    decision: EngineDecision | None,
    memory: Memory,
    settings: SlurmSettings,
    now_s: float,
) -> EngineJob:
    reason = why_not(job, settings, now_s)
    low, high, step = sizes_of(job)
    revision = decision.revision if decision and is_followed(job, decision, now_s) else 0
    refused = ""
    if decision and memory.refusals.get(decision.revision, 0) >= 3:
        revision, refused = decision.revision, memory.refused
    gpu_type = settings.gpu_models.get(job.gpu_type, job.gpu_type)
    return EngineJob(
        external_id=external_id,
        number=job.number,
        name=job.name[:200],
        user=job.user[:100],
        account=job.account[:200],
        queue=job.partition[:200],
        state=job.state,  # pyright: ignore[reportArgumentType]
        steered=not reason,
        why_not=reason,
        blocked=blocked_by(job, reason)[:200],
        stoppable=job.requeue and job.batch,
        shrinkable=job.by_node and len(job.shares) > 1,
        gpus=job.gpus if job.state == "running" else low,
        max_gpus=max(high, job.gpus) if job.state == "running" else high,
        step_gpus=1 if job.state == "running" else step,
        asked_gpus=job.gpus,
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

    Only a job that asks for GPUs by node can be started at another size than it was submitted with: on one node or, if
    its user says so, on a different number of nodes.
    """
    found = _SIZES.fullmatch(job.options.get("gpus", ""))
    if not found or "_" in job.number or not job.per_node or (job.nodes_wanted != 1 and not job.by_node):
        return job.gpus, job.gpus, 1
    low, high, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
    if job.by_node:
        step = job.per_node
    if not 1 <= low <= high <= MAX_GANG_GPUS or step < 1 or (job.by_node and low % step):
        return job.gpus, job.gpus, 1
    return low, high - (high - low) % step, step


def deadline_of(job: SlurmJob, external_id: str) -> datetime | None:
    """Return the deadline of a job: Slurm's own, or the one that follows from the delay that its user allows."""
    flexible = job.options.get("flexible", "")
    if flexible.isdecimal() and job.time_limit_s:
        submitted = external_id.partition("@")[2]  # its submission time is another one after a requeue
        begun_s = int(submitted) if submitted.isdecimal() else job.submit_s
        return _instant(min(begun_s + int(job.time_limit_s) + int(flexible), 2**32))
    return _instant(job.deadline_s) if job.deadline_s else None


def is_followed(job: SlurmJob, decision: EngineDecision, now_s: float) -> bool:
    if job.waits_for and decision.action is not EngineAction.CANCEL:
        return True  # it cannot start yet, and is planned again once it can
    match decision.action:
        case EngineAction.RELEASE:
            return not job.is_held or job.eligible_s <= now_s
        case EngineAction.CANCEL:
            return job.state not in ("pending", "running")
        case EngineAction.REQUEUE:
            return job.state != "running"
        case EngineAction.SHRINK:
            return job.state != "running" or job.gpus <= (decision.gpus or job.gpus)
        case EngineAction.HOLD:
            return not job.waits or job.eligible_s > now_s


def is_same_run(job: SlurmJob, report: EngineJob | None) -> bool:
    """Return whether a job still waits or runs as it was reported, without a new run since."""
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
    nices: Mapping[str, int] = {},
) -> Changes:
    """Return what to change so that jobs match the decisions.

    Args:
        jobs: The jobs that wait or run, with our names for them.
        decisions: The decisions, by those names; a job without a decision is left as it is.
        memories: What is remembered of each of them.
        heard: Whether the control plane has answered recently; if not, no hold is begun or renewed.
        older: What to do with jobs whose run, as Slurm shows it, is over already: Slurm has restored an older state.
        nices: The nice values of released jobs in the plan's order, by their numbers; all others have their own.
    """
    if settings.mode is not EngineMode.CONTROL:
        return Changes()
    fields: dict[str, dict[str, str]] = {}
    signals: list[tuple[str, str]] = []
    shrinks: list[tuple[str, int]] = []
    requeues: list[str] = []
    cancels: list[str] = []
    brown = any(job.waits and name in decisions and is_for_hours(decisions[name]) for job, name in jobs)
    of_array: dict[str, EngineDecision | None] = {}
    for job, name in jobs:
        if why_not(job, settings, now_s):
            if job.is_held and name not in older:  # it was steered before, or the submission plugin did not know better
                fields[job.number] = _released(job, now_s)
            continue
        decision = decisions.get(name)
        if job.waits_for and (decision is None or decision.action is EngineAction.RELEASE):
            decision = of_array[job.record] if job.record in of_array else _until_it_can_start(name, brown=brown)
        if job.tasks:  # what is new in an array goes with the task before it until it is planned
            of_array[job.record] = decision = decision or of_array.get(job.record)
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
    for job, name in jobs:
        is_ordered = heard and job.waits and not why_not(job, settings, now_s) and name in decisions
        is_ordered = is_ordered and decisions[name].action is EngineAction.RELEASE
        nice = nices.get(job.number, job.own_nice) if is_ordered else job.own_nice
        if name not in older and job.special != SET_BY_HAND and (more := _niced(job, fields.get(job.number, {}), nice)):
            fields[job.number] = fields.get(job.number, {}) | more
    tasks: dict[str, list[SlurmJob]] = {}
    for job, _ in jobs:
        if job.tasks and job.number in fields:
            tasks.setdefault(job.record, []).append(job)
    of_tasks = [each for found in tasks.values() for each in _of_tasks(found, fields, now_s)]
    return Changes([*together(fields), *of_tasks], signals, shrinks, requeues, cancels)


def together(fields: Mapping[str, Mapping[str, str]]) -> list[Update]:
    """Return fields by the numbers of jobs, those of all jobs that are to have the same as one."""
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for number, wanted in fields.items():
        if wanted:
            found.setdefault(tuple(sorted(wanted.items())), []).append(number)
    return [(tuple(sorted(numbers)), wanted) for wanted, numbers in found.items()]


def is_for_hours(decision: EngineDecision) -> bool:
    """Return whether a job is held for greener hours, and for no size; not every policy says until when."""
    foreseen = decision.until is not None or decision.note.startswith("waits:greener_hours")
    return decision.action is EngineAction.HOLD and foreseen


def _until_it_can_start(name: str, *, brown: bool) -> EngineDecision:
    """Return what becomes of a job that waits for another one's end, of which plans know nothing.

    While others are held for greener hours it is held, too: it would start in the very second of that end otherwise.
    """
    if brown:
        return EngineDecision(external_id=name, revision=1, action=EngineAction.HOLD, note="waits:greener_hours")
    return EngineDecision(external_id=name, revision=1, action=EngineAction.RELEASE)


def _of_tasks(
    jobs: Sequence[SlurmJob], fields: dict[str, dict[str, str]], now_s: float
) -> Iterator[tuple[tuple[str], tuple[tuple[str, str], ...]]]:
    """Yield the changes of tasks that wait in one record, which are taken out of ``fields``, in their order.

    What is wanted of the last task is wanted of those that are not told apart, too. It comes last: by then the record
    has no others, and stays whole. Comments that differ split nothing: the first one of each group is theirs.
    """
    groups: dict[tuple[tuple[str, str], ...], list[SlurmJob]] = {}
    comments: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    last: tuple[tuple[str, str], ...] = ()
    for job in jobs:
        wanted = fields.pop(job.number)
        comment = {"comment": wanted.pop("comment")} if "comment" in wanted else {}
        last = tuple(sorted(wanted.items()))
        comments.setdefault(last, comment)
        groups.setdefault(last, []).append(job)
    rest = groups.pop(last)
    for key, group in groups.items():
        # Those of which nothing is wanted are given their begin time once more, by which they leave the record.
        begin_s = group[0].eligible_s
        kept = {"starttime": begin_time(begin_s) if begin_s > now_s else "now"}
        yield (_listed(group),), tuple(sorted(((dict(key) or kept) | comments[key]).items()))
    wanted = dict(last) | comments[last]
    if wanted and (last or not groups):
        yield (_listed(rest, rest[-1].tasks[TASKS:]),), tuple(sorted(wanted.items()))


def _listed(jobs: Sequence[SlurmJob], more: Sequence[int] = ()) -> str:
    """Return tasks of one array as scontrol takes them, ``7_[0-3,9]``."""
    array = jobs[0].record
    numbers = sorted({int(job.number.partition("_")[2]) for job in jobs} | set(more))
    spans: list[str] = []
    first = numbers[0]
    for number, after in zip(numbers, [*numbers[1:], -1], strict=True):
        if after != number + 1:
            spans.append(str(first) if first == number else f"{first}-{number}")
            first = after
    return f"{array}_[{','.join(spans)}]"


def _waiting(
    job: SlurmJob, name: str, decision: EngineDecision | None, settings: SlurmSettings, now_s: float, *, heard: bool
) -> dict[str, str]:
    mark = _mark(job.hold_s, job.own_begin_s) if job.is_held else ""
    wanted = {} if job.tag == name or job.tasks else _tagged(job, name, mark)
    if decision is None:
        return wanted
    if decision.note:
        note = ";".join(decision.note.split())
        if (text := f"{job.own_comment}{NOTE}{note}"[:_MOST_COMMENT]) != job.comment:
            wanted["comment"] = text
    if decision.action is EngineAction.RELEASE:
        if job.is_held and job.eligible_s > now_s:
            wanted |= _released(job, now_s, name if not job.tasks else "")
        low, high, _ = sizes_of(job)
        if decision.gpus and low < high and decision.gpus != job.gpus and job.by_node:
            wanted["numnodes"] = str(decision.gpus // job.per_node)
        elif decision.gpus and low < high and decision.gpus != job.gpus:
            typed = f"{job.gpu_type}:" if job.gpu_type else ""
            wanted["gres"] = f"gpu:{typed}{decision.gpus}"
        return wanted
    until_s = hold_until_s(now_s + settings.hold_s)
    if heard and job.eligible_s < now_s + settings.hold_s / 2:
        own_s = job.others_begin_s if job.others_begin_s > now_s else 0
        wanted |= _tagged(job, name if not job.tasks else "", _mark(until_s, own_s)) | {
            "starttime": begin_time(until_s)
        }
    return wanted


def _released(job: SlurmJob, now_s: float, name: str = "") -> dict[str, str]:
    """Return the fields that end our hold: the begin time is again what it was before, or now."""
    own_s = job.own_begin_s
    return _tagged(job, name or job.tag) | {"starttime": begin_time(own_s) if own_s > now_s else "now"}


def _tagged(job: SlurmJob, name: str, mark: str = "") -> dict[str, str]:
    """Return the admin comment with our name, and the mark of a hold if any, before what others wrote there."""
    nice = NICE.search(job.admin_comment)
    return {"admincomment": _commented(job, f"wattshift:{name}" if name else "", mark, nice[0] if nice else "")}


def _commented(job: SlurmJob, *marks: str) -> str:
    theirs = _OURS.sub("", job.admin_comment).strip()
    return " ".join(filter(None, (";".join(filter(None, marks)), theirs)))


def _niced(job: SlurmJob, fields: Mapping[str, str], nice: int) -> dict[str, str]:
    """Return the fields that give a job a nice value, or its own one back, beside those that are set anyway."""
    is_so = nice == job.nice and (job.our_nice is None) == (nice == job.own_nice)
    if is_so or job.our_nice not in (None, job.nice):
        return {}
    text = fields.get("admincomment", job.admin_comment)
    kept = [found[0] for each in (TAG, HOLD) if (found := each.search(text))]
    mark = f"wattshift-nice:{nice}/{job.own_nice}" if nice != job.own_nice else ""
    return {"nice": str(nice), "admincomment": _commented(job, *kept, mark)}


def given_back(jobs: Iterable[SlurmJob]) -> Changes:
    """Return what gives all jobs their own nice values back."""
    live = [job for job in jobs if job.state in ("pending", "running")]
    return Changes(together({job.number: _niced(job, {}, job.own_nice) for job in live}))


def _mark(until_s: int, own_s: int) -> str:
    return f"wattshift-hold:{until_s}/{own_s}" if own_s else f"wattshift-hold:{until_s}"


def _has_had_grace(
    job: SlurmJob, decision: EngineDecision, memory: Memory, now_s: float, signals: list[tuple[str, str]]
) -> bool:
    """Return whether a running job may lose GPUs now: if its user asks for it, after a signal and a grace period."""
    signal = job.options.get("signal", "")
    if signal and memory.signalled != decision.revision:
        signals.append((job.number, signal))
        return False
    grace = job.options.get("grace", "")
    grace_s = min(float(grace), decision.grace_s) if grace.isdecimal() else decision.grace_s
    return not signal or now_s - memory.signalled_s >= grace_s


def hold_until_s(at_s: float) -> int:
    """Return when holds that should last until about then end: never on a full minute, unlike users' times.

    Jobs that are held together are held until the same moment.
    """
    return int(-(-at_s // 60) * 60) + 17


def begin_time(at_s: int) -> str:
    """Return a moment in UTC in Slurm's format."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%S}"


def _instant(time_s: int) -> datetime:
    return datetime.fromtimestamp(time_s, UTC)
