"""The live state for those who only read, and what the policy would do with a job that is not submitted.

That is one round, the passive one that a submission causes, which is not applied. What it would do is exact for this
moment; emissions rest on forecasts, and on lengths and powers that may be unknown: the answer says which.
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from services.contracts.codes import ProblemCode
from services.contracts.explanations import EmissionEstimate, StartEstimate
from services.contracts.jobs import JobSpec, Share
from services.core.cycle.plan import Hold, Plan, Start
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import QUEUED, Snapshot, Trigger
from services.core.domain.arrays import Bools
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.errors import PolicyConfigError
from services.core.domain.ids import JobId
from services.core.domain.mig import WHOLE, sevenths_of
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy
from services.core.profiles.priors import ANY_FAMILY, usual_w
from services.db.database import Database
from services.db.job_inputs import has_upload, sealed_secrets
from services.kit.problems import ProblemError, unavailable
from services.kit.references import missing_references, named_upload, secret_places
from services.scheduler.learning.learned import KnownCurves, read_curves
from services.scheduler.learning.predicting import Predicting
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.cluster import Cluster
from services.scheduler.planning.snapshot import read_rows, snapshot_of
from services.scheduler.power.hooks import PowerHook
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository import rounds, snapshots
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import ClusterRows, JobRow, SpecRow
from services.scheduler.settings import SchedulerSettings


@dataclass(frozen=True)
class Live:
    """The rows of one moment, and what is known about the grids and the lengths of jobs."""

    rows: ClusterRows
    outlooks: tuple[CarbonOutlook, ...]
    predictions: Predictions


@dataclass(frozen=True)
class DryRound:
    """A round that was not applied."""

    policy: Policy[Any]
    snapshot: Snapshot
    plan: Plan
    memory: Any
    before: Any  #: What the policy remembered before it


class LiveView:
    """Reads the live state in one transaction that writes nothing."""

    def __init__(self, database: Database, settings: SchedulerSettings, carbon: CarbonWatch, hook: PowerHook) -> None:
        self.settings = settings
        self._database = database
        self._carbon = carbon
        self._hook = hook
        self._predicting = Predicting(database)
        self._reading: asyncio.Task[Live] | None = None
        self._curves: KnownCurves = read_curves(settings.control_curves) if settings.control_curves else {}

    async def read(self, draft: tuple[JobRow, SpecRow] | None = None) -> Live:
        """Return the live state; with a draft, as if that job waited too.

        Those who ask at the same time share one reading, which with many jobs is the costliest part.

        Raises:
            ProblemError: 503 before the scheduler's first turn, when there is no policy yet.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        live = await asyncio.shield(self._reading)
        if draft is None:
            return live
        rows = replace(live.rows, jobs=[*live.rows.jobs, draft[0]])
        return replace(live, rows=rows, predictions=self._predicting.predict([*live.rows.unpredicted, draft[1]]))

    async def _read(self) -> Live:
        outlooks = await self._carbon.outlooks(await snapshots.zones(self._database), time.time())
        await self._predicting.refresh()
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            if await rounds.active_policy(connection) is None:
                raise unavailable("The scheduler")
            rows, _ = await read_rows(connection, self.settings, with_unpredicted=True, with_endings=True)
        return Live(rows, outlooks, self._predicting.predict(rows.unpredicted))

    def prediction(self, spec: SpecRow) -> Predictions:
        """Return what the model in force predicts for one job."""
        return self._predicting.predict([spec])

    def cluster(self, live: Live) -> Cluster:
        """Return the nodes that plans may use."""
        return Cluster.of(live.rows, self._hook.covers)

    def snapshot(self, live: Live, trigger: Trigger, *, at_rest: bool = False) -> Snapshot:
        """Return the snapshot of a round; this is slow with many jobs, so call it in a thread.

        Args:
            at_rest: Whether what is drawn now is wanted in it.
        """
        return snapshot_of(
            *(live.rows, self.cluster(live), trigger, live.outlooks, self.settings, self._curves, live.predictions),
            at_rest=at_rest,
        )

    def round(self, live: Live, trigger: Trigger) -> DryRound:
        """Return what the policy in force would do now; call it in a thread, as above.

        A stored policy that can no longer be built is replaced by the one in the settings, as in rounds.

        Raises:
            PlanError: The policy's plan for this state is not valid.
        """
        state = live.rows.state
        snapshot = self.snapshot(live, trigger)
        try:
            policy = build_policy(state.policy, state.parameters)
            memory = policy.load(state.memory) if state.memory else policy.initial()
        except PolicyConfigError:
            policy = build_policy(self.settings.policy, {})
            memory = policy.initial()
        decided = run_under_orders(policy, snapshot, memory)
        return DryRound(policy, snapshot, decided.plan, decided.memory, memory)


