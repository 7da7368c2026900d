"""The jobs of a snapshot, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from services.core.cycle.snapshot import JobTable, Phase
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.scheduler.learning.predicting import remaining_s
from services.scheduler.planning.cluster import NodeKind
from services.scheduler.repository.documents import StoredShare
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

    def floats(column: str) -> Floats:
        return np.array(list(map(attrgetter(column), jobs)), dtype=np.float64)

    def ints(column: str) -> Ints:
        return np.array(list(map(attrgetter(column), jobs)), dtype=np.int64)

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
        ids=tuple(JobId(job.id) for job in jobs),
        tenants=tuple(job.tenant_id for job in jobs),
        submitted_s=floats("submitted_s"),
        waiting_since_s=since_s,
        phase=np.array([phase_of(job) for job in jobs], dtype=np.int64),
        min_gpus=ints("min_gpus"),
        max_gpus=ints("max_gpus"),
        step_gpus=ints("step_gpus"),
        gpus=gpus,
        eligible=eligible,
        preemptible=np.array([job.preemptible for job in jobs], dtype=np.bool_),
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
        placements=tuple(placement_of(job.shares) for job in jobs),
        speed_curve=np.array([speed_curves[at] if at >= 0 else -1 for at in curve_of_kind], dtype=np.int64),
        power_limit_w=floats("power_limit_w"),
        clock_mhz=floats("clock_mhz"),
        control_curve=np.array(curve_of_kind, dtype=np.int64),
    )


def placement_of(shares: Sequence[StoredShare] | None) -> Placement | None:
    """Return where a gang is, None without one."""
    if shares is None:
        return None
    return Placement(tuple(NodeShare(NodeId(share["node_id"]), tuple(share["devices"])) for share in shares))


def eligible_kinds(jobs: Sequence[JobRow], kinds: Sequence[NodeKind]) -> Bools:
    """Return on which kinds of nodes each job may run: (n_jobs, n_gpu_models)."""
    answers: dict[tuple[str | None, float | None, bool], list[bool]] = {}
    table: list[list[bool]] = []
    for job in jobs:
        asked = (job.gpu_model, job.memory_gib, job.needs_container)
        if asked not in answers:
            answers[asked] = [_fits(job, kind) for kind in kinds]
        table.append(answers[asked])
    eligible = np.array(table, dtype=np.bool_).reshape(len(jobs), len(kinds))
    # A job that is being cancelled or held claims nothing of what it releases: it will not come back for it.
    # Nor does a service instance that stops: should it come back, it is placed before all jobs.
    leaves = [job.leaves or (job.service is not None and job.state != "queued") for job in jobs]
    eligible[np.array(leaves, dtype=np.bool_)] = False
    return eligible


def _fits(job: JobRow, kind: NodeKind) -> bool:
    return (
        (job.gpu_model is None or job.gpu_model == kind.gpu_model)
        and (job.memory_gib is None or job.memory_gib <= kind.memory_gib)
        and (kind.containers or not job.needs_container)
    )


def _efficiencies(jobs: Sequence[JobRow], rows: Sequence[EfficiencyRow]) -> tuple[Floats, Floats]:
    """Return progress per joule at the minimum gang and at the present one, or the last one of a waiting job."""
    of_size: dict[tuple[str, int], float] = {}
    newest: dict[str, tuple[int, float]] = {}
    for row in rows:
        of_size[row.job_id, row.gpus] = row.progress_per_j
        newest[row.job_id] = max(newest.get(row.job_id, (-1, 0.0)), (row.generation, row.progress_per_j))
    base = [of_size.get((job.id, job.min_gpus), np.nan) for job in jobs]
    now = [of_size.get((job.id, job.gpus), np.nan) if job.gpus else newest.get(job.id, (0, np.nan))[1] for job in jobs]
    return np.array(base, dtype=np.float64), np.array(now, dtype=np.float64)
