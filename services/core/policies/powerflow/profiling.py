"""Online profiling: an unknown gang is run at every control value, for four minutes in all.

In the paper this is done for every job, the first time it runs on a number of GPUs (``each_job``); the paper's
simulator charges each job for it once (``first_run``). The default measures one gang of each kind of job, and where
jobs recur the others learn from it. Only gangs that start, or run at the default, are measured, because measuring
requires the default's power. A start for which the limit does not leave that much is not measured (``watts``). While a
gang is measured its values fall, and the limit counts it at the one in force. It keeps its size until it has been
measured.

Source: PowerFlow section 5.2.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from services.core.cycle.plan import Plan, Preempt, ProfileControls, Start
from services.core.cycle.snapshot import RUNNING, STARTING, Snapshot, Trigger
from services.core.domain.controls import ControlKind
from services.core.domain.ids import JobId
from services.core.policies.limits import model_of
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.view import Tables


@dataclass(frozen=True)
class PowerflowMemory:
    """Decisions of the last rounds; entries of ended jobs are dropped at active rounds."""

    targets: Mapping[JobId, int] = field(default_factory=dict[JobId, int])
    """Sizes of the last active round: what a job that was stopped waits for."""
    measured: Mapping[JobId, float] = field(default_factory=dict[JobId, float])
    """Gangs being measured at every control value, and when that will certainly be over, UTC seconds."""
    profiled: Mapping[JobId, tuple[int, ...]] = field(default_factory=dict[JobId, tuple[int, ...]])
    """The sizes at which each job was measured."""
    correction: float = 1.0  #: Ratio of the cluster's measured power to the models'


@dataclass(frozen=True)
class Measurement:
    """A measurement to begin: its action, and the number of GPUs of its gang."""

    action: ProfileControls
    gpus: int


def under_way(snapshot: Snapshot, memory: PowerflowMemory) -> PowerflowMemory:
    """Return the memory without measurements that are over and, in an active round, without jobs that are gone.

    If the snapshot does not say which are under way, they count as over once they certainly are. One that ended early
    with its gang was cut short: the job is still to be measured at that size.
    """
    jobs = snapshot.jobs
    under_measurement = snapshot.measuring
    runs = {job_id for job_id, phase in zip(jobs.ids, jobs.phase.tolist(), strict=True) if phase in (STARTING, RUNNING)}
    measured = {
        job_id: until_s
        for job_id, until_s in memory.measured.items()
        if job_id in runs and (until_s > snapshot.now_s if under_measurement is None else job_id in under_measurement)
    }
    cut = {
        job_id
        for job_id, until_s in memory.measured.items()
        if job_id not in runs and (under_measurement is not None or until_s > snapshot.now_s)
    }
    left = {job_id: sizes[:-1] if job_id in cut else sizes for job_id, sizes in memory.profiled.items()}
    profiled = {job_id: sizes for job_id, sizes in left.items() if sizes}
    if snapshot.trigger is Trigger.ACTIVE:
        live = set(jobs.ids)
        profiled = {job_id: sizes for job_id, sizes in profiled.items() if job_id in live}
    return replace(memory, measured=measured, profiled=profiled)


def to_measure(
    snapshot: Snapshot, plan: Plan, tables: Tables, config: PowerflowConfig, memory: PowerflowMemory
) -> dict[JobId, Measurement]:
    """Return the measurements to begin with this plan, by job; for each kind of job, one at a time."""
    kind = ControlKind(config.control)
    if config.profiling == "never" or not snapshot.measures:
        return {}
    jobs = snapshot.jobs
    busy = {int(jobs.control_curve[jobs.index[job_id]]) for job_id in memory.measured}
    stops = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
    candidates = [(jobs.index[a.job_id], a.placement, True) for a in plan.actions if isinstance(a, Start)]
    for job in np.flatnonzero((jobs.phase == STARTING) | (jobs.phase == RUNNING)).tolist():
        placement = jobs.placements[job]
        if placement is not None and jobs.ids[job] not in stops:
            candidates.append((job, placement, False))
    found: dict[JobId, Measurement] = {}
    for job, placement, starts in candidates:
        job_id, of_kind, gpus = jobs.ids[job], int(jobs.control_curve[job]), placement.gpus
        model = model_of(snapshot, placement)
        if model is None or not snapshot.takes(model, kind) or job_id in memory.measured:
            continue
        known = tables.of(job, model).kind is not None
        if config.profiling == "each_job":
            wanted = starts and gpus not in memory.profiled.get(job_id, ())
        elif config.profiling == "first_run":
            wanted = starts and job_id not in memory.profiled
        else:
            wanted = not known and job_id not in memory.profiled and (of_kind < 0 or of_kind not in busy)
        if wanted and (starts or not known):
            busy.add(of_kind)
            steps = tables.of(job, model).values.size if known else config.profiling_steps
            found[job_id] = Measurement(ProfileControls(job_id, kind, config.profiling_s / steps), gpus)
    return found


def begun(
    snapshot: Snapshot, memory: PowerflowMemory, found: Collection[Measurement], config: PowerflowConfig
) -> PowerflowMemory:
    until_s = snapshot.now_s + config.restart_s + config.profiling_s + config.grace_s
    sizes = {each.action.job_id: each.gpus for each in found}
    profiled = {job_id: (*memory.profiled.get(job_id, ()), gpus) for job_id, gpus in sizes.items()}
    return replace(
        memory, measured={**memory.measured, **dict.fromkeys(sizes, until_s)}, profiled={**memory.profiled, **profiled}
    )
