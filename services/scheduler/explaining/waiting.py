"""Why a job waits and which one change would start it; and how it runs, and what the next active round will do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from services.contracts.engines import OURS
from services.contracts.explanations import (
    AskedGpus,
    GridForecast,
    LeverEffect,
    NextStep,
    OneChange,
    RunningExplanation,
    WaitingExplanation,
)
from services.contracts.jobs import JobSpec, Share
from services.contracts.live import Earlier
from services.core.cycle.plan import Hold, Preempt, Start, queue_order
from services.core.cycle.snapshot import QUEUED, Snapshot, Trigger
from services.core.cycle.standing import Standing
from services.core.domain.counted import counted
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.one_change import Change, Elsewhere, Predicted, changes, one_change
from services.core.policies.registry import entry_of
from services.kit.text import duration
from services.scheduler.explaining.levers import of_round
from services.scheduler.explaining.reach import words_of
from services.scheduler.explaining.story import sentence
from services.scheduler.planning.dry_run import DRAFT, DryRound, Live, LiveView, foreseen, slices_for
from services.scheduler.planning.job_table import asked_of, fits
from services.scheduler.planning.lengths import Remaining
from services.scheduler.reasons import detail_of, words_of_stop
from services.scheduler.repository.explanations import EventRow, GangRow
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import JobRow


@dataclass(frozen=True)
class Place:
    """Where a job stands in the policy's order."""

    waiting_jobs: int
    ahead: tuple[JobId, ...] | None  #: How many come before it; None if it has no place in an order
    ahead_gpus: int  #: How many GPUs their smallest gangs take together


@dataclass(frozen=True)
class WhyItWaits:
    """The answer from one round that was not applied; ``place`` is None for a job that the policy does not see."""

    explanation: WaitingExplanation
    reason: str | None
    detail: str | None
    place: Place | None
    assumptions: list[str]
    levers: list[LeverEffect]
    tried: "Tried | None" = None  #: What may be asked for instead, if that was looked for

    @property
    def change_words(self) -> str:
        """The one change in words, empty where none is known."""
        found = self.explanation.one_change
        return "" if found is None else found.detail


def place_of(dry: DryRound, job_id: JobId) -> Place:
    """Return a waiting job's place in the order of the policy in force."""
    jobs = dry.snapshot.jobs
    waits = int((jobs.phase == QUEUED).sum())
    on_slices = [each.job_id for each in dry.snapshot.slice_jobs]
    if job_id in on_slices:
        before = tuple(on_slices[: on_slices.index(job_id)])
        return Place(len(on_slices), before, len(before))
    entry = entry_of(dry.policy.name)
    ahead = queue_order(dry.plan).ahead_of(job_id) if entry is None or entry.orders else None
    gpus = 0 if ahead is None else int(jobs.min_gpus[[jobs.index[each] for each in ahead]].sum()) if ahead else 0
    return Place(waits, ahead, gpus)


