"""Service instances in a snapshot: those that hold devices are in no table, those that wait are placed before all.

Jobs that hold slices are in no table either.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from services.core.cycle.snapshot import NodeTable, Phase, ServiceInstance
from services.core.domain.arrays import Bools
from services.core.domain.ids import JobId
from services.scheduler.planning.cluster import Cluster, device_indices, is_awake
from services.scheduler.planning.job_table import phases_of
from services.scheduler.repository.kept_jobs import JobRows
from services.scheduler.repository.snapshots import JobRow, NodeRow


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
            np.fromiter((_allows(jobs[at], node) for node in nodes), np.bool_, len(nodes))
            & table.schedulable
            & eligible[at, table.gpu_model],
        )
        for at in waiting
    )


def _allows(instance: JobRow, node: NodeRow) -> bool:
    terms = instance.service or {}
    zone, labels = terms.get("zone"), terms.get("node_labels", {})
    return (
        (zone is None or node.zone == zone)
        and labels.items() <= node.labels.items()
        and len(node.devices) >= instance.min_gpus
    )
