"""GPUs that are cut or kept for a fleet, in a snapshot: policies see none of them, and jobs on slices see their slices.

While a GPU is being cut, neither it nor its slices can be used: the partition wanted for it (``gpu_partitions``) and
what its node registered (``nodes.devices``) must agree before anything is placed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.contracts.nodes import PartitionState
from services.core.cycle.slices import SliceTable, slice_turn
from services.core.cycle.snapshot import NodeTable, SliceJob, SliceUnit
from services.core.domain.arrays import Bools
from services.core.domain.ids import JobId
from services.core.domain.mig import WHOLE, sevenths_of
from services.scheduler.planning.cluster import Cluster, meets
from services.scheduler.repository.documents import StoredDevice
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.snapshots import JobRow, NodeRow, PartitionRow


@dataclass(frozen=True)
class CutGpus:
    """The GPUs that policies do not see."""

    hidden: dict[str, set[int]]  #: Those GPUs, by node
    units: tuple[SliceUnit, ...]  #: What jobs on slices may run on
    owners: tuple[str | None, ...]  #: (n_units,) the fleet that each is kept for; None for any job
    memory_gib: tuple[float, ...]  #: (n_units,) memory of each


def cut_gpus(cluster: Cluster) -> CutGpus:
    """Return which GPUs are cut, being cut, kept for a fleet or out of service, and the slices that may be used."""
    wanted = {(row.node_id, row.gpu): row for row in cluster.partitions}
    sick = {node_id for node_id, _ in cluster.unusable}
    special = {*cluster.slices, *(row.node_id for row in cluster.partitions), *sick}
    claimed = {(claim.node_id, claim.device) for claim in cluster.claims if claim.node_id in special}
    hidden: dict[str, set[int]] = {}
    units: list[SliceUnit] = []
    owners: list[str | None] = []
    memory_gib: list[float] = []
    for at, node in enumerate(cluster.nodes if special else ()):
        for gpu in node.devices if node.id in special else ():
            if (node.id, gpu["index"]) in cluster.unusable:
                hidden.setdefault(node.id, set()).add(gpu["index"])
                continue
            row = wanted.get((node.id, gpu["index"]))
            if row is None and not gpu.get("mig_enabled"):
                continue
            slices = _slices_of(cluster, node, gpu)
            is_settled = row is None or _is_settled(row, slices, is_cut=gpu.get("mig_enabled", False))
            owner = None if row is None else row.owner
            if is_settled and owner is None and not gpu.get("mig_enabled"):
                continue
            hidden.setdefault(node.id, set()).add(gpu["index"])
            for device in (slices or ([] if gpu.get("mig_enabled") else [gpu])) if is_settled else ():
                is_free = claimed.isdisjoint((node.id, each["index"]) for each in (gpu, device))
                size = device.get("sevenths", WHOLE)
                units.append(SliceUnit(at, device["index"], gpu["index"], size, is_free, device.get("uuid", "")))
                owners.append(owner)
                memory_gib.append(float(device["memory_gib"]))
    return CutGpus(hidden, tuple(units), tuple(owners), tuple(memory_gib))


def _slices_of(cluster: Cluster, node: NodeRow, gpu: StoredDevice) -> list[StoredDevice]:
    found = [each for each in cluster.slices.get(node.id, ()) if each.get("parent") == gpu["index"]]
    return sorted(found, key=lambda each: each["index"])


def _is_settled(row: PartitionRow, slices: Sequence[StoredDevice], *, is_cut: bool) -> bool:
    """Return whether a GPU is cut as wanted, or stays as it is because it could not be cut."""
    if row.state == PartitionState.FAILED:
        return True
    is_so = [each.get("sevenths", WHOLE) for each in slices] == row.sizes and is_cut == bool(row.sizes)
    return row.state == PartitionState.APPLIED and is_so


def without_held(hidden: dict[str, set[int]], jobs: Sequence[JobRow]) -> dict[str, set[int]]:
    """Return hidden GPUs without those that jobs in the table hold: until released, they are those jobs'."""
    if not hidden:
        return hidden
    left = {node: set(gpus) for node, gpus in hidden.items()}
    for share in (share for job in jobs for share in job.shares or ()):
        left.get(share["node_id"], set[int]()).difference_update(share["devices"])
    return {node: gpus for node, gpus in left.items() if gpus}


def waiting_slice_jobs(
    jobs: JobRows, nodes: Sequence[NodeRow], table: NodeTable, eligible: Bools, cut: CutGpus
) -> tuple[SliceJob, ...]:
    """Return the jobs that wait for a slice: service instances first, then by priority, then by age.

    Args:
        jobs: Those in the table of jobs.
        nodes: In the order of ``table``.
        table: The nodes as policies see them, with all their GPUs.
        eligible: (n_jobs, n_gpu_models) where each job may run.
    """
    waiting = [at for at in np.flatnonzero(jobs.have("slice")).tolist() if jobs[at].state == "queued"]
    waiting.sort(key=lambda at: _turn(jobs[at]))
    on_units = _Suitability(nodes, table, cut)
    return tuple(
        SliceJob(JobId(jobs[at].id), sevenths_of(jobs[at].slice or ""), on_units.of(jobs[at], eligible[at]))
        for at in waiting
    )


def _turn(job: JobRow) -> tuple[bool, int, float, str]:
    return slice_turn(
        is_service=job.service is not None, priority=job.priority, submitted_s=job.submitted_s, job_id=job.id
    )


class _Suitability:
    """Which units jobs may run on; jobs that ask for the same thing share one answer."""

    def __init__(self, nodes: Sequence[NodeRow], table: NodeTable, cut: CutGpus) -> None:
        self._nodes = nodes
        self._cut = cut
        on = np.array([unit.node for unit in cut.units], dtype=np.int64)
        self._slices = SliceTable(
            sevenths=np.array([unit.sevenths for unit in cut.units], dtype=np.int64),
            memory_gib=np.array(cut.memory_gib, dtype=np.float64),
            gpu_model=table.gpu_model[on],
            takes_work=(table.schedulable & ~table.asleep)[on],
        )
        self._known: dict[tuple[object, ...], Bools] = {}

    def of(self, job: JobRow, eligible: Bools) -> Bools:
        """Return the units: (n_units,)."""
        fleet = (job.service or {}).get("fleet")
        key = (job.slice, job.memory_gib, eligible.tobytes(), str(job.service))
        if key not in self._known:
            nodes = [self._nodes[unit.node] for unit in self._cut.units]
            allows = [
                owner == fleet and meets(node, job.service) for node, owner in zip(nodes, self._cut.owners, strict=True)
            ]
            suits = self._slices.suits(sevenths_of(job.slice or ""), job.memory_gib or 0.0, eligible)
            self._known[key] = np.array(allows, dtype=np.bool_) & suits
        return self._known[key]
