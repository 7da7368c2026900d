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
from services.core.cycle.capacity import Capacity
from services.core.cycle.plan import Hold, Plan, Start
from services.core.cycle.policy import Policy
from services.core.cycle.snapshot import QUEUED, Snapshot, Trigger
from services.core.domain.arrays import Bools
from services.core.domain.carbon import CarbonOutlook
from services.core.domain.counted import counted
from services.core.domain.errors import PolicyConfigError
from services.core.domain.ids import JobId
from services.core.domain.mig import WHOLE, sevenths_of
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH
from services.core.policies.cells import room_after_s
from services.core.policies.orders.layer import run_under_orders
from services.core.policies.registry import build_policy, entry_of
from services.core.profiles.priors import ANY_FAMILY, usual_w
from services.db.database import Database
from services.db.job_inputs import has_upload, sealed_secrets
from services.db.sealing import SEAL_BYTES
from services.kit.logging import Log
from services.kit.problems import ProblemError, unavailable
from services.kit.references import missing_references, named_upload, secret_places
from services.kit.starts import check_start
from services.scheduler.failures import PLAIN
from services.scheduler.learning.learned import KnownCurves, read_curves
from services.scheduler.learning.predicting import Predicting
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.planning.cluster import Cluster
from services.scheduler.planning.lengths import Remaining, remaining
from services.scheduler.planning.snapshot import read_rows, snapshot_of
from services.scheduler.power.hooks import PowerHook
from services.scheduler.reasons import SENTENCES
from services.scheduler.repository import rounds, snapshots
from services.scheduler.repository.documents import Json
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import ClusterRows, JobRow, SpecRow
from services.scheduler.settings import SchedulerSettings

log = Log(__name__)


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

    async def read(self) -> Live:
        """Return the live state.

        Those who ask at the same time share one reading, which with many jobs is the costliest part.

        Raises:
            ProblemError: 503 before the scheduler's first turn, when there is no policy yet.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)

    def with_draft(self, live: Live, spec: JobSpec, tenant_id: str) -> Live:
        """Return the live state as if such a job waited, too, as ``DRAFT``."""
        draft = SpecRow(DRAFT, tenant_id, spec.model_dump(mode="json", exclude_none=True))
        rows = replace(live.rows, jobs=[*live.rows.jobs, draft_row(spec, tenant_id, live.rows.state.now_s)])
        return replace(live, rows=rows, predictions=self._predicting.predict([*live.rows.unpredicted, draft]))

    async def _read(self) -> Live:
        outlooks = await self._carbon.outlooks(await snapshots.zones(self._database), time.time())
        await self._predicting.refresh()
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            if await rounds.active_policy(connection) is None:
                raise unavailable("The scheduler")
            rows, _ = await read_rows(connection, self.settings, with_unpredicted=True, with_endings=True)
        return Live(rows, outlooks, self._predicting.predict(rows.unpredicted))

    def prediction(self, tenant_id: str, spec: Json) -> Predictions:
        """Return what the model in force predicts for one job of a tenant."""
        return self._predicting.predict([SpecRow("", tenant_id, spec)])

    def cluster(self, live: Live) -> Cluster:
        """Return the nodes that plans may use."""
        return Cluster.of(live.rows, self._hook.covers)

    def snapshot(self, live: Live, trigger: Trigger, *, at_rest: bool = False) -> Snapshot:
        """Return a round's snapshot, in a thread: it is slow with many jobs; ``at_rest``: with what is drawn now."""
        return snapshot_of(
            *(live.rows, self.cluster(live), trigger, live.outlooks, self.settings, self._curves, live.predictions),
            at_rest=at_rest,
        )

    def round(self, live: Live, trigger: Trigger) -> DryRound:
        """Return what the policy in force would do now; call it in a thread, as above.

        A stored policy that can no longer be built is replaced by the one in the settings, one that fails by a plain
        one, as in rounds.
        """
        state = live.rows.state
        snapshot = self.snapshot(live, trigger)
        try:
            policy = build_policy(state.policy, state.parameters)
            memory = policy.load(state.memory) if state.memory else policy.initial()
        except PolicyConfigError:
            policy = build_policy(self.settings.policy, {})
            memory = policy.initial()
        try:
            decided = run_under_orders(policy, snapshot, memory)
        except Exception as error:
            log.warning("policy.failed", error=str(error) or type(error).__name__, instead=PLAIN)
            policy = build_policy(PLAIN, {})
            memory = policy.initial()
            decided = run_under_orders(policy, snapshot, memory)
        return DryRound(policy, snapshot, decided.plan, decided.memory, memory)


