"""Why a job waits: its place in the policy's order, the GPUs it lacks, and what it would emit."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from services.contracts.explanations import AskedGpus, GridForecast, LeverEffect, WaitingExplanation
from services.contracts.jobs import JobSpec
from services.core.cycle.plan import Hold, Start, queue_order
from services.core.cycle.snapshot import QUEUED
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.registry import entry_of
from services.scheduler.explaining.lengths import remaining
from services.scheduler.explaining.levers import of_round
from services.scheduler.planning.dry_run import Length, emissions, first_node_for, latest_start_s, power_of, slices_for
from services.scheduler.planning.live_view import DryRound
from services.scheduler.reasons import detail_of
from services.scheduler.repository.predictions import Predictions


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
    gpus = start.gpus if start else spec.gpus.min
    left = remaining(float(jobs.progress[job]), float(jobs.attained_gpu_s[job]), gpus, spec, predicted)
    on = nodes.index[start.placement.shares[0].node_id] if start else first_node_for(snapshot, job_id, suits)
    outlook = None if on is None else snapshot.outlooks[int(nodes.zone[on])]
    power = None if on is None else power_of(snapshot, job, int(nodes.gpu_model[on]), gpus, spec)
    length = Length(left.estimate.seconds, left.estimate.source, left.words)
    now, greenest = emissions(snapshot.now_s, outlook, length, power, latest_start_s(spec, submitted_s, length))
    assumptions = ["Start: by the cluster as it is now; jobs that arrive or end change it. Nothing is reserved."]
    if power is None or outlook is None:
        assumptions.append("Emissions: unknown, as no node suits the job now.")
    else:
        stale = ", which is stale" if outlook.stale else ""
        words = f"Intensity: {outlook.signal.value} of {outlook.zone} by forecast{stale}; PUE is not included."
        assumptions += [left.words, power.words, words]
    reason = hold.reason if hold else Reason.WAITING_FOR_ROUND if start else None
    expected_s = hold.expected_start_s if hold else None
    explanation = WaitingExplanation(
        since=since,
        starts_now=start is not None,
        gpus=asked,
        expected_start_at=None if expected_s is None else datetime.fromtimestamp(expected_s, UTC),
        expected_start_from=None if expected_s is None else "policy",
        length=left.estimate,
        power_w=None if power is None else power.watts,
        now=now,
        greenest=greenest,
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
    if start:
        detail = "Its GPUs are free: the next round starts it."
    place = place_of(dry, job_id) if seen_by_policy else None
    effects = of_round(dry, job_id) if seen_by_policy else []
    return WhyItWaits(explanation, None if reason is None else reason.value, detail, place, assumptions, effects)
