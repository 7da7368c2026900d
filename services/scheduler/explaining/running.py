"""How a job runs: where, why at this size and these controls, until when, and what the next active round will do."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from services.contracts.explanations import NextStep, RunningExplanation
from services.contracts.jobs import JobSpec, Share
from services.core.cycle.plan import Preempt
from services.core.cycle.snapshot import QUEUED
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.registry import entry_of
from services.scheduler.explaining.lengths import Remaining
from services.scheduler.explaining.story import gpus_words, sentence
from services.scheduler.planning.live_view import DryRound
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository.explanations import EventRow, GangRow

RESIZES = (Reason.SCALE_OUT.value, Reason.SCALE_IN.value)


def how_it_runs(
    gang: GangRow, spec: JobSpec, events: Sequence[EventRow], left: Remaining | None, now_s: float, policy: str
) -> RunningExplanation:
    """Return how a job runs, without its next step.

    Args:
        left: What is left of it; None for a job that is no longer in the snapshot.
    """
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
    """Return what an active round on the present state would do to a running job.

    Args:
        due_s: When an active round is due, UTC seconds.
    """
    at = datetime.fromtimestamp(max(due_s, dry.snapshot.now_s), UTC)
    stop = next((each for each in dry.plan.actions if isinstance(each, Preempt) and each.job_id == job_id), None)
    if stop is not None and ends_at is not None and ends_at < at:
        return NextStep(action="keep", at=at, detail="It is expected to have ended by then.")
    if stop is not None:
        reason = stop.reason
        gpus = stop.next_gpus if reason.value in RESIZES else None
        return NextStep(action="stop", at=at, reason=reason.value, detail=SENTENCES[reason], gpus=gpus)
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
        return [f"{gpus_words(gpus)}: the one size that it asks for."]
    asked = f"it may have {smallest} to {largest}"
    stops = [event.data.get("reason") for event in events if event.type == "job.preempting"]
    if stops and stops[-1] in RESIZES:
        return [f"{gpus_words(gpus)} ({asked}): {sentence(stops[-1])}"]
    entry = entry_of(policy)
    why = "the policy chose it" if entry is not None and entry.elastic else "the policy does not scale jobs"
    return [f"{gpus_words(gpus)} ({asked}): {why}."]


def _control_words(gang: GangRow, events: Sequence[EventRow]) -> list[str]:
    values = [f"Power limit {gang.power_limit_w:g} W"] if gang.power_limit_w is not None else []
    values += [f"Clock {gang.clock_mhz} MHz"] if gang.clock_mhz is not None else []
    if not values:
        return ["Power limit and clock: the default."]
    codes = [event.data.get("reason") for event in events if event.type == "job.set"]
    why = sentence(codes[-1]) if codes and isinstance(codes[-1], str) else ""
    return [f"{' and '.join(values)}. {why}".strip()]