DRAFT = JobId("job_zzzzzzzzzzzzzzzzzzzzzzzzzz")  #: Sorts behind every job that was submitted

HOUR_S = 3_600.0
WAITS_FOR_GPUS = (Reason.WAITING_FOR_ROUND, Reason.WAITING_FOR_RELEASE, Reason.NOT_ENOUGH_FREE_GPUS)


@dataclass(frozen=True)
class Power:
    """What a gang draws, watts, and how that is known."""

    watts: float
    source: Any
    words: str


@dataclass(frozen=True)
class Foreseen:
    """What a job's run on ``gpus`` GPUs is expected to draw and emit.

    ``greenest`` is None where the forecast does not cover a run from now on; all but the first two are where no node
    suits the job.
    """

    gpus: int
    left: Remaining
    outlook: CarbonOutlook | None = None
    power: Power | None = None
    now: EmissionEstimate | None = None
    greenest: EmissionEstimate | None = None

    @property
    def words(self) -> list[str]:
        """What the figures rest on."""
        said = ["Start: by the cluster as it is now; jobs that arrive or end change it. Nothing is reserved."]
        if self.power is None or self.outlook is None:
            return [*said, "Emissions: unknown, as no node suits the job now."]
        zone, stale = self.outlook.zone, ", which is stale" if self.outlook.stale else ""
        intensity = f"Intensity: {self.outlook.signal.value} of {zone} by forecast{stale}; PUE is not included."
        return [*said, self.left.words, self.power.words, intensity]


class DryRuns:
    """Answers what would become of a job that was submitted now."""

    def __init__(self, database: Database, view: LiveView) -> None:
        self._database = database
        self._view = view

    async def estimate(self, spec: JobSpec, tenant_id: str) -> StartEstimate:
        """Return what the policy would do with the job now, and what it would emit now and at the greenest time.

        Raises:
            ProblemError: 422 if the spec names a secret or an upload that the tenant does not have, or is too large.
            PlanError: The policy's plan for this state is not valid.
        """
        await self._check_references(spec, tenant_id)
        live = self._view.with_draft(await self._view.read(), spec, tenant_id)
        return await asyncio.to_thread(self._round, live, spec, tenant_id)

    async def _check_references(self, spec: JobSpec, tenant_id: str) -> None:
        check_start({"": spec})
        names, upload = secret_places(spec), named_upload(spec)
        if not names and upload is None:
            return
        async with self._database.connection() as connection:
            rows = await sealed_secrets(connection, tenant_id, spec.project, names)
            found = {row.name: len(row.sealed) - SEAL_BYTES for row in rows}
            missing = [name for name in names if name not in found]
            lacks = upload is not None and not await has_upload(connection, tenant_id, upload)
        if errors := missing_references(spec, missing, (upload,) if lacks else ()):
            raise ProblemError(422, ProblemCode.INVALID_REQUEST, errors[0].detail, errors=errors)
        check_start({"": spec}, {"": found})

    def _round(self, live: Live, spec: JobSpec, tenant_id: str) -> StartEstimate:
        dry = self._view.round(live, Trigger.PASSIVE)
        actions = dry.plan.actions
        action = next((each for each in actions if each.job_id == DRAFT and isinstance(each, Start | Hold)), None)
        predicted = self._view.prediction(tenant_id, spec.model_dump(mode="json", exclude_none=True))
        return estimate_of(live.rows.state.policy, dry.snapshot, action, spec, predicted)


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
        preemptible=spec.preemptible,
        may_share_gpu=spec.may_share_gpu,
        priority=spec.priority,
        deadline_s=float("inf") if spec.deadline is None else spec.deadline.timestamp(),
        work=None if spec.work is None else spec.work.total,
        flex=spec.flex,
        kind=DRAFT if label is None else f"{tenant_id}/{label}",
        kind_label=label,
        batch_min=None if spec.batch is None else spec.batch.min,
        batch_max=None if spec.batch is None else spec.batch.max,
        base_batch=spec.base_batch or spec.global_batch,
        family=spec.family,
    )