DRAFT = JobId("job_zzzzzzzzzzzzzzzzzzzzzzzzzz")  #: Sorts behind every job that was submitted

HOUR_S = 3_600.0


@dataclass(frozen=True)
class Length:
    """How long a run takes, seconds, and how that is known; None: unknown."""

    seconds: float | None
    source: Any
    words: str


@dataclass(frozen=True)
class Power:
    """What a gang draws, watts, and how that is known."""

    watts: float
    source: Any
    words: str


class DryRuns:
    """Answers what would become of a job that was submitted now."""

    def __init__(self, database: Database, view: LiveView) -> None:
        self._database = database
        self._view = view

    async def estimate(self, spec: JobSpec, tenant_id: str) -> StartEstimate:
        """Return what the policy would do with the job now, and what it would emit now and at the greenest time.

        Raises:
            ProblemError: 422 if the spec names a secret or an upload that the tenant does not have.
            PlanError: The policy's plan for this state is not valid.
        """
        await self._check_references(spec, tenant_id)
        row = SpecRow(DRAFT, tenant_id, spec.model_dump(mode="json", exclude_none=True))
        live = await self._view.read((draft_row(spec, tenant_id, time.time()), row))
        return await asyncio.to_thread(self._round, live, spec)

    async def _check_references(self, spec: JobSpec, tenant_id: str) -> None:
        names, upload = secret_places(spec), named_upload(spec)
        if not names and upload is None:
            return
        async with self._database.connection() as connection:
            found = {row.name for row in await sealed_secrets(connection, tenant_id, spec.project, names)}
            missing = [name for name in names if name not in found]
            lacks = upload is not None and not await has_upload(connection, tenant_id, upload)
        if errors := missing_references(spec, missing, (upload,) if lacks else ()):
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors)

    def _round(self, live: Live, spec: JobSpec) -> StartEstimate:
        dry = self._view.round(live, Trigger.PASSIVE)
        actions = dry.plan.actions
        action = next((each for each in actions if each.job_id == DRAFT and isinstance(each, Start | Hold)), None)
        return estimate_of(live.rows.state.policy, dry.snapshot, action, spec, live.predictions)


def draft_row(spec: JobSpec, tenant_id: str, now_s: float) -> JobRow:
    """Return the row that the job would have right after its submission."""
    label = spec.labels.get("kind")
    return JobRow(
        id=DRAFT,
        tenant_id=tenant_id,
        state="queued",
        submitted_s=now_s,
        since_s=now_s,
        min_gpus=spec.gpus.min,
        max_gpus=spec.gpus.largest,
        step_gpus=spec.gpus.step,
        asked_gpus=spec.gpus.asked or spec.gpus.min,
        gpu_model=spec.gpus.model,
        memory_gib=spec.gpus.memory_gib,
        zone=spec.gpus.zone,
        within=spec.gpus.within,
        near=spec.gpus.near,
        slice=spec.gpus.slice,
        needs_container=spec.image is not None,
        layout=None if spec.layout is None else spec.layout.model_dump_json(),
        service=None,
        leaves=False,
        preemptible=spec.preemptible,
        may_share_gpu=spec.may_share_gpu,
        priority=spec.priority,
        deadline_s=float("inf") if spec.deadline is None else spec.deadline.timestamp(),
        work=None if spec.work is None else spec.work.total,
        attained_gpu_s=0.0,
        allocation_state=None,
        gpus=0,
        shares=None,
        power_limit_w=None,
        clock_mhz=None,
        unordered_w=None,
        flex=spec.flex,
        kind=DRAFT if label is None else f"{tenant_id}/{label}",
        kind_label=label,
        energy_j=0.0,
        carbon_gco2=0.0,
        gpu_power_w=None,
        gpu_s=0.0,
        done=None,
        predicted_gpu_s=None,
        spread_gpu_s=None,
        batch_min=None if spec.batch is None else spec.batch.min,
        batch_max=None if spec.batch is None else spec.batch.max,
        base_batch=spec.base_batch or spec.global_batch,
        noise_scale=None,
        family=spec.family,
    )


