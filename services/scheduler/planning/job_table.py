"""The jobs of a snapshot, as columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from services.contracts.engines import OURS
from services.core.cycle.snapshot import JobTable, Phase
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.db.rows import columns_of
from services.scheduler.learning.predicting import remaining_s
from services.scheduler.planning.cluster import NodeKind
from services.scheduler.repository.documents import StoredShare
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import EfficiencyRow, JobRow

PHASES = {
    "queued": Phase.QUEUED,
    "starting": Phase.STARTING,
    "running": Phase.RUNNING,
    "preempting": Phase.PREEMPTING,
}


def phase_of(job: JobRow) -> Phase:
    """Return a job's phase; a gang that is being stopped is on its way out, whatever its job's state says."""
    return Phase.PREEMPTING if job.allocation_state == "stopping" else PHASES[job.state]


def job_table(
    jobs: Sequence[JobRow],
    efficiencies: Sequence[EfficiencyRow],
    eligible: Bools,
    now_s: float,
    *,
    control_curves: Mapping[str, int],
    speed_curves: Sequence[int],
    predicted_gpu_s: Mapping[str, float],
) -> JobTable:
    """Return jobs as policies see them.

    Args:
        jobs: In the order of the table.
        efficiencies: What each did per joule, by size of its gangs.
        eligible: (n_jobs, n_gpu_models) where each may run.
        now_s: UTC seconds.
        control_curves: The row of each kind of job in ``Snapshot.control_curves``.
        speed_curves: For each of those, the row in ``Snapshot.speed_curves``, -1 for none.
        predicted_gpu_s: Lengths that were predicted just now, and are in no row yet.
    """

    columns = columns_of(JobRow, jobs)

    def floats(column: str) -> Floats:
        return np.array(columns[column], dtype=np.float64)

    def ints(column: str) -> Ints:
        return np.array(columns[column], dtype=np.int64)

    gpus, since_s = ints("gpus"), floats("since_s")
    gpu_power_w = floats("gpu_power_w")
    gpu_power_w[floats("gpu_s") < 1] = np.nan
    base, now = _efficiencies(jobs, efficiencies)
    curve_of_kind = [control_curves.get(job.kind, -1) for job in jobs]
    attained_gpu_s = floats("attained_gpu_s") + gpus * np.maximum(now_s - since_s, 0)
    progress = np.minimum(floats("done") / floats("work"), 1.0)
    lengths_gpu_s = floats("predicted_gpu_s")
    if predicted_gpu_s:
        lengths_gpu_s = np.array([predicted_gpu_s.get(job.id, job.predicted_gpu_s) for job in jobs], dtype=np.float64)
    return JobTable(
        ids=cast("tuple[JobId, ...]", columns["id"]),
        tenants=cast("tuple[str, ...]", columns["tenant_id"]),
        submitted_s=floats("submitted_s"),
        waiting_since_s=since_s,
        phase=np.fromiter(map(phase_of, jobs), np.int64, len(jobs)),
        min_gpus=ints("min_gpus"),
        max_gpus=ints("max_gpus"),
        step_gpus=ints("step_gpus"),
        gpus=gpus,
        eligible=eligible,
        preemptible=np.array(columns["preemptible"], dtype=np.bool_),
        priority=ints("priority"),
        deadline_s=floats("deadline_s"),
        attained_gpu_s=attained_gpu_s,
        energy_j=floats("energy_j"),
        carbon_gco2=floats("carbon_gco2"),
        gpu_power_w=gpu_power_w,
        efficiency_base=base,
        efficiency_now=now,
        progress=progress,
        remaining_s=remaining_s(lengths_gpu_s, progress, attained_gpu_s, floats("min_gpus")),
        placements=tuple(None if job.shares is None else placement_of(job.shares) for job in jobs),
        speed_curve=np.array([speed_curves[at] if at >= 0 else -1 for at in curve_of_kind], dtype=np.int64),
        power_limit_w=floats("power_limit_w"),
        clock_mhz=floats("clock_mhz"),
        control_curve=np.array(curve_of_kind, dtype=np.int64),
        shareable=np.array(columns["may_share_gpu"], dtype=np.bool_),
        memory_gib=floats("memory_gib"),
    )


def length_spreads(jobs: Sequence[JobRow], predictions: Predictions | None) -> dict[JobId, float]:
    """Return ``Snapshot.length_spreads``; ``predictions``: those made just now, which are in no row yet."""
    known = [(job.id, job.predicted_gpu_s, job.spread_gpu_s) for job in jobs]
    if predictions:
        new = zip(predictions.job_id, predictions.gpu_s, predictions.spread_gpu_s, predictions.seen, strict=True)
        known += [(job_id, gpu_s, spread_gpu_s) for job_id, gpu_s, spread_gpu_s, seen in new if seen]
    return {JobId(job_id): spread_gpu_s / gpu_s for job_id, gpu_s, spread_gpu_s in known if gpu_s and spread_gpu_s}


def progress_of(job: JobRow, now_s: float) -> tuple[float, float]:
    """Return the share of one job that is done, NaN where that is not known, and its GPU seconds so far."""
    done = math.nan if job.done is None or not job.work else min(job.done / job.work, 1.0)
    return done, job.attained_gpu_s + job.gpus * max(now_s - job.since_s, 0.0)


def placement_of(shares: Sequence[StoredShare]) -> Placement:
    """Return where a gang is."""
    return Placement(tuple(NodeShare(NodeId(share["node_id"]), tuple(share["devices"])) for share in shares))


def eligible_kinds(jobs: Sequence[JobRow], kinds: Sequence[NodeKind]) -> Bools:
    """Return on which kinds of nodes each job may run: (n_jobs, n_gpu_models)."""
    asked = [(job.gpu_model, job.memory_gib, job.needs_container, job.engine, job.queue) for job in jobs]
    row = {each: at for at, each in enumerate(dict.fromkeys(asked))}
    answers = np.array([[_fits(*each, kind) for kind in kinds] for each in row], dtype=np.bool_)
    eligible = answers.reshape(len(row), len(kinds))[np.fromiter(map(row.__getitem__, asked), np.int64, len(jobs))]
    # A job that is being cancelled or held claims nothing of what it releases: it will not come back for it.
    # Nor does a service instance that stops: should it come back, it is placed before all jobs.
    leaves = [job.leaves or (job.service is not None and job.state != "queued") for job in jobs]
    eligible[np.array(leaves, dtype=np.bool_)] = False
    return eligible


def _fits(
    gpu_model: str | None, memory_gib: float | None, needs_container: bool, engine: str, queue: str, kind: NodeKind
) -> bool:
    return (
        engine == kind.engine
        and (engine == OURS or queue in kind.queues)
        and (gpu_model is None or gpu_model == kind.gpu_model)
        and (memory_gib is None or memory_gib <= kind.memory_gib)
        and (kind.containers or not needs_container)
    )


def _efficiencies(jobs: Sequence[JobRow], rows: Sequence[EfficiencyRow]) -> tuple[Floats, Floats]:
    """Return progress per joule at the minimum gang and at the present one, or the last one of a waiting job.

    Both are (n_jobs,), NaN where nothing was measured.
    """
    base, now = np.full((2, len(jobs)), np.nan)
    index = {job.id: at for at, job in enumerate(jobs)} if rows else {}
    newest: dict[int, int] = {}
    for row in rows:
        at = index.get(row.job_id)
        if at is None:
            continue
        job = jobs[at]
        if row.gpus == job.min_gpus:
            base[at] = row.progress_per_j
        if row.gpus == job.gpus or (not job.gpus and row.generation > newest.get(at, -1)):
            newest[at] = row.generation
            now[at] = row.progress_per_j
    return base, now
