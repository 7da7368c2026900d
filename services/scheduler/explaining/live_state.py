"""The live state for the what-if service: the queue, the gangs that hold GPUs, the nodes and the forecast.

What is not known about a job is assumed, and the notes say for how many. The engine has one grid: for a cluster in
several zones, that of the zone with the most GPUs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.contracts.jobs import Share
from services.contracts.live import (
    EarlierRequest,
    LiveJob,
    LiveKind,
    LiveNode,
    LiveProfile,
    LiveRates,
    LiveSlice,
    LiveState,
    LiveWindow,
)
from services.core.cycle.snapshot import PREEMPTING, Phase, Snapshot, Trigger
from services.core.domain.arrays import Bools
from services.core.domain.counted import counted
from services.core.domain.ids import JobId, NodeId
from services.core.domain.mig import FIRST_SLICE_INDEX, MEMORY_SLOTS, WHOLE, sevenths_of
from services.core.policies.one_change import Change, Predicted, resubmitted
from services.core.profiles.priors import usual_w
from services.scheduler.planning.cluster import Cluster, takes_work
from services.scheduler.planning.dry_run import DRAFT, Live, LiveView
from services.scheduler.planning.job_table import eligible_kinds, hold_devices, phase_of, progress_of
from services.scheduler.planning.lengths import LEAST_PROGRESS
from services.scheduler.planning.slices import CutGpus, cut_gpus
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.snapshots import JobRow

LengthSource = Literal["progress", "prediction", "time_limit", "assumed"]

ASSUMED_GPU_S = 3_600.0  #: Length of a job of which nothing is known, where nothing is known of any job, GPU seconds
LEAST_LEFT = 0.1  #: A job that has run for as long as predicted, or longer, is taken to need this share of it still
POWER_STEP_W = 5.0  #: Measured powers are rounded to this, so that jobs share profiles


@dataclass
class Profiles:
    """The profiles needed so far, each once."""

    snapshot: Snapshot
    found: list[LiveProfile] = field(default_factory=list[LiveProfile])
    index: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])

    def of(self, job: int) -> int | None:
        """Return the index of a job's profile; None if there is no kind of node that it may run on."""
        jobs = self.snapshot.jobs
        smallest, largest, curve = (int(column[job]) for column in (jobs.min_gpus, jobs.max_gpus, jobs.control_curve))
        return self._index(jobs.eligible[job], smallest, largest, curve, float(jobs.gpu_power_w[job]))

    def on_slice(self, eligible: Bools, sevenths: int, power_w: float) -> int | None:
        """Return the same for a job on a slice, as if it ran on a whole GPU.

        Args:
            eligible: (n_gpu_models,) where it may run.
            power_w: Its mean draw there, NaN if unknown; a whole GPU's is taken to be larger in proportion to its size.
        """
        return self._index(eligible, 1, 1, -1, power_w * WHOLE / sevenths)

    def _index(self, eligible: Bools, smallest: int, largest: int, curve: int, power_w: float) -> int | None:
        kinds: tuple[int, ...] = tuple(np.flatnonzero(eligible).tolist())
        if not kinds:
            return None
        own_w = round(power_w / POWER_STEP_W) * POWER_STEP_W if power_w > POWER_STEP_W else None
        key = (kinds, smallest, largest, curve, own_w)
        if key not in self.index:
            self.index[key] = len(self.found)
            self.found.append(self._made(kinds, smallest, largest, curve, own_w))
        return self.index[key]

    def _made(
        self, kinds: tuple[int, ...], smallest: int, largest: int, curve: int, own_w: float | None
    ) -> LiveProfile:
        doublings = [1 << at for at in range(largest.bit_length())]
        sizes = np.array(sorted({smallest, largest, *doublings}), dtype=np.int64)
        rates: dict[int, LiveRates] = {}
        for kind in kinds:
            table = self.snapshot.gangs[curve].get(kind) if 0 <= curve < len(self.snapshot.gangs) else None
            if table is not None:
                speed, power_w = table.at(sizes)
                reference = float(table.at(np.array([smallest]))[0][0, -1])
                rates[kind] = LiveRates(
                    speed=(speed[:, -1] / reference).tolist(), power_w=(power_w[:, -1] / sizes).tolist()
                )
            else:
                typical_w = usual_w(self.snapshot.gpu_models[kind])
                rates[kind] = LiveRates(speed=(sizes / smallest).tolist(), power_w=[own_w or typical_w] * sizes.size)
        return LiveProfile(gpus=sizes.tolist(), rates=rates)


