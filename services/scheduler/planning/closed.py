"""Nodes that have what a job asks for but take no work: the job's reason for waiting names them."""

from collections import Counter
from collections.abc import Collection, Iterable

from services.core.domain.mig import WHOLE, sevenths_of
from services.core.domain.reasons import Reason
from services.scheduler.planning.cluster import NodeKind, kind_of, meets, takes_work
from services.scheduler.planning.job_table import asked_of, fits
from services.scheduler.repository.snapshots import AwayRow, ClusterRows, JobRow, NodeRow

SHORT = frozenset(
    {Reason.NO_ELIGIBLE_NODE, Reason.NO_SUCH_SLICE, Reason.NOT_ENOUGH_FREE_GPUS, Reason.NOT_ENOUGH_FREE_SLICES}
)
"""Reasons that policies give where nodes that take work may not have what a job asks for."""
_SHOWN = 3


def closed_to(rows: ClusterRows, job_ids: Iterable[str]) -> dict[str, str]:
    """Return, in words, which nodes would have to take work for jobs that have no node, if any would do."""
    if not rows.away or not (wanted := {*job_ids}):
        return {}
    said: dict[tuple[object, ...], str] = {}
    found: dict[str, str] = {}
    for job in rows.jobs:
        if job.id in wanted and not (job.service and job.service.get("fleet")):
            asked = (*asked_of(job), job.slice, job.min_gpus, str(job.service))
            if asked not in said:
                said[asked] = _words(rows, job)
            if said[asked]:
                found[job.id] = said[asked]
    return found


def _words(rows: ClusterRows, job: JobRow) -> str:
    opened = {node.id: _fitting(job, node, rows.unusable) for node in rows.nodes if takes_work(node)}
    taking, closed = Counter[NodeKind](), Counter[NodeKind]()  # a gang is on one kind of node
    for node in rows.nodes:
        taking[kind_of(node)] += opened.get(node.id, 0)
    left = [(node, kind_of(node), _fitting(job, node) - opened.get(node.id, 0)) for node in rows.away if node.devices]
    for _, kind, count in left:
        closed[kind] += count
    if max(taking.values(), default=0) >= job.min_gpus:
        return ""
    away = [node.id for node, kind, count in left if count and taking[kind] + closed[kind] >= job.min_gpus]
    if not away:
        return ""
    why = {node.id: f"{node.id} ({node.why.rstrip('.')})" for node in rows.away}
    shown = ", ".join(why[name] for name in away[:_SHOWN])
    more = f" and {len(away) - _SHOWN} more" if len(away) > _SHOWN else ""
    return f"What it asks for is on nodes that take no work: {shown}{more}."


def _fitting(job: JobRow, node: AwayRow | NodeRow, out: Collection[tuple[str, int]] = ()) -> int:
    """Return how many GPUs, or slices, of a node the job could have; ``out``: GPUs that are out of service."""
    if not (node.devices and meets(node, job.service) and fits(asked_of(job), kind_of(node))):
        return 0
    in_service = [
        device
        for device in node.devices
        if (node.id, device["index"] if device.get("parent") is None else device.get("parent")) not in out
    ]
    if job.slice is None:
        return sum(device.get("parent") is None for device in in_service)
    size, least_gib = sevenths_of(job.slice), job.memory_gib or 0
    slices = [device for device in in_service if device.get("parent") is not None]
    return sum(each.get("sevenths", WHOLE) == size and each["memory_gib"] >= least_gib for each in slices)
