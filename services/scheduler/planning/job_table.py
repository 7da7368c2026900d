"""The jobs of a snapshot, as columns.

Service instances that hold devices are in no table, and those that wait are placed before all; nor are jobs that hold
slices in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from services.contracts.engines import OURS
from services.core.cycle.snapshot import JobTable, NodeTable, Phase, ServiceInstance
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.scheduler.learning.predicting import remaining_s
from services.scheduler.planning.cluster import Cluster, NodeKind, device_indices, is_awake, meets
from services.scheduler.repository.documents import StoredShare
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.predictions import Predictions
from services.scheduler.repository.snapshots import EfficiencyRow, JobRow, NodeRow

PHASES = {"queued": Phase.QUEUED, "starting": Phase.STARTING, "running": Phase.RUNNING, "preempting": Phase.PREEMPTING}

AS_READ = (
    *("submitted_s", "deadline_s", "min_gpus", "max_gpus", "step_gpus", "asked_gpus", "preemptible", "priority"),
    *("energy_j", "carbon_gco2", "power_limit_w", "clock_mhz", "unordered_w", "memory_gib"),
)
"""Columns of a snapshot's jobs that policies see as they are."""


def phase_of(job: JobRow) -> Phase:
    """Return a job's phase; a gang that is being stopped is on its way out, whatever the job's state says."""
    return _phase(job.state, job.allocation_state)


def _phase(state: str, allocation_state: str | None) -> Phase:
    return Phase.PREEMPTING if allocation_state == "stopping" else PHASES[state]


def phases_of(jobs: JobRows) -> Ints:
    """Return ``phase_of`` for each job: (n_jobs,)."""
    states = jobs.kinds("state", "allocation_state")
    return np.array([_phase(*each) for each in states.values], dtype=np.int64)[states.of]


def job_table(
    jobs: JobRows,
    efficiencies: Sequence[EfficiencyRow],
    eligible: Bools,
    now_s: float,
    *,
    control_curves: Mapping[str, int],
    speed_curves: Sequence[int],
    predicted_gpu_s: Mapping[str, float],
    flexes: Mapping[str, float],
    zone_of: Mapping[NodeId, int],
) -> JobTable:
    """Return jobs as policies see them.

    Args:
        jobs: In the order of the table.
        efficiencies: What each did per joule, by size of its gangs.
        eligible: (n_jobs, n_gpu_models) where each may run.
        control_curves: The row of each kind of job in ``Snapshot.control_curves``.
        speed_curves: For each of those, the row in ``Snapshot.speed_curves``, -1 for none.
        predicted_gpu_s: Lengths that were only just predicted, and are in no row yet.
        flexes: The classes of tenants that have one, percent.
        zone_of: Where nodes are, indices into ``Snapshot.outlooks``; empty if all are in one zone.
    """

    columns = jobs.columns
    gpus, since_s = columns["gpus"], columns["since_s"]
    gpu_power_w = np.where(columns["gpu_s"] < 1, np.nan, columns["gpu_power_w"])
    base, now = _efficiencies(jobs, efficiencies)
    curves = np.full((2, len(jobs)), -1, dtype=np.int64)
    if control_curves:
        curves[0] = [control_curves.get(kind, -1) for kind in columns["kind"]]
        curves[1] = [speed_curves[at] if at >= 0 else -1 for at in curves[0].tolist()]
    attained_gpu_s = columns["attained_gpu_s"] + gpus * np.maximum(now_s - since_s, 0)
    progress = np.minimum(columns["done"] / columns["work"], 1.0)
    lengths_gpu_s = columns["predicted_gpu_s"]
    placements: list[Placement | None] = [None] * len(jobs)
    data_zone = np.full(len(jobs), -1, dtype=np.int64)
    for at in np.flatnonzero(jobs.have("shares")).tolist():
        placements[at] = on = placement_of(jobs[at].shares or ())
        data_zone[at] = zone_of.get(on.shares[0].node_id, -1)
    flex = columns["flex"]
    if flexes:
        of_tenants = [flexes.get(tenant, math.nan) for tenant in columns["tenant_id"].tolist()]
        flex = np.where(np.isnan(flex), of_tenants, flex)
    if predicted_gpu_s:
        lengths_gpu_s = np.array([predicted_gpu_s.get(job.id, job.predicted_gpu_s) for job in jobs], dtype=np.float64)
    return JobTable(
        **{name: columns[name] for name in AS_READ},
        ids=tuple(columns["id"].tolist()),
        tenants=tuple(columns["tenant_id"].tolist()),
        waiting_since_s=since_s,
        phase=phases_of(jobs),
        gpus=gpus,
        eligible=eligible,
        attained_gpu_s=attained_gpu_s,
        gpu_power_w=gpu_power_w,
        efficiency_base=base,
        efficiency_now=now,
        progress=progress,
        remaining_s=remaining_s(lengths_gpu_s, progress, attained_gpu_s, columns["min_gpus"]),
        placements=tuple(placements),
        data_zone=data_zone,
        speed_curve=curves[1],
        flex=flex / 100,
        control_curve=curves[0],
        shareable=columns["may_share_gpu"],
    )