def live_state(view: LiveView, live: Live, time_limits_s: Mapping[str, float], queued: int) -> LiveState:
    """Return the state at one moment; this is slow with many jobs, so call it in a thread.

    Args:
        time_limits_s: Of the jobs that have one.
        queued: How many jobs are queued, including those that are in no row because they must not start yet.
    """
    snapshot, cluster = view.snapshot(live, Trigger.PASSIVE), view.cluster(live)
    rows = {row.id: row for row in live.rows.jobs}
    nodes, served = _nodes(JobRows.of(live.rows.jobs), snapshot)
    profiles, jobs, notes = Profiles(snapshot), list[LiveJob](), list[str]()
    mean_gpu_s = mean_length(rows.values())
    on_slices, slices = live_slices(live, cluster, snapshot, nodes, served, profiles, time_limits_s, mean_gpu_s)
    nowhere = len(on_slices) - sum(job is not None for job in on_slices)
    jobs += [job for job in on_slices if job is not None]
    for at, job_id in enumerate(snapshot.jobs.ids):
        row = rows[job_id]
        if row.service is not None or row.slice is not None or row.leaves:
            continue
        profile = profiles.of(at)
        if profile is None:
            nowhere += 1
            continue
        jobs.append(_job(snapshot, at, row, profile, time_limits_s.get(job_id), mean_gpu_s, served))
    zone, place = _zone(snapshot), {node_id: at for (node_id, _), (at, _) in served.items()}
    outlook, settings, state = snapshot.outlooks[zone], view.settings, live.rows.state
    if jobs_on_slices := sum(job.sevenths is not None for job in jobs):
        notes.append(f"Slices: {jobs_on_slices} of the jobs ask for one; a power not measured is its share of a GPU's.")
    if assumed := sum(job.length_from == "assumed" for job in jobs):
        of = f"the mean of those that are, {mean_gpu_s:.0f} GPU seconds" if mean_gpu_s else "one GPU hour each"
        notes.append(f"The lengths of {assumed} of {counted(len(jobs), 'job')} are unknown: {of} is assumed.")
    if nowhere:
        notes.append(f"Left out: {counted(nowhere, 'job')}, as no node has the GPUs that they ask for.")
    if (withheld := queued - sum(row.state == "queued" for row in live.rows.jobs)) > 0:
        notes.append(
            f"Left out: {counted(withheld, 'job')} waiting for other things than GPUs, such as other jobs or a budget."
        )
    if len(snapshot.outlooks) > 1:
        notes.append(f"The cluster spans {len(snapshot.outlooks)} zones; all nodes are taken to be in {outlook.zone}.")
    if outlook.stale:
        notes.append(f"The forecast of {outlook.zone} is stale.")
    return LiveState(
        at_s=snapshot.now_s,
        next_active_s=max(snapshot.next_active_s, snapshot.now_s),
        round_interval_s=settings.round_interval_s,
        policy=state.policy,
        parameters=state.parameters,
        zone=outlook.zone,
        signal=outlook.signal,
        stale=outlook.stale,
        times_s=outlook.curve.times_s.tolist(),
        intensity_gco2_per_kwh=outlook.curve.intensity_gco2_per_kwh.tolist(),
        end_s=outlook.curve.end_s,
        kinds=[
            LiveKind(gpu_model=name, idle_w=float(idle_w))
            for name, idle_w in zip(snapshot.gpu_models, snapshot.idle_w.tolist(), strict=True)
        ],
        nodes=nodes,
        levels=list(snapshot.levels),
        windows=[
            LiveWindow(
                id=each.id,
                start_s=each.start_s,
                end_s=each.end_s,
                gpus={place[node_id]: gpus for node_id, gpus in each.gpus.items() if node_id in place},
                holder=each.holder,
            )
            for each in snapshot.windows
        ],
        tenant_gpu_quota=snapshot.tenant_gpu_quota,
        tenant_guarantees=dict(snapshot.tenant_guarantees),
        slices=slices,
        profiles=profiles.found,
        jobs=jobs,
        notes=notes,
    )


