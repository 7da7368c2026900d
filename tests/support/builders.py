"""Snapshots in a line or two: name what matters to the test, the rest is ordinary.

    snapshot = a_snapshot(jobs=[a_job("a", gpus=2), a_job("b", min_gpus=4)], nodes=[a_node("n0", gpus=4)])

A job with ``gpus`` runs; where it sits is found for it unless ``on`` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.core.cycle.plan import Hold, Plan, Preempt, Start
from services.core.cycle.snapshot import JobTable, NodeTable, Phase, ServiceInstance, Snapshot, Trigger
from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason

NOON_S = 1_700_000_000.0
"""When the tests' snapshots are taken, UTC seconds."""

ZONES = ("GB", "SE", "PL")
"""The zones of the curves, in order."""


@dataclass(frozen=True)
class NodeRow:
    """A node to be; see ``a_node``."""

    name: str
    gpus: int
    model: str
    schedulable: bool
    zone: int = 0


@dataclass(frozen=True)
class JobRow:
    """A job to be; see ``a_job``."""

    name: str
    phase: Phase
    gpus: int
    min_gpus: int
    max_gpus: int
    step_gpus: int
    on: Mapping[str, tuple[int, ...]] | None
    models: tuple[str, ...] | None
    tenant: str = "t"
    preemptible: bool = True
    priority: int = 0
    submitted_s: float = NOON_S - 3600.0
    waiting_since_s: float = NOON_S - 3600.0
    deadline_s: float = float("inf")
    attained_gpu_s: float = 0.0
    energy_j: float = 0.0
    carbon_gco2: float = 0.0
    gpu_power_w: float = float("nan")
    efficiency_base: float = float("nan")
    efficiency_now: float = float("nan")
    progress: float = 0.0
    remaining_s: float = float("nan")
    shareable: bool = False
    memory_gib: float = float("nan")
    asked_gpus: int | None = None


def a_node(name: str = "n0", *, gpus: int = 4, model: str = "A100", schedulable: bool = True, zone: int = 0) -> NodeRow:
    """Return a node; ``schedulable=False`` is a drained one, ``zone`` the place of its grid among the curves."""
    return NodeRow(name, gpus, model, schedulable, zone)


def a_job(
    name: str = "j0",
    *,
    gpus: int = 0,
    phase: Phase | None = None,
    min_gpus: int | None = None,
    max_gpus: int | None = None,
    step_gpus: int = 1,
    on: Mapping[str, tuple[int, ...]] | None = None,
    models: tuple[str, ...] | None = None,
    **columns: object,
) -> JobRow:
    """Return a job: queued, or running where ``gpus`` or ``on`` says that it holds some.

    Args:
        name: Its id.
        gpus: Devices held; the sizes default to exactly these, or to one.
        phase: Where it stands, if not plainly queued or running.
        min_gpus, max_gpus, step_gpus: Sizes of its gang.
        on: Devices it holds by node, if the test cares.
        models: GPU models it may use; all by default.
        columns: Any other column of ``JobTable``, and ``tenant``.
    """
    held = sum(len(devices) for devices in on.values()) if on else gpus
    low = min_gpus if min_gpus is not None else (min(held, max_gpus or held) or 1)
    high = max_gpus if max_gpus is not None else max(low, held)
    if phase is None:
        phase = Phase.RUNNING if held else Phase.QUEUED
    row = JobRow(name, phase, held, low, high, step_gpus, on, models)
    return replace(row, **columns)  # type: ignore[arg-type]


def flat_curve(intensity: float = 300.0, *, start_s: float = NOON_S - 86_400.0, hours: int = 72) -> CarbonCurve:
    """Return a curve of one intensity, gCO2/kWh."""
    return hourly_curve([intensity] * hours, start_s=start_s)


def hourly_curve(intensities: Sequence[float], *, start_s: float = NOON_S - 86_400.0) -> CarbonCurve:
    """Return a curve of hourly intensities, gCO2/kWh, from ``start_s`` on."""
    times = start_s + 3600.0 * np.arange(len(intensities))
    return CarbonCurve(times, np.array(intensities, dtype=np.float64), float(times[-1]) + 3600.0)


