"""Workloads whose replicas plans of pools set: how they are, and what changes. Pure.

The count and the note of who set it are written at once, to the version that was read: so a count that is not the noted
one is somebody else's, whenever anything was cut off, and stays.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.contracts.clusters import ClusterPod, WorkloadName, WorkloadOrder, WorkloadReport
from services.engines.kueue.inference import PREFIX, is_ready
from services.engines.kueue.reading import Json

SET, BEFORE = f"{PREFIX}replicas", f"{PREFIX}replicas-before"
"""Annotations of a workload: the count that was set by a plan, and the one that it had before the first."""
COST, FIRST = "controller.kubernetes.io/pod-deletion-cost", "-1000000"
"""By which a Deployment's pods go first that hold no more requests."""
GROUP = "leaderworkerset.sigs.k8s.io/group-index"  #: The label of a pod that says which group of its set it is of


def report_of(
    workload: WorkloadName, found: Json | None, pods: Iterable[Json], scalers: Iterable[Json]
) -> WorkloadReport:
    """Return how a workload is; ``found`` is None if there is none, ``scalers`` are the namespace's autoscalers."""
    if found is None:
        return WorkloadReport(
            kind=workload.kind, name=workload.name, replicas=0, left_alone="There is no such workload."
        )
    return WorkloadReport(
        kind=workload.kind,
        name=workload.name,
        replicas=_replicas(found),
        pods=[_pod(each) for each in pods if _is_there(each)],
        left_alone=_left_alone(workload, found, scalers)[:500],
    )


def change_of(found: Json, order: WorkloadOrder, report: WorkloadReport) -> Json | None:
    """Return the patch by which a workload gets the count that is ordered, or had before; None if nothing changes."""
    notes, count = _notes(found), _replicas(found)
    if order.replicas is None:
        if SET not in notes:
            return None
        before = notes.get(BEFORE, "")
        back = int(before) if before.isdecimal() and not report.left_alone else count
        return _patch(found, back, {SET: None, BEFORE: None})
    if report.left_alone or (count == order.replicas and notes.get(SET) == str(count)):
        return None
    return _patch(found, order.replicas, {SET: str(order.replicas), BEFORE: notes.get(BEFORE, str(count))})


def marks_of(pods: Iterable[Json], leave: Sequence[str]) -> dict[str, str | None]:
    """Return the pods whose mark changes, by name: those that leave get one, others lose ours."""
    found: dict[str, str | None] = {}
    for pod in pods:
        name, is_marked = pod["metadata"]["name"], _notes(pod).get(COST) == FIRST
        if is_marked != (name in leave):
            found[name] = None if is_marked else FIRST
    return found


def _patch(found: Json, replicas: int, notes: Mapping[str, str | None]) -> Json:
    version = found["metadata"]["resourceVersion"]
    return {"metadata": {"resourceVersion": version, "annotations": dict(notes)}, "spec": {"replicas": replicas}}


def _left_alone(workload: WorkloadName, found: Json, scalers: Iterable[Json]) -> str:
    """Return who else sets its replicas; empty if nobody does."""
    for each in scalers:
        target = each["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) == (workload.kind, workload.name):
            return f"The HorizontalPodAutoscaler {each['metadata']['name']} scales it."
    noted, count = _notes(found).get(SET), _replicas(found)
    if noted is not None and noted != str(count):
        return f"Somebody else set {count} replicas. Plans do again once its annotation {SET} is taken away."
    return "It is being deleted." if found["metadata"].get("deletionTimestamp") else ""


def _replicas(found: Json) -> int:
    replicas = (found.get("spec") or {}).get("replicas")
    return 1 if replicas is None else replicas


def _notes(found: Json) -> Mapping[str, str]:
    return found["metadata"].get("annotations") or {}


def _is_there(pod: Json) -> bool:
    return not pod["metadata"].get("deletionTimestamp") and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _pod(pod: Json) -> ClusterPod:
    meta, status = pod["metadata"], pod["status"]
    group = (meta.get("labels") or {}).get(GROUP, "")
    conditions: list[dict[str, Any]] = status.get("conditions") or []
    said = [each.get("message", "") for each in conditions if each.get("reason") == "Unschedulable"]
    return ClusterPod(
        uid=meta["uid"],
        name=meta["name"],
        address=status.get("podIP") or None,
        ready=is_ready(pod),
        ordinal=int(group) if group.isdecimal() else 0,
        unschedulable=(said[0] or "Unschedulable")[:500] if said else "",
    )