def length_spreads(jobs: JobRows, predictions: Predictions | None) -> dict[JobId, float]:
    """Return ``Snapshot.length_spreads``; ``predictions``: those only just made, which are in no row yet."""
    columns, spread = jobs.columns, np.isfinite(jobs.columns["spread_gpu_s"])
    names = ("id", "predicted_gpu_s", "spread_gpu_s")
    known = [*zip(*(columns[name][spread].tolist() for name in names), strict=True)]
    if predictions:
        new = zip(predictions.job_id, predictions.gpu_s, predictions.spread_gpu_s, predictions.seen, strict=True)
        known += [(job_id, gpu_s, spread_gpu_s) for job_id, gpu_s, spread_gpu_s, seen in new if seen]
    return {JobId(job_id): spread_gpu_s / gpu_s for job_id, gpu_s, spread_gpu_s in known if gpu_s and spread_gpu_s}


def progress_of(job: JobRow, now_s: float) -> tuple[float, float]:
    """Return the share of one job that is done, NaN if unknown, and its GPU seconds so far."""
    done = math.nan if job.done is None or not job.work else min(job.done / job.work, 1.0)
    return done, job.attained_gpu_s + job.gpus * max(now_s - job.since_s, 0.0)


def placement_of(shares: Sequence[StoredShare]) -> Placement:
    """Return where a gang is."""
    return Placement(tuple(NodeShare(NodeId(share["node_id"]), tuple(share["devices"])) for share in shares))


ASKED = "gpu_model", "memory_gib", "zone", "needs_container", "engine", "queue"  #: Of a job
asked_of: Callable[[JobRow], tuple[Any, ...]] = attrgetter(*ASKED)


def eligible_kinds(jobs: JobRows, kinds: Sequence[NodeKind]) -> Bools:
    """Return which kinds of nodes each job may run on: (n_jobs, n_gpu_models)."""
    columns = jobs.columns
    asked = jobs.kinds(*ASKED)
    answers = np.array([[fits(each, kind) for kind in kinds] for each in asked.values], dtype=np.bool_)
    eligible = answers.reshape(len(asked.values), len(kinds))[asked.of]
    # A job that is being cancelled or held claims nothing of what it releases: it will not come back for it.
    # Nor does a service instance that stops: should it come back, it is placed before all jobs.
    eligible[columns["leaves"] | (jobs.have("service") & (columns["state"] != "queued"))] = False
    return eligible


def fits(asked: tuple[Any, ...], kind: NodeKind) -> bool:
    """Return whether a job that asks for this (`ASKED`) may run on nodes of a kind; of its queues, in one of them."""
    gpu_model, memory_gib, zone, needs_container, engine, queue = asked
    return (
        engine == kind.engine
        and (engine == OURS or any(each in kind.queues for each in queue.split(",")))
        and gpu_model in (None, kind.gpu_model)
        and (memory_gib or 0.0) <= kind.memory_gib
        and zone in (None, kind.zone)
        and (kind.containers or not needs_container)
    )


def _efficiencies(jobs: Sequence[JobRow], rows: Sequence[EfficiencyRow]) -> tuple[Floats, Floats]:
    """Return progress per joule with the minimum gang and with the present one, or the last one of a waiting job.

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


def hold_devices(jobs: JobRows) -> Bools:
    """Return which jobs hold devices that policies do not see: a slice, or those of a service instance: (n_jobs,).

    An instance that waits is in the table of jobs, and so is one that is stopping, like any gang on its way out. What a
    job on a slice releases is not for policies.
    """
    on_slice = jobs.have("slice")
    stays = jobs.have("service") & (phases_of(jobs) != Phase.PREEMPTING)
    return (jobs.columns["gpus"] > 0) & (on_slice | stays)


def held_devices(nodes: Sequence[NodeRow], instances: Sequence[JobRow]) -> dict[str, set[int]]:
    there = {node.id: device_indices(node) for node in nodes}
    held: dict[str, set[int]] = {}
    for share in (share for instance in instances for share in instance.shares or ()):
        node_id = share["node_id"]
        if node_id in there:
            held[node_id] = held.get(node_id, set()) | (there[node_id] & set(share["devices"]))
    return held


def held_w(cluster: Cluster, held: Mapping[str, set[int]]) -> float:
    """Return what the held devices draw, by the newest heartbeats, with their share of the host's draw, watts."""
    power_w = 0.0
    for node in cluster.nodes:
        devices = held.get(node.id)
        if devices and is_awake(node):
            power_w += sum(each["power_w"] for each in node.readings if each["index"] in devices)
            power_w += cluster.hosts_w.get(node.id, 0.0) * len(devices) / len(node.devices)
    return power_w


def waiting_instances(
    jobs: JobRows, nodes: Sequence[NodeRow], table: NodeTable, eligible: Bools
) -> tuple[ServiceInstance, ...]:
    """Return the service instances that wait, oldest first.

    Args:
        jobs: Those in the table of jobs.
        nodes: In the order of ``table``.
        table: The nodes as policies see them.
        eligible: (n_jobs, n_gpu_models) where each job may run.
    """
    services = np.flatnonzero(jobs.have("service") & ~jobs.have("slice"))
    waiting = [at for at in services.tolist() if jobs[at].state == "queued"]
    waiting.sort(key=lambda at: (jobs[at].submitted_s, jobs[at].id))
    return tuple(
        ServiceInstance(
            JobId(jobs[at].id),
            jobs[at].min_gpus,
            np.fromiter(
                (meets(node, jobs[at].service) and len(node.devices) >= jobs[at].min_gpus for node in nodes),
                np.bool_,
                len(nodes),
            )
            & table.schedulable
            & eligible[at, table.gpu_model],
        )
        for at in waiting
    )