def in_its_place(
    state: LiveState,
    snapshot: Snapshot,
    row: JobRow,
    tried: Sequence[Change],
    predicted: Predicted,
    time_limit_s: float | None,
    mean_gpu_s: float | None,
) -> EarlierRequest:
    """Return the state, with what each change would make of a job in it that waits, submitted now as ``DRAFT``."""
    profiles, at = Profiles(snapshot, [*state.profiles]), snapshot.jobs.index[JobId(row.id)]
    instead = list[LiveJob | None]()
    for change in tried:
        profiles.snapshot = made = resubmitted(snapshot, at, change, predicted, DRAFT)
        profile, jobs = profiles.of(at), made.jobs
        there = predicted if change.elsewhere is None else change.elsewhere.predicted
        asked = row._replace(
            id=DRAFT,
            submitted_s=made.now_s,
            asked_gpus=int(jobs.asked_gpus[at]),
            preemptible=bool(jobs.preemptible[at]),
            deadline_s=float(jobs.deadline_s[at]),
            predicted_gpu_s=None if math.isnan(there.gpu_s) else there.gpu_s,
        )
        job = None if profile is None else _job(made, at, asked, profile, time_limit_s, mean_gpu_s, {})
        instead.append(job)
    state = state.model_copy(update={"profiles": profiles.found})
    return EarlierRequest(state=state, job_id=row.id, instead=instead)


def _nodes(rows: JobRows, snapshot: Snapshot) -> tuple[list[LiveNode], dict[tuple[str, int], tuple[int, int]]]:
    """Return the nodes and, for each device that jobs may have, its node's index and its own place there."""
    services = {
        (share["node_id"], device)
        for row in rows.where(hold_devices(rows))
        for share in row.shares or ()
        for device in share["devices"]
    }
    held: dict[NodeId, set[int]] = {}
    for placement in snapshot.jobs.placements:
        for share in () if placement is None else placement.shares:
            held.setdefault(share.node_id, set()).update(share.devices)
    made: list[LiveNode] = []
    served: dict[tuple[str, int], tuple[int, int]] = {}
    table = snapshot.nodes
    for at, node_id in enumerate(table.ids):
        devices = held.get(node_id, set()).union(table.free_devices[at])
        mine = [each for device in sorted(devices) if (each := (str(node_id), device)) not in services]
        if not mine:
            continue
        served |= {device: (len(made), place) for place, device in enumerate(mine)}
        made.append(_node(snapshot, at, len(mine), takes_work=bool(table.schedulable[at])))
    return made, served


def _node(snapshot: Snapshot, at: int, gpus: int, *, takes_work: bool) -> LiveNode:
    domains: list[int] = snapshot.nodes.domains[at].tolist() if snapshot.levels else []
    return LiveNode(kind=int(snapshot.nodes.gpu_model[at]), gpus=gpus, takes_work=takes_work, domains=domains)