def a_snapshot(
    jobs: Sequence[JobRow] = (),
    nodes: Sequence[NodeRow] = (NodeRow("n0", 4, "A100", True),),
    *,
    trigger: Trigger = Trigger.ACTIVE,
    now_s: float = NOON_S,
    curve: CarbonCurve | None = None,
    more_curves: Sequence[CarbonCurve] = (),
    quota: Mapping[str, int] | None = None,
    shared: Sequence[tuple[str, str]] = (),
    version: int = 7,
) -> Snapshot:
    """Return the snapshot of a cluster with these jobs and nodes.

    Args:
        jobs, nodes, trigger, now_s, version: As in the snapshot.
        curve, more_curves: Of zone 0, and of zones 1, 2 and so on.
        quota: GPUs by tenant.
        shared: Pairs of jobs on one device each; the second one says where it sits, and takes no device more.
    """
    models = tuple(dict.fromkeys(node.model for node in nodes))
    seats = _Seats(nodes, frozenset(guest for _, guest in shared))
    placements = [seats.place(job) for job in sorted(jobs, key=lambda job: job.on is None)]
    by_name = {
        job.name: placed for job, placed in zip(sorted(jobs, key=lambda job: job.on is None), placements, strict=True)
    }
    return Snapshot(
        version=version,
        now_s=now_s,
        trigger=trigger,
        gpu_models=models,
        jobs=_job_table(jobs, models, by_name),
        nodes=NodeTable(
            ids=tuple(NodeId(node.name) for node in nodes),
            gpu_model=np.array([models.index(node.model) for node in nodes], dtype=np.int64),
            gpus=np.array([node.gpus for node in nodes], dtype=np.int64),
            schedulable=np.array([node.schedulable for node in nodes], dtype=np.bool_),
            free_devices=tuple(tuple(sorted(seats.free[node.name])) for node in nodes),
            zone=np.array([node.zone for node in nodes], dtype=np.int64),
        ),
        outlooks=tuple(
            CarbonOutlook(ZONES[at], Signal.AVERAGE_LIFECYCLE, each)
            for at, each in enumerate((curve or flat_curve(), *more_curves))
        ),
        tenant_gpu_quota=dict(quota or {}),
        shared=tuple((JobId(one), JobId(other)) for one, other in shared),
    )