def estimate_of(
    policy: str, snapshot: Snapshot, action: Start | Hold | None, spec: JobSpec, predictions: Predictions
) -> StartEstimate:
    """Return the estimate that follows from a round's action on the draft."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    job = jobs.index[DRAFT]
    start = action if isinstance(action, Start) and not spec.hold else None
    hold = action if isinstance(action, Hold) else None
    gpus = start.gpus if start else spec.gpus.min
    suits = jobs.eligible[job][nodes.gpu_model] & nodes.schedulable if len(nodes) else np.empty(0, dtype=np.bool_)
    reason = None if start else hold.reason if hold else Reason.WAITING_FOR_ROUND
    length = _length(spec, predictions, gpus)
    on = nodes.index[start.placement.shares[0].node_id] if start else first_node_for(snapshot, DRAFT, suits)
    power = None if on is None else power_of(snapshot, job, int(nodes.gpu_model[on]), gpus, spec)
    outlook = None if on is None else snapshot.outlooks[int(nodes.zone[on])]
    latest_s = latest_start_s(spec, snapshot.now_s, length)
    now, greenest = emissions(snapshot.now_s, outlook, length, power, latest_s)
    expected_s = hold.expected_start_s if hold else None
    suitable, free = slices_for(snapshot, DRAFT) or (int(nodes.gpus[suits].sum()), int(nodes.free_gpus[suits].sum()))
    return StartEstimate(
        policy=policy,
        slice=spec.gpus.slice,
        starts_now=start is not None,
        gpus=gpus,
        placement=[
            Share(node_id=share.node_id, devices=list(share.devices))
            for share in (start.placement.shares if start else ())
        ],
        reason="held" if spec.hold else reason,
        detail="It waits until it is released." if spec.hold else None if reason is None else SENTENCES[reason],
        expected_start_at=None if expected_s is None or spec.hold else datetime.fromtimestamp(expected_s, UTC),
        free_gpus=free,
        suitable_gpus=suitable,
        waiting_jobs=int((jobs.phase == QUEUED).sum()) - 1,
        duration_s=length.seconds,
        duration_from=length.source,
        power_w=None if power is None else power.watts,
        power_from=None if power is None else power.source,
        now=now,
        greenest=greenest,
        assumptions=_assumptions(start, length, power, outlook, spec, knows_greenest=greenest is not None),
    )


def _length(spec: JobSpec, predictions: Predictions, gpus: int) -> Length:
    at = predictions.job_id.index(DRAFT)
    if predictions.seen[at] and predictions.gpu_s[at] > 0:
        seconds = predictions.gpu_s[at] / gpus
        runs = predictions.examples[at]
        words = f"Length: as of {runs} earlier jobs like it, and twice the GPUs take half the time."
        limit = spec.time_limit_s
        return Length(seconds if limit is None else min(seconds, limit), "prediction", words)
    if spec.time_limit_s is not None:
        return Length(spec.time_limit_s, "time_limit", "Length: as long as its time limit allows; no such job has run.")
    return Length(None, None, "Length: unknown, so that emissions are per hour; --time would limit it.")


def slices_for(snapshot: Snapshot, job_id: JobId) -> tuple[int, int] | None:
    """Return how many slices suit a job that waits for one, and how many of them are free; None for all other jobs."""
    for job in snapshot.slice_jobs:
        if job.job_id == job_id:
            suits = [unit for unit, may in zip(snapshot.slice_units, job.units.tolist(), strict=True) if may]
            return len(suits), sum(unit.free for unit in suits)
    return None


def first_node_for(snapshot: Snapshot, job_id: JobId, suits: Bools) -> int | None:
    """Return the first node that a waiting job may run on, if any; ``suits``: (n_nodes,) for jobs on GPUs."""
    for job in snapshot.slice_jobs:
        if job.job_id == job_id:
            units = zip(snapshot.slice_units, job.units.tolist(), strict=True)
            return next((unit.node for unit, may in units if may), None)
    return next(iter(np.flatnonzero(suits).tolist()), None)


def power_of(snapshot: Snapshot, job: int, gpu_model: int, gpus: int, spec: JobSpec) -> Power:
    """Return what a gang of a job draws on a GPU model (by index): as measured for its kind, or else as is usual."""
    power = _power_on_gpus(snapshot, job, gpu_model, gpus, spec)
    if spec.gpus.slice is None:
        return power
    words = f"{power.words} A slice is taken to draw its share of that by size."
    return replace(power, watts=power.watts * sevenths_of(spec.gpus.slice) / WHOLE, words=words)


def _power_on_gpus(snapshot: Snapshot, job: int, gpu_model: int, gpus: int, spec: JobSpec) -> Power:
    row = int(snapshot.jobs.control_curve[job])
    table = snapshot.gangs[row].get(gpu_model) if 0 <= row < len(snapshot.gangs) else None
    if table is not None:
        _, power_w = table.at(np.array([gpus]))
        return Power(float(power_w[0, -1]), "measured", "Power: by the measured runs of this kind of job.")
    watts = gpus * usual_w(snapshot.gpu_models[gpu_model], spec.family or ANY_FAMILY)
    return Power(watts, "typical", f"Power: {watts / gpus:.0f} W per GPU, as is usual for the model, without the host.")


def latest_start_s(spec: JobSpec, submitted_s: float, length: Length) -> float:
    """Return when a job must begin at the latest, by its deadline and flexibility; UTC seconds, inf: any time."""
    latest_s = math.inf
    if spec.deadline is not None:
        latest_s = spec.deadline.timestamp() - (length.seconds or 0.0)
    if spec.flexibility_s is not None:
        latest_s = min(latest_s, submitted_s + spec.flexibility_s)
    return latest_s


def emissions(
    now_s: float, outlook: CarbonOutlook | None, length: Length, power: Power | None, latest_s: float
) -> tuple[EmissionEstimate | None, EmissionEstimate | None]:
    """Return the emissions of a run that begins now, and of one that begins at the greenest time until ``latest_s``.

    The search also ends where the forecast does. The second is None if the forecast does not cover a run from now on.
    """
    if outlook is None:
        return None, None
    window_s = length.seconds or HOUR_S

    def starting(at_s: float) -> EmissionEstimate:
        mean = outlook.curve.mean(at_s, at_s + window_s)
        per_hour = None if power is None else power.watts * HOUR_S / J_PER_KWH * mean
        return EmissionEstimate(
            starts_at=datetime.fromtimestamp(at_s, UTC),
            zone=outlook.zone,
            signal=outlook.signal.value,
            intensity_gco2_per_kwh=mean,
            carbon_gco2_per_hour=per_hour,
            carbon_gco2=None if per_hour is None or length.seconds is None else per_hour * length.seconds / HOUR_S,
        )

    edges, last_s = outlook.curve.edges_s, min(outlook.curve.end_s - window_s, latest_s)
    starts = np.append(now_s, edges[(edges > now_s) & (edges <= last_s)])
    known = now_s + window_s <= outlook.curve.end_s
    greenest = float(starts[int(np.argmin(outlook.curve.means(starts, window_s)))])
    return starting(now_s), starting(greenest) if known else None


def _assumptions(
    start: Start | None,
    length: Length,
    power: Power | None,
    outlook: CarbonOutlook | None,
    spec: JobSpec,
    *,
    knows_greenest: bool,
) -> list[str]:
    said = ["Start: by the cluster as it is now; jobs that arrive or end change it. Nothing is reserved."]
    if spec.tasks is not None:
        said.insert(0, f"Array: of the first of its {len(spec.tasks.indices)} tasks; each of the others is like it.")
    if spec.after is not None:
        said.insert(0, "Dependencies: not looked at; this is as if all of them were met.")
    if power is None or outlook is None:
        return [*said, "Emissions: unknown, as no node suits the job."]
    said += [length.words, power.words]
    stale = ", which is stale" if outlook.stale else ""
    said.append(f"Intensity: {outlook.signal.value} of {outlook.zone} by forecast{stale}; PUE is not included.")
    if not knows_greenest:
        said.append("Greenest time: unknown, as the forecast ends before a run that began now would.")
    if start is None and spec.gpus.largest > spec.gpus.min:
        said.append(f"Size: {spec.gpus.min} GPUs, the smallest gang; the policy may choose another.")
    return said