def why_it_waits(
    dry: DryRound,
    job_id: JobId,
    spec: JobSpec,
    predicted: Predictions,
    since: datetime,
    submitted_s: float,
    *,
    seen_by_policy: bool,
) -> WhyItWaits:
    """Return why a job in a round's snapshot waits.

    Args:
        job_id: The job there: its own id, or that of a draft standing in for a job that policies do not see.
        seen_by_policy: Whether it is in the queue, rather than on hold or waiting for something other than GPUs.
    """
    snapshot = dry.snapshot
    jobs, nodes = snapshot.jobs, snapshot.nodes
    job = jobs.index[job_id]
    action = next((each for each in dry.plan.actions if each.job_id == job_id and isinstance(each, Start | Hold)), None)
    start = action if isinstance(action, Start) and seen_by_policy else None
    hold = action if isinstance(action, Hold) and seen_by_policy else None
    may_run = jobs.eligible[job][nodes.gpu_model] if len(nodes) else np.empty(0, dtype=np.bool_)
    if (on_nodes := snapshot.bound.get(job_id)) is not None:
        may_run &= np.array([node_id in on_nodes for node_id in nodes.ids], dtype=np.bool_)
    suits = may_run & nodes.schedulable if len(nodes) else may_run
    asked = AskedGpus(
        min=spec.gpus.min,
        max=spec.gpus.largest,
        model=spec.gpus.model,
        memory_gib=spec.gpus.memory_gib,
        zone=spec.gpus.zone,
        suitable=int(nodes.gpus[suits].sum()),
        free=int(nodes.free_gpus[suits].sum()),
        drained=int(nodes.gpus[may_run & ~suits].sum()),
    )
    if (slices := slices_for(snapshot, job_id)) is not None:
        found = {"slice": spec.gpus.slice, "suitable": slices[0], "free": slices[1], "drained": 0}
        asked = asked.model_copy(update=found)
    run = foreseen(snapshot, job_id, spec, start, suits, predicted, submitted_s)
    outlook = run.outlook
    reason = hold.reason if hold else Reason.WAITING_FOR_ROUND if start else None
    expected_s = hold.expected_start_s if hold else None
    explanation = WaitingExplanation(
        since=since,
        starts_now=start is not None,
        gpus=asked,
        expected_start_at=None if expected_s is None else datetime.fromtimestamp(expected_s, UTC),
        expected_start_from=None if expected_s is None else "policy",
        length=run.left.estimate,
        power_w=None if run.power is None else run.power.watts,
        now=run.now,
        greenest=run.greenest,
        forecast=None
        if outlook is None
        else GridForecast(
            zone=outlook.zone,
            signal=outlook.signal.value,
            stale=outlook.stale,
            known_until=datetime.fromtimestamp(outlook.curve.end_s, UTC),
        ),
    )
    detail = None if reason is None else detail_of(reason, on_nodes or ())
    if reason is Reason.NO_ROOM_WITHIN:
        detail = (
            f"{counted(asked.free, 'GPU is', 'GPUs are')} free, but no {spec.gpus.within} has {spec.gpus.min} of them."
        )
    if reason is Reason.NO_SUCH_DOMAIN:
        known = ", ".join(snapshot.levels)
        is_level = spec.gpus.within in snapshot.levels
        detail = f"No {spec.gpus.within} has {spec.gpus.min} such GPUs." if is_level else (
            f"The cluster has no level {spec.gpus.within}; it has {known}.")  # fmt: skip
    if start:
        detail = "Its GPUs are free: the next round starts it."
    if hold:
        by_order = words_of(snapshot) if reason is Reason.GRID_ORDER else ()
        detail = " ".join(filter(None, (detail, *by_order, *guarantee_words(dry, job_id))))
    place = place_of(dry, job_id) if seen_by_policy else None
    effects = of_round(dry, job_id) if seen_by_policy else []
    return WhyItWaits(explanation, None if reason is None else reason.value, detail, place, run.words, effects)


def guarantee_words(dry: DryRound, job_id: JobId) -> list[str]:
    """Return what a job's tenant holds, is guaranteed and borrows, and for whose guarantee the job waits, if any is."""
    snapshot, jobs = dry.snapshot, dry.snapshot.jobs
    if not snapshot.tenant_guarantees:
        return []
    standing, tenant = Standing.of(snapshot), jobs.tenants[jobs.index[job_id]]
    held = jobs.gpus_by_tenant(standing.counts)
    has, most = held.get(tenant, 0), standing.guaranteed.get(tenant, 0)
    borrows = f" It borrows {has - most}." if has > most else ""
    words = [f"Its tenant holds {counted(has, 'GPU')}, and is guaranteed {most}.{borrows}"]
    hold = next((each for each in dry.plan.actions if isinstance(each, Hold) and each.job_id == job_id), None)
    if hold is not None and hold.reason in (Reason.GUARANTEED, Reason.NOT_ENOUGH_FREE_GPUS) and has >= most:
        waits = {jobs.tenants[at] for at in np.flatnonzero(jobs.phase == QUEUED).tolist()}
        owners = (each for each, of in standing.guaranteed.items() if of and (each in waits or held.get(each)))
        if names := ", ".join(sorted(each for each in owners if each != tenant)):
            words.append(f"GPUs that it could borrow are guaranteed to {names}.")
    if any(isinstance(each, Preempt) and each.to == tenant for each in dry.plan.actions):
        words.append("Others are to give GPUs back to it.")
    return words


RESIZES = (Reason.SCALE_OUT.value, Reason.SCALE_IN.value)