def _job(
    snapshot: Snapshot,
    at: int,
    row: JobRow,
    profile: int,
    time_limit_s: float | None,
    mean_gpu_s: float | None,
    served: Mapping[tuple[str, int], tuple[int, int]],
) -> LiveJob:
    jobs = snapshot.jobs
    smallest, attained = int(jobs.min_gpus[at]), float(jobs.attained_gpu_s[at])
    left_gpu_s, source = _left(row, float(jobs.progress[at]), attained, smallest, time_limit_s, mean_gpu_s)
    placement = jobs.placements[at] if jobs.phase[at] != PREEMPTING else None
    gang: list[Share] | None = None
    if placement is not None:
        by_node: dict[int, list[int]] = {}
        for share in placement.shares:
            for device in share.devices:
                found = served.get((str(share.node_id), device))
                if found is not None:  # its node is lost, and the gang with it
                    by_node.setdefault(found[0], []).append(found[1])
        gang = [Share(node_id=str(node), devices=devices) for node, devices in by_node.items()]
        if sum(len(share.devices) for share in gang) < placement.gpus:
            gang = None
    return _live_job(
        row,
        left_gpu_s,
        attained,
        profile=profile,
        since_s=float(jobs.waiting_since_s[at]),
        gpus=(smallest, int(jobs.max_gpus[at]), int(jobs.step_gpus[at])),
        length_from=source,
        gang=gang,
        within=snapshot.within.get(jobs.ids[at]),
        near=snapshot.near.get(jobs.ids[at]),
    )


def _live_job(row: JobRow, left_gpu_s: float, attained: float, *, gpus: tuple[int, int, int], **fields: Any) -> LiveJob:
    """Return a job; ``gpus``: its smallest and largest gang, and the step between sizes."""
    smallest, largest, step = gpus
    return LiveJob(
        id=row.id,
        tenant=row.tenant_id,
        may_share_gpu=row.may_share_gpu,
        submitted_s=row.submitted_s,
        min_gpus=smallest,
        max_gpus=largest,
        step_gpus=step,
        asked_gpus=row.asked_gpus,
        priority=row.priority,
        preemptible=row.preemptible,
        deadline_s=None if row.deadline_s == float("inf") else row.deadline_s,
        work_s=(attained + left_gpu_s) / smallest,
        progress=attained / (attained + left_gpu_s),
        attained_gpu_s=attained,
        energy_j=row.energy_j,
        carbon_gco2=row.carbon_gco2,
        **fields,
    )


def live_slices(
    live: Live,
    cluster: Cluster,
    snapshot: Snapshot,
    nodes: list[LiveNode],
    served: Mapping[tuple[str, int], tuple[int, int]],
    profiles: Profiles,
    time_limits_s: Mapping[str, float],
    mean_gpu_s: float | None,
) -> tuple[list[LiveJob | None], list[LiveSlice]]:
    """Return the jobs that hold or wait for slices, None for each that can run nowhere, and the slices.

    Nodes whose GPUs are all cut are added to ``nodes``; the other arguments are those of ``live_state`` and what it
    has found so far.
    """
    all_rows = JobRows.of(live.rows.jobs)
    rows = all_rows.where(all_rows.have("slice"))
    cut = cut_gpus(cluster)
    if not rows and not cut.units:
        return [], []
    found, at_device = _slices(rows, cluster, cut, snapshot, nodes, served)
    eligible, now_s = eligible_kinds(rows, cluster.kinds), snapshot.now_s
    jobs: list[LiveJob | None] = []
    for at, row in enumerate(rows):
        if row.service is not None or row.leaves:
            continue
        sevenths = sevenths_of(row.slice or "")
        power_w = row.gpu_power_w if row.gpu_power_w is not None and row.gpu_s >= 1 else math.nan
        profile = profiles.on_slice(eligible[at], sevenths, power_w)
        if profile is None:
            jobs.append(None)
            continue
        progress, attained = progress_of(row, now_s)
        left_gpu_s, source = _left(row, progress, attained, 1, time_limits_s.get(row.id), mean_gpu_s)
        share = row.shares[0] if row.shares and phase_of(row) is not Phase.PREEMPTING else None
        jobs.append(
            _live_job(
                row,
                left_gpu_s,
                attained,
                profile=profile,
                since_s=row.since_s,
                gpus=(1, 1, 1),
                length_from=source,
                gang=None,
                sevenths=sevenths,
                memory_gib=row.memory_gib,
                on_slice=None if share is None else at_device.get((share["node_id"], share["devices"][0])),
            )
        )
    return jobs, found