@dataclass
class _Seats:
    nodes: Sequence[NodeRow]
    guests: frozenset[str]
    free: dict[str, set[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.free = {node.name: set(range(node.gpus)) for node in self.nodes}

    def place(self, job: JobRow) -> Placement | None:
        if not job.gpus:
            return None
        chosen = dict(job.on) if job.on is not None else self._find(job)
        for name, devices in chosen.items():
            if job.name in self.guests:
                continue
            assert self.free[name] >= set(devices), f"{job.name} sits on devices of {name} that others hold"
            self.free[name] -= set(devices)
        return Placement(tuple(NodeShare(NodeId(name), devices) for name, devices in chosen.items()))

    def _find(self, job: JobRow) -> dict[str, tuple[int, ...]]:
        for model in dict.fromkeys(node.model for node in self.nodes):
            if job.models and model not in job.models:
                continue
            chosen: dict[str, tuple[int, ...]] = {}
            left = job.gpus
            for node in self.nodes:
                devices = tuple(sorted(self.free[node.name]))[:left] if node.model == model else ()
                if devices:
                    chosen[node.name] = devices
                    left -= len(devices)
            if not left:
                return chosen
        raise AssertionError(f"the nodes have no room for {job.name}")


def _job_table(jobs: Sequence[JobRow], models: tuple[str, ...], placements: Mapping[str, Placement | None]) -> JobTable:
    def floats(name: str) -> np.ndarray:
        return np.array([getattr(job, name) for job in jobs], dtype=np.float64)

    def ints(name: str) -> np.ndarray:
        return np.array([getattr(job, name) for job in jobs], dtype=np.int64)

    eligible = [[job.models is None or model in job.models for model in models] for job in jobs]
    return JobTable(
        ids=tuple(JobId(job.name) for job in jobs),
        tenants=tuple(job.tenant for job in jobs),
        submitted_s=floats("submitted_s"),
        waiting_since_s=floats("waiting_since_s"),
        phase=ints("phase"),
        min_gpus=ints("min_gpus"),
        max_gpus=ints("max_gpus"),
        step_gpus=ints("step_gpus"),
        gpus=ints("gpus"),
        eligible=np.array(eligible, dtype=np.bool_).reshape(len(jobs), len(models)),
        preemptible=np.array([job.preemptible for job in jobs], dtype=np.bool_),
        priority=ints("priority"),
        deadline_s=floats("deadline_s"),
        attained_gpu_s=floats("attained_gpu_s"),
        energy_j=floats("energy_j"),
        carbon_gco2=floats("carbon_gco2"),
        gpu_power_w=floats("gpu_power_w"),
        efficiency_base=floats("efficiency_base"),
        efficiency_now=floats("efficiency_now"),
        progress=floats("progress"),
        remaining_s=floats("remaining_s"),
        placements=tuple(placements[job.name] for job in jobs),
        shareable=np.array([job.shareable for job in jobs], dtype=np.bool_),
        memory_gib=floats("memory_gib"),
        asked_gpus=np.array([job.asked_gpus or job.min_gpus for job in jobs], dtype=np.int64),
    )


def by_zone(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot of one GPU model with its nodes told apart by zone; each job's data are where it runs."""
    jobs, nodes, zones = snapshot.jobs, snapshot.nodes, len(snapshot.outlooks)
    at = [-1 if on is None else int(nodes.zone[nodes.index[on.shares[0].node_id]]) for on in jobs.placements]
    return replace(
        snapshot,
        gpu_models=snapshot.gpu_models * zones,
        nodes=replace(nodes, gpu_model=nodes.zone),
        jobs=replace(jobs, eligible=np.repeat(jobs.eligible, zones, axis=1), data_zone=np.array(at, dtype=np.int64)),
    )


def with_services(snapshot: Snapshot, *names: str, only_on: Collection[str] | None = None) -> Snapshot:
    """Return the snapshot with these queued jobs as service instances, in this order.

    Args:
        snapshot: The cluster.
        names: The jobs; each has as many GPUs as its smallest gang.
        only_on: Names of the nodes they may run on; all by default.
    """
    nodes, jobs = snapshot.nodes, snapshot.jobs
    allowed = np.array([only_on is None or node_id in only_on for node_id in nodes.ids], dtype=np.bool_)
    services: list[ServiceInstance] = []
    for name in names:
        job = jobs.index[JobId(name)]
        gpus = int(jobs.min_gpus[job])
        suits = nodes.schedulable & (nodes.gpus >= gpus) & jobs.eligible[job, nodes.gpu_model]
        services.append(ServiceInstance(JobId(name), gpus, allowed & suits))
    return replace(snapshot, services=tuple(services))


def story(plan: Plan) -> dict[str, str]:
    """Return what the plan does with each job, as a phrase a test can compare.

    ``start n0:0,1``, ``hold not_enough_free_gpus``, ``preempt scale_out -> 3``.
    """
    phrases: dict[str, str] = {}
    for action in plan.actions:
        if isinstance(action, Start):
            shares = (f"{share.node_id}:{','.join(map(str, share.devices))}" for share in action.placement.shares)
            phrases[action.job_id] = ("share " if action.shares else "start ") + " ".join(shares)
        elif isinstance(action, Preempt):
            phrases[action.job_id] = f"preempt {action.reason} -> {action.next_gpus}"
        else:
            assert isinstance(action, Hold)
            phrases[action.job_id] = f"hold {action.reason}"
    return phrases


def started(plan: Plan) -> dict[str, int]:
    """Return the size of each gang the plan starts, by job."""
    return {action.job_id: action.gpus for action in plan.actions if isinstance(action, Start)}


def held(plan: Plan) -> dict[str, Reason]:
    """Return why each job waits that the plan holds."""
    return {action.job_id: action.reason for action in plan.actions if isinstance(action, Hold)}