def estimate_of(
    policy: str, snapshot: Snapshot, action: Start | Hold | None, spec: JobSpec, predicted: Predictions
) -> StartEstimate:
    """Return the estimate that follows from a round's action on the draft."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    start = action if isinstance(action, Start) and not spec.hold else None
    hold = action if isinstance(action, Hold) else None
    may_run = jobs.eligible[jobs.index[DRAFT]]
    suits = may_run[nodes.gpu_model] & nodes.schedulable if len(nodes) else np.empty(0, dtype=np.bool_)
    reason = None if start else hold.reason if hold else Reason.WAITING_FOR_ROUND
    run = foreseen(snapshot, DRAFT, spec, start, suits, predicted, snapshot.now_s)
    expected_s = hold.expected_start_s if hold else None
    slices = slices_for(snapshot, DRAFT)
    suitable, free = slices or (int(nodes.gpus[suits].sum()), int(nodes.free_gpus[suits].sum()))
    room_s = math.inf
    if reason in WAITS_FOR_GPUS and slices is None:
        room_s = snapshot.now_s + _room_after_s(policy, snapshot, spec.gpus.asked or spec.gpus.min, suitable)
    return StartEstimate(
        policy=policy,
        slice=spec.gpus.slice,
        starts_now=start is not None,
        gpus=run.gpus,
        placement=[
            Share(node_id=share.node_id, devices=list(share.devices))
            for share in (start.placement.shares if start else ())
        ],
        reason="held" if spec.hold else reason,
        detail="It waits until it is released." if spec.hold else None if reason is None else SENTENCES[reason],
        expected_start_at=None if expected_s is None or spec.hold else datetime.fromtimestamp(expected_s, UTC),
        room_at=datetime.fromtimestamp(room_s, UTC) if math.isfinite(room_s) and not spec.hold else None,
        free_gpus=free,
        suitable_gpus=suitable,
        waiting_jobs=int((jobs.phase == QUEUED).sum()) - 1,
        duration_s=run.left.estimate.seconds,
        duration_from=run.left.estimate.source,  # pyright: ignore[reportArgumentType]  # it has no progress yet
        power_w=None if run.power is None else run.power.watts,
        power_from=None if run.power is None else run.power.source,
        now=run.now,
        greenest=run.greenest,
        assumptions=_assumptions(start, run, spec),
    )


def _room_after_s(policy: str, snapshot: Snapshot, gpus: int, suitable: int) -> float:
    jobs, entry, on = snapshot.jobs, entry_of(policy), Capacity(snapshot).model
    draft, runs = jobs.index[DRAFT], on >= 0
    there: Bools = np.any(jobs.eligible & jobs.eligible[draft], axis=1)
    there[runs] = jobs.eligible[draft][on[runs]]
    there[draft] = False
    shrinks = jobs.preemptible & (entry is None or entry.elastic)
    others = np.where(shrinks | (jobs.gpus == 0), jobs.asked_gpus, jobs.gpus)
    return room_after_s(gpus, suitable, others[there], jobs.remaining_s[there])


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


def foreseen(
    snapshot: Snapshot,
    job_id: JobId,
    spec: JobSpec,
    start: Start | None,
    suits: Bools,
    predicted: Predictions,
    submitted_s: float,
) -> Foreseen:
    """Return what to expect of a waiting job's run, if it begins now or at the greenest time.

    Args:
        start: How a round would start it, if it would.
        suits: (n_nodes,) where it may run, for jobs on GPUs.
        predicted: What the model in force predicts for it.
    """
    jobs, nodes = snapshot.jobs, snapshot.nodes
    job, gpus = jobs.index[job_id], start.gpus if start else spec.gpus.min
    left = remaining(float(jobs.progress[job]), float(jobs.attained_gpu_s[job]), gpus, spec, predicted)
    on = nodes.index[start.placement.shares[0].node_id] if start else first_node_for(snapshot, job_id, suits)
    if on is None:
        return Foreseen(gpus, left)
    power = power_of(snapshot, job, int(nodes.gpu_model[on]), gpus, spec)
    outlook, seconds = snapshot.outlooks[int(nodes.zone[on])], left.estimate.seconds
    now, greenest = emissions(snapshot.now_s, outlook, seconds, power, latest_start_s(spec, submitted_s, seconds))
    return Foreseen(gpus, left, outlook, power, now, greenest)


def latest_start_s(spec: JobSpec, submitted_s: float, seconds: float | None) -> float:
    """Return when a job must begin at the latest, by its deadline and flexibility; UTC seconds, inf: any time."""
    latest_s = math.inf
    if spec.deadline is not None:
        latest_s = spec.deadline.timestamp() - (seconds or 0.0)
    if spec.flexibility_s is not None:
        latest_s = min(latest_s, submitted_s + spec.flexibility_s)
    return latest_s


def emissions(
    now_s: float, outlook: CarbonOutlook, seconds: float | None, power: Power, latest_s: float
) -> tuple[EmissionEstimate, EmissionEstimate | None]:
    """Return the emissions of a run that begins now, and of one that begins at the greenest time until ``latest_s``.

    The search also ends where the forecast does. The second is None if the forecast does not cover a run from now on.
    """
    window_s = seconds or HOUR_S

    def starting(at_s: float) -> EmissionEstimate:
        mean = outlook.curve.mean(at_s, at_s + window_s)
        per_hour = power.watts * HOUR_S / J_PER_KWH * mean
        return EmissionEstimate(
            starts_at=datetime.fromtimestamp(at_s, UTC),
            zone=outlook.zone,
            signal=outlook.signal.value,
            intensity_gco2_per_kwh=mean,
            carbon_gco2_per_hour=per_hour,
            carbon_gco2=None if seconds is None else per_hour * seconds / HOUR_S,
        )

    edges, last_s = outlook.curve.edges_s, min(outlook.curve.end_s - window_s, latest_s)
    starts = np.append(now_s, edges[(edges > now_s) & (edges <= last_s)])
    known = now_s + window_s <= outlook.curve.end_s
    greenest = float(starts[int(np.argmin(outlook.curve.means(starts, window_s)))])
    return starting(now_s), starting(greenest) if known else None


def _assumptions(start: Start | None, run: Foreseen, spec: JobSpec) -> list[str]:
    said = run.words
    if spec.tasks is not None:
        said.insert(0, f"Array: of the first of its {len(spec.tasks.indices)} tasks; each of the others is like it.")
    if spec.after is not None:
        said.insert(0, "Dependencies: not looked at; this is as if all of them were met.")
    if run.power is not None and run.greenest is None:
        said.append("Greenest time: unknown, as the forecast ends before a run that began now would.")
    if run.power is not None and start is None and spec.gpus.largest > spec.gpus.min:
        said.append(f"Size: {counted(spec.gpus.min, 'GPU')}, the smallest gang; the policy may choose another.")
    return said