def how_it_runs(
    gang: GangRow, spec: JobSpec, events: Sequence[EventRow], left: Remaining | None, now_s: float, policy: str
) -> RunningExplanation:
    """Return how a job runs, without its next step; ``left`` is None if it is no longer in the snapshot."""
    estimate = None if left is None else left.estimate
    seconds = None if estimate is None or estimate.source == "time_limit" else estimate.seconds
    run = RunningExplanation(
        since=gang.running_at or gang.started_at,
        gpus=gang.gpus,
        placement=[Share(node_id=share["node_id"], devices=list(share["devices"])) for share in gang.shares],
        why=[*_size_words(gang.gpus, spec, events, policy), *_control_words(gang, events)],
        power_limit_w=gang.power_limit_w,
        clock_mhz=gang.clock_mhz,
        expected_end_at=None if seconds is None else datetime.fromtimestamp(now_s, UTC) + timedelta(seconds=seconds),
    )
    return run if estimate is None else run.model_copy(update={"length": estimate})


def next_step(dry: DryRound, job_id: JobId, due_s: float, ends_at: datetime | None, *, preemptible: bool) -> NextStep:
    """Return what an active round would do to a running job now; it is due at ``due_s``, UTC seconds."""
    at = datetime.fromtimestamp(max(due_s, dry.snapshot.now_s), UTC)
    stop = next((each for each in dry.plan.actions if isinstance(each, Preempt) and each.job_id == job_id), None)
    if stop is not None and ends_at is not None and ends_at < at:
        return NextStep(action="keep", at=at, detail="It is expected to have ended by then.")
    if stop is not None:
        reason = stop.reason
        gpus = stop.next_gpus if reason.value in RESIZES else None
        detail = words_of_stop(reason, stop.to)
        return NextStep(action="stop", at=at, reason=reason.value, detail=detail, gpus=gpus)
    entry = entry_of(dry.policy.name)
    if not preemptible:
        detail = "The job may not be stopped: it runs to its end."
    elif entry is not None and not entry.preempts:
        detail = f"The policy {dry.policy.name} lets running jobs run to their end."
    elif not bool((dry.snapshot.jobs.phase == QUEUED).any()):
        detail = "It keeps its GPUs: no other job waits."
    else:
        detail = "It keeps its GPUs: no job that waits comes before it."
    return NextStep(action="keep", at=at, detail=detail)


def on_slice_step(due_s: float) -> NextStep:
    """Return what an active round would do to a job that runs on a slice; ``due_s``: when it is due, UTC seconds."""
    detail = "It keeps its slice: a job on a slice is never stopped for another."
    return NextStep(action="keep", at=datetime.fromtimestamp(due_s, UTC), detail=detail)


def _size_words(gpus: int, spec: JobSpec, events: Sequence[EventRow], policy: str) -> list[str]:
    smallest, largest = spec.gpus.min, spec.gpus.largest
    if spec.gpus.slice is not None:
        return [f"A {spec.gpus.slice} slice: the one size that it asks for."]
    if smallest == largest:
        return [f"{counted(gpus, 'GPU')}: the one size that it asks for."]
    asked = f"it may have {smallest} to {largest}"
    stops = [event.data.get("reason") for event in events if event.type == "job.preempting"]
    if stops and stops[-1] in RESIZES:
        return [f"{counted(gpus, 'GPU')} ({asked}): {sentence(stops[-1])}"]
    entry = entry_of(policy)
    why = "the policy chose it" if entry is not None and entry.elastic else "the policy does not scale jobs"
    return [f"{counted(gpus, 'GPU')} ({asked}): {why}."]


def _control_words(gang: GangRow, events: Sequence[EventRow]) -> list[str]:
    values = [f"Power limit {gang.power_limit_w:g} W"] if gang.power_limit_w is not None else []
    values += [f"Clock {gang.clock_mhz} MHz"] if gang.clock_mhz is not None else []
    if not values:
        return ["Power limit and clock: the default."]
    codes = [event.data.get("reason") for event in events if event.type == "job.set"]
    why = sentence(codes[-1]) if codes and isinstance(codes[-1], str) else ""
    return [f"{' and '.join(values)}. {why}".strip()]


@dataclass(frozen=True)
class Tried:
    """The changes that may be asked for instead of a job that waits, and the first that starts it now."""

    row: JobRow
    snapshot: Snapshot
    changes: list[Change]
    predicted: Predicted
    now: Change | None


