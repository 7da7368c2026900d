"""Moves to cleaner zones that pay for themselves: a running job stops, and comes back where it emits less.

A move pays if what the rest of the work emits less (``cycle.zones``) is more than what the move costs: the checkpoint's
way, the work that a restart loses, and the worth of the time that both take. It is made once the zone is cleaner in the
hour ahead too: until then, a later one pays more.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, Snapshot
from services.core.cycle.zones import Zones
from services.core.domain.arrays import Floats
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.domain.units import J_PER_KWH, S_PER_HOUR
from services.core.policies.joint.config import JointConfig
from services.core.policies.joint.levers import Known


def with_moves(
    snapshot: Snapshot, plan: Plan, known: Known, zones: Zones, config: JointConfig, held: Collection[JobId]
) -> Plan:
    """Return the plan with the stops of jobs that are to move, those first that save most.

    Nobody moves while jobs are stopping, or while one waits for GPUs that the plan takes from others: where they will
    come back is not decided yet. ``held``: the jobs that wait for greener hours, not for GPUs.
    """
    jobs, nodes = snapshot.jobs, snapshot.nodes
    stops = {jobs.index[action.job_id]: action for action in plan.actions if isinstance(action, Preempt)}
    starts = {action.job_id: action.placement for action in plan.actions if isinstance(action, Start)}
    queued = map(jobs.ids.__getitem__, np.flatnonzero(jobs.phase == QUEUED).tolist())
    waits = any(job_id not in held and job_id not in starts for job_id in queued)
    if (jobs.phase == PREEMPTING).any() or (stops and waits):
        return plan
    capacity = Capacity(snapshot)
    free = list(capacity.free)
    for placement in starts.values():
        free[int(nodes.gpu_model[nodes.index[placement.shares[0].node_id]])] -= placement.gpus
    for job, stop in stops.items():
        free[int(capacity.model[job])] -= max(stop.next_gpus - jobs.gpus.item(job), 0)
    pinned = {*snapshot.bound, *(job_id for pair in snapshot.shared for job_id in pair)}
    movable = (jobs.phase == RUNNING) & jobs.preemptible & capacity.movable & np.isfinite(known.left_s)
    gains: list[tuple[float, JobId, int, int]] = []
    for job in np.flatnonzero(movable).tolist():
        if job not in stops and jobs.ids[job] not in pinned:
            saved_g = _saved_g(snapshot, known, zones, config, job).tolist()
            gains += [(-each, jobs.ids[job], job, to) for to, each in enumerate(saved_g) if each > 0]
    moves: dict[int, Preempt] = {}
    for _, job_id, job, to in sorted(gains):
        gpus = jobs.gpus.item(job)
        if job not in moves and free[to] >= gpus:
            free[to] -= gpus
            moves[job] = Preempt(job_id, Reason.GREENER_ZONE, gpus)
    return replace(plan, actions=(*moves.values(), *plan.actions)) if moves else plan


def _saved_g(snapshot: Snapshot, known: Known, zones: Zones, config: JointConfig, job: int) -> Floats:
    """Return what a running job saves by moving to each kind of node: (n_gpu_models,) gCO2, -inf where it may not."""
    jobs, here, modes = snapshot.jobs, known.models.item(job), known.modes
    column = modes.column_of(jobs.gpus).item(job)
    speed, draw_w = modes.ratio.item(job, column) * known.slower.item(job), modes.watts.item(job, column)
    grams = zones.grams(job, known.left_s.item(job) / speed, draw_w)
    hour = zones.intensity(1)[zones.zone]
    again_g = hour * draw_w * config.restart_s / J_PER_KWH
    lost_h = (config.restart_s + snapshot.transfer.seconds) / S_PER_HOUR
    worth_g = known.worth.hour_g(np.array([job])).item() * config.lost_times * lost_h
    name = snapshot.gpu_models[here]
    may = jobs.eligible[job] & (hour < hour[here]) & [each == name for each in snapshot.gpu_models]
    return np.where(may, grams[here] - grams - again_g - worth_g, -np.inf)