def _slices(
    rows: Sequence[JobRow],
    cluster: Cluster,
    cut: CutGpus,
    snapshot: Snapshot,
    nodes: list[LiveNode],
    served: Mapping[tuple[str, int], tuple[int, int]],
) -> tuple[list[LiveSlice], dict[tuple[str, int], int]]:
    """Return the slices that jobs may have, and the index of each by its node's id and its number there."""
    of_services = {
        (share["node_id"], share["devices"][0]) for row in rows if row.service is not None for share in row.shares or ()
    }
    place = {node_id: at for (node_id, _), (at, _) in served.items()}
    gpus: dict[tuple[str, int], int] = {}
    found: list[LiveSlice] = []
    at_device: dict[tuple[str, int], int] = {}
    for unit, owner, memory_gib in zip(cut.units, cut.owners, cut.memory_gib, strict=True):
        node_id = str(snapshot.nodes.ids[unit.node])
        start = (unit.device - FIRST_SLICE_INDEX) % MEMORY_SLOTS
        is_gone = snapshot.nodes.asleep[unit.node] or (node_id, unit.device) in of_services
        if owner is not None or is_gone or unit.device < FIRST_SLICE_INDEX:
            continue
        if node_id not in place:
            place[node_id] = len(nodes)
            nodes.append(_node(snapshot, unit.node, 0, takes_work=takes_work(cluster.nodes[unit.node])))
        of_node = sum(other == node_id for other, _ in gpus)
        gpu = gpus.setdefault((node_id, unit.gpu), of_node)
        at_device[node_id, unit.device] = len(found)
        found.append(
            LiveSlice(node=place[node_id], gpu=gpu, sevenths=unit.sevenths, start=start, memory_gib=memory_gib)
        )
    return found, at_device


def _left(
    row: JobRow,
    progress: float,
    attained_gpu_s: float,
    smallest: int,
    time_limit_s: float | None,
    mean_gpu_s: float | None,
) -> tuple[float, LengthSource]:
    """Return what a job still needs, GPU seconds above 0, and how that is known."""
    if progress >= LEAST_PROGRESS and attained_gpu_s > 0:
        left = attained_gpu_s * (1.0 - progress) / progress
        source: LengthSource = "progress"
    elif row.predicted_gpu_s:
        left = max(row.predicted_gpu_s - attained_gpu_s, LEAST_LEFT * row.predicted_gpu_s)
        source = "prediction"
    elif time_limit_s is not None:
        return max(time_limit_s * smallest - attained_gpu_s, LEAST_LEFT * time_limit_s * smallest), "time_limit"
    else:
        whole = mean_gpu_s or ASSUMED_GPU_S
        return max(whole - attained_gpu_s, LEAST_LEFT * whole), "assumed"
    return max(left if time_limit_s is None else min(left, time_limit_s * smallest), 1.0), source


def mean_length(rows: Iterable[JobRow]) -> float | None:
    """Return the mean predicted length of the jobs that have one, GPU seconds."""
    known = [row.predicted_gpu_s for row in rows if row.predicted_gpu_s]
    return sum(known) / len(known) if known else None


def _zone(snapshot: Snapshot) -> int:
    """Return the index of the outlook of the zone with the most GPUs."""
    nodes = snapshot.nodes
    return int(np.argmax(np.bincount(nodes.zone, nodes.gpus, len(snapshot.outlooks)))) if len(nodes) else 0
