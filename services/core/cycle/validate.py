"""The checks that every plan must pass.

A plan that fails one is never applied. The scheduler checks again at commit, against the cluster at that moment. There
a failure is routine (the plan is stale); here it is a bug in a policy.
"""

import math
from collections.abc import Mapping
from itertools import repeat
from typing import NoReturn

import numpy as np

from services.core.cycle.bound import check_bound
from services.core.cycle.levels import check_within
from services.core.cycle.plan import Control, Hold, Plan, PowerNode, Preempt, ProfileControls, Start
from services.core.cycle.sharing import check_sharing
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, Phase, SliceJob, Snapshot
from services.core.domain.controls import ControlKind
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId

HOLDING = {QUEUED: False, STARTING: True, RUNNING: True, PREEMPTING: False}


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Raise unless the plan can be carried out on the cluster the snapshot shows.

    Checked: the snapshot's version; that each job has at most one action, plus one for each kind of control,
    that the job is known and its phase allows the action (controls are set only for a gang that continues or starts, on
    devices that take them); that devices exist, are free, on a schedulable node, and given once, except to a gang that
    shares the one device of another that runs on, which both must permit; that gangs are whole, of a size on the job's
    grid and on one GPU model the job may use, with a batch that its user permits; tenant quotas, counting what is held
    now; that nodes may be powered down or up, and down only where nothing runs or starts; that a service instance
    starts on one node where it may run, and a job on a slice on one free slice of its size; that a job starts
    on the nodes that alone have its checkpoint; that a gang which must lie within one domain does.

    Raises:
        PlanError: the first check that fails, naming the job.
    """
    if plan.snapshot_version != snapshot.version:
        raise PlanError(f"the plan is for snapshot {plan.snapshot_version}, not {snapshot.version}")
    index = snapshot.jobs.index
    held = [action.job_id for action in plan.actions if isinstance(action, Hold)]  # mostly all of a hundred thousand
    changed: list[Start | Preempt] = []
    controls: list[Control] = []
    if len(held) < len(plan.actions):
        for action in (each for each in plan.actions if not isinstance(each, Hold)):
            if isinstance(action, (Start, Preempt)):
                changed.append(action)
            else:
                controls.append(action)
    named = [*held, *(action.job_id for action in changed)]
    rows = np.fromiter(map(index.get, named, repeat(-1)), np.int64, len(named))
    if rows.size and (rows.min() < 0 or np.bincount(rows).max() > 1):
        _refuse_names(named, index)
    phase = snapshot.jobs.phase
    waits = phase[rows[: len(held)]] == QUEUED
    if not waits.all():
        job_id = held[int(waits.argmin())]
        raise PlanError(f"job {job_id} cannot be held: it is {_phase_name(phase[index[job_id]])}, not queued")
    starts: list[Start] = []
    for action in changed:
        job = index[action.job_id]
        if isinstance(action, Start):
            if phase[job] != QUEUED:
                raise PlanError(f"job {action.job_id} cannot start: it is {_phase_name(phase[job])}")
            _check_size(snapshot, job, action.gpus)
            if action.batch_size is not None:
                _check_batch(snapshot, job, action.batch_size)
            starts.append(action)
        else:
            _check_preempt(snapshot, job, action)
    if starts:
        on_slices = {each.job_id: each for each in snapshot.slice_jobs}
        _check_devices(
            snapshot, index, [start for start in starts if not start.shares and start.job_id not in on_slices]
        )
        if sharing := [start for start in starts if start.shares]:
            check_sharing(snapshot, sharing, {action.job_id for action in changed if isinstance(action, Preempt)})
        _check_quotas(snapshot, index, starts)
        if snapshot.bound:
            check_bound(snapshot, starts)
        if snapshot.within:
            check_within(snapshot, starts)
        if on_slices:
            _check_slices(snapshot, on_slices, starts)
        if snapshot.services:
            _check_services(snapshot, starts)
    if controls:
        _check_controls(snapshot, index, controls, changed)
    if plan.nodes:
        _check_nodes(snapshot, plan.nodes, starts)


def _phase_name(code: np.int64) -> str:
    return Phase(int(code)).name.lower()


def _refuse_names(named: list[JobId], index: Mapping[JobId, int]) -> NoReturn:
    seen: set[JobId] = set()
    for job_id in named:
        if job_id not in index:
            raise PlanError(f"job {job_id} is not in the snapshot")
        if job_id in seen:
            raise PlanError(f"job {job_id} has more than one action")
        seen.add(job_id)
    raise AssertionError("unreachable: every name is known and unique")


def _check_size(snapshot: Snapshot, job: int, gpus: int) -> None:
    jobs = snapshot.jobs
    low, high, step = jobs.min_gpus.item(job), jobs.max_gpus.item(job), jobs.step_gpus.item(job)
    if not low <= gpus <= high or (gpus - low) % step:
        raise PlanError(f"job {jobs.ids[job]} cannot have {gpus} GPUs: {low} to {high} in steps of {step}")


def _check_batch(snapshot: Snapshot, job: int, batch_size: int) -> None:
    jobs = snapshot.jobs
    low, high = jobs.batch_min.item(job), jobs.batch_max.item(job)
    if low < 0:
        raise PlanError(f"job {jobs.ids[job]} cannot have a batch of {batch_size}: its batch is the user's")
    if not low <= batch_size <= high:
        raise PlanError(f"job {jobs.ids[job]} cannot have a batch of {batch_size}: {low} to {high} samples")


def _check_preempt(snapshot: Snapshot, job: int, action: Preempt) -> None:
    jobs = snapshot.jobs
    if not HOLDING[jobs.phase[job]]:
        raise PlanError(f"job {action.job_id} cannot be preempted: it is {_phase_name(jobs.phase[job])}")
    if not jobs.preemptible[job]:
        raise PlanError(f"job {action.job_id} may not be preempted")
    _check_size(snapshot, job, action.next_gpus)


def _check_devices(snapshot: Snapshot, index: Mapping[JobId, int], starts: list[Start]) -> None:
    nodes, jobs = snapshot.nodes, snapshot.jobs
    where = nodes.index
    taken: set[tuple[int, int]] = set()
    for start in starts:
        job = index[start.job_id]
        models: set[int] = set()
        shares = start.placement.shares
        if len(shares) > 1 and len({share.node_id for share in shares}) != len(shares):
            raise PlanError(f"job {start.job_id} names a node twice")
        for share in shares:
            if not share.devices:
                raise PlanError(f"job {start.job_id} names a node without devices")
            node = where.get(share.node_id)
            if node is None:
                raise PlanError(f"job {start.job_id} cannot start on {share.node_id}: there is no such node")
            if not nodes.schedulable[node]:
                raise PlanError(f"job {start.job_id} cannot start on {share.node_id}: it is drained")
            models.add(int(nodes.gpu_model[node]))
            free = nodes.free_devices[node]
            for device in share.devices:
                if device not in free:
                    raise PlanError(f"device {device} of {share.node_id} is not free for job {start.job_id}")
                if (node, device) in taken:
                    raise PlanError(f"device {device} of {share.node_id} is given twice, also to job {start.job_id}")
                taken.add((node, device))
        if len(models) != 1:
            raise PlanError(f"job {start.job_id} spans GPU models")
        if not jobs.eligible[job, models.pop()]:
            raise PlanError(f"job {start.job_id} may not use the GPU model it is placed on")


def _check_quotas(snapshot: Snapshot, index: Mapping[JobId, int], starts: list[Start]) -> None:
    quotas = snapshot.tenant_gpu_quota
    if not quotas:
        return
    jobs = snapshot.jobs
    held = jobs.gpus_by_tenant()
    for start in starts:
        tenant = jobs.tenants[index[start.job_id]]
        held[tenant] = held.get(tenant, 0) + start.gpus
        if tenant in quotas and held[tenant] > quotas[tenant]:
            raise PlanError(f"tenant {tenant} would hold {held[tenant]} GPUs of its {quotas[tenant]}")


def _check_slices(snapshot: Snapshot, on_slices: Mapping[JobId, SliceJob], starts: list[Start]) -> None:
    ids, units = snapshot.nodes.ids, snapshot.slice_units
    where = {(ids[unit.node], unit.device): at for at, unit in enumerate(units)}
    taken: set[int] = set()
    for start in starts:
        job = on_slices.get(start.job_id)
        if job is None:
            continue
        if start.shares:
            raise PlanError(f"job {start.job_id} may not share a slice")
        share = start.placement.shares[0]  # of one device: its size was checked
        at = where.get((share.node_id, share.devices[0]))
        if at is None or not job.units[at]:
            raise PlanError(f"job {start.job_id} may not run on device {share.devices[0]} of {share.node_id}")
        if not units[at].free or at in taken:
            raise PlanError(f"slice {share.devices[0]} of {share.node_id} is not free for job {start.job_id}")
        taken.add(at)


def _check_services(snapshot: Snapshot, starts: list[Start]) -> None:
    where, services = snapshot.nodes.index, {service.job_id: service for service in snapshot.services}
    for start in starts:
        service = services.get(start.job_id)
        if service is None:
            continue
        if start.shares:
            raise PlanError(f"service {start.job_id} may not share a device")
        if len(start.placement.shares) != 1 or start.gpus != service.gpus:
            raise PlanError(f"service {start.job_id} needs its {service.gpus} GPUs on one node")
        node_id = start.placement.shares[0].node_id
        if not service.nodes[where[node_id]]:
            raise PlanError(f"service {start.job_id} may not run on {node_id}")


def _check_controls(
    snapshot: Snapshot, index: Mapping[JobId, int], controls: list[Control], changed: list[Start | Preempt]
) -> None:
    jobs, nodes = snapshot.jobs, snapshot.nodes
    stopped = {action.job_id for action in changed if isinstance(action, Preempt)}
    started = {action.job_id: action.placement for action in changed if isinstance(action, Start)}
    seen: set[tuple[JobId, ControlKind]] = set()
    for action in controls:
        job_id, name = action.job_id, action.kind.value.replace("_", " ")
        job = index.get(job_id)
        if job is None:
            raise PlanError(f"job {job_id} is not in the snapshot")
        placement = started.get(job_id) or jobs.placements[job]
        if placement is None or job_id in stopped or not (job_id in started or HOLDING[jobs.phase[job]]):
            raise PlanError(f"job {job_id} cannot have its {name} set: it neither runs on nor starts")
        if (job_id, action.kind) in seen:
            raise PlanError(f"job {job_id} has its {name} set twice")
        seen.add((job_id, action.kind))
        amount = action.window_s if isinstance(action, ProfileControls) else action.value
        if amount is not None and not 0 < amount < math.inf:
            raise PlanError(f"job {job_id} cannot have a {name} or window of {amount}")
        on = {
            nodes.gpu_model.item(nodes.index[at]) for share in placement.shares if (at := share.node_id) in nodes.index
        }
        if isinstance(action, ProfileControls) and not snapshot.measures:
            raise PlanError(f"job {job_id} cannot have its {name} measured: this cluster measures none")
        if not all(snapshot.takes(model, action.kind) for model in on):
            raise PlanError(f"job {job_id} cannot have its {name} set: its GPUs do not take one")


def _check_nodes(snapshot: Snapshot, actions: tuple[PowerNode, ...], starts: list[Start]) -> None:
    nodes = snapshot.nodes
    where = nodes.index
    used = {share.node_id for start in starts for share in start.placement.shares}
    if len({action.node_id for action in actions}) != len(actions):
        raise PlanError("a node is powered down or up twice")
    for action in actions:
        node = where.get(action.node_id)
        if node is None or not nodes.may_sleep[node]:
            raise PlanError(f"node {action.node_id} cannot be powered down or up")
        if action.on != nodes.asleep[node]:
            raise PlanError(f"node {action.node_id} is {'asleep' if nodes.asleep[node] else 'awake'} already")
        if not action.on and (nodes.free_gpus[node] < nodes.gpus[node] or action.node_id in used):
            raise PlanError(f"node {action.node_id} cannot be powered down: it is in use")