def change_of(
    view: LiveView, live: Live, dry: DryRound, job_id: JobId, spec: JobSpec, reason: str | None
) -> Tried | None:
    """Return what may be asked for instead of a job that waits, None if nothing; call it in a thread.

    Args:
        dry: The round in which it waits, passive.

    Raises:
        PlanError: The policy's plan for a changed state is not valid.
    """
    row = next(each for each in live.rows.jobs if each.id == job_id)
    if row.engine != OURS or row.leaves:  # its own engine's users and limits decide, or it is going anyhow
        return None
    tried = changes(
        dry.snapshot,
        job_id,
        why=None if reason is None else Reason(reason),
        one_size=spec.gpus.largest == spec.gpus.min and spec.layout is None,
        elsewhere=_elsewhere(view, live, row, spec),
    )
    rounds, predicted = (dry.snapshot, view.snapshot(live, Trigger.ACTIVE)), _predicted(view, row, spec)
    found = one_change(dry.policy, rounds, dry.before, job_id, tried, as_id=DRAFT, predicted=predicted)
    return Tried(row, dry.snapshot, tried, predicted, found) if tried else None


def _predicted(view: LiveView, row: JobRow, spec: JobSpec) -> Predicted:
    said = view.prediction(row.tenant_id, spec.model_dump(mode="json", exclude_none=True))
    [gpu_s], [spread_gpu_s], [seen] = said.gpu_s, said.spread_gpu_s, said.seen
    return Predicted(gpu_s, spread_gpu_s / gpu_s if seen and gpu_s and spread_gpu_s else None)


def _elsewhere(view: LiveView, live: Live, row: JobRow, spec: JobSpec) -> list[Elsewhere]:
    kinds, found = view.cluster(live).kinds, list[Elsewhere]()
    models = {kind.gpu_model for kind in kinds} - {row.gpu_model} if row.gpu_model else set[str]()
    for model in (*models, *([None] if row.zone else [])):
        asked = asked_of(row if model else row._replace(zone=None))
        asked = (model, *asked[1:]) if model else asked
        eligible = np.array([fits(asked, kind) for kind in kinds], dtype=np.bool_)
        if eligible.any():
            there = spec.model_copy(update={"gpus": spec.gpus.model_copy(update={"model": model or spec.gpus.model})})
            found.append(Elsewhere(model, eligible, _predicted(view, row, there)))
    return found


def shown(change: Change, spec: JobSpec, levels: Sequence[str], when: Earlier | None = None) -> OneChange:
    """Return a change for the API and in words.

    Args:
        spec: Of the job as it is.
        levels: Those of the network.
        when: When the job would start with it; None: now.
    """
    words, found = _asked_instead(change, spec, levels)
    starts = "now"
    if when is not None and when.starts_s is not None:
        found["starts_at"] = at = datetime.fromtimestamp(when.starts_s, UTC)
        later = "not within two weeks, as it is"
        if when.planned_s is not None:
            planned = datetime.fromtimestamp(when.planned_s, UTC)
            later = f"{duration(when.planned_s - when.starts_s)} before {planned:%a %H:%M} UTC, as simulated"
        starts = f"at {at:%a %H:%M} UTC: {later}"
    detail = f"Withdrawn and submitted again {words}, it would start {starts}."
    return OneChange.model_validate({**found, "detail": detail})


def _asked_instead(change: Change, spec: JobSpec, levels: Sequence[str]) -> tuple[str, dict[str, object]]:
    if change.gpus is not None:
        return f"with {counted(change.gpus, 'GPU')} instead of {spec.gpus.min}", {"what": "gpus", "gpus": change.gpus}
    if change.elsewhere is not None:
        model = change.elsewhere.gpu_model
        if model is None:
            return f"for any zone instead of {spec.gpus.zone}", {"what": "zone"}
        return f"for {model} instead of {spec.gpus.model}", {"what": "model", "model": model}
    if change.flex is not None:
        flex = round(100 * change.flex)
        return f"with flex {flex}, so that orders of the grid may slow it down", {"what": "flex", "flex": flex}
    if change.within is not None:
        level = dict(enumerate(levels)).get(change.within)
        words = f"within one {level}" if level else "on any nodes"
        return f"{words} instead of one {spec.gpus.within}", {"what": "within", "within": level}
    if change.deadline_s is None:
        return "as preemptible", {"what": "preemptible"}
    if math.isinf(change.deadline_s):
        return "without its deadline", {"what": "deadline"}
    at = datetime.fromtimestamp(change.deadline_s, UTC)
    return f"with a deadline at {at:%a %H:%M} UTC, in dirtier hours", {"what": "deadline", "deadline": at}
