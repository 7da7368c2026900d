"""Kueue's resources as the bridge needs them. Pure.

Fields are those of the published schemas ``kueue.x-k8s.io/v1beta1`` and ``v1beta2``; a field that is missing, or of the
wrong type, is read as absent, and so is a grid zone that is no valid name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from services.contracts.engines import EngineJobState
from services.contracts.schema import name_or_none
from services.engines.kueue.settings import KueueSettings

Json = dict[str, Any]

DEADLINE, FLEXIBLE, STEER, STOPPABLE, NOTICE = (
    f"wattshift.io/{name}" for name in ("deadline", "flexible-s", "steer", "stoppable", "notice-s")
)
"""What users write on their jobs' pods: by when they are to be done, or for how long they may be delayed; ``off`` for
those that are to be left alone; whether they may be evicted, to start again from a checkpoint, and how long before
that they are told."""

ZONE = "wattshift.io/zone"  #: What operators write on a ResourceFlavor: the grid zone of its nodes
REPLACES = "kueue.x-k8s.io/workload-slice-replacement-for"
"""What Kueue writes on a workload that asks for the new size of an elastic job: ``NAMESPACE/NAME`` of the old one."""

MOST_GPUS, MOST_NODES = 1_024, 16_384
MOST_QUOTA = 65_536  #: GPUs of one flavor in a ClusterQueue; a quota that is to limit nothing has more
LONGEST_S = 1e9  #: The longest time limit that a report has; Kueue's are up to twice as long
_QUANTITY = re.compile(r"(\d+)([kMG]?)")
_FACTORS = {"": 1, "k": 1_000, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload that asks for GPUs.

    Attributes:
        since_s: When it was admitted, or ended; UTC.
        retry_at: When Kueue queues it again after an eviction.
    """

    uid: str
    namespace: str
    name: str
    version: str
    queue: str
    gpus: int
    state: EngineJobState
    active: bool
    reserved: bool  #: Whether its ClusterQueue has reserved quota for it
    cluster_queue: str
    flavors: Mapping[str, int]  #: The number of GPUs that it was given, by flavor
    checks: tuple[Json, ...]  #: All states of admission checks, as Kueue has them
    annotations: Mapping[str, str]
    own_annotations: Mapping[str, str]
    submitted_at: datetime
    since: datetime | None
    time_limit_s: float | None
    detail: str
    priority: int = 0  #: That of its class

    @property
    def key(self) -> str:
        """``NAMESPACE/NAME``."""
        return f"{self.namespace}/{self.name}"

    def check(self, names: Iterable[str]) -> Json | None:
        """Return the state of the first of these checks that the workload has."""
        wanted = set(names)
        return next((each for each in self.checks if each.get("name") in wanted), None)


@dataclass(frozen=True, slots=True)
class Flavored:
    """The quota of one flavor in one ClusterQueue, and the grid zone that its ResourceFlavor names."""

    cluster_queue: str
    flavor: str
    gpus: int
    model: str
    closed: str | None
    zone: str | None = None


@dataclass(frozen=True)
class Queues:
    """The cluster's objects other than workloads."""

    clusters: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """The ClusterQueue of each LocalQueue, by namespace and name."""
    checks: tuple[str, ...] = ()  #: The AdmissionChecks that are ours
    checked: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """The ClusterQueues that have one of them, and which."""
    flavored: tuple[Flavored, ...] = ()  #: Quotas of GPUs


def workload_of(document: Json, resource: str) -> Workload | None:
    """Return a workload; None if it asks for no GPUs, or cannot be read."""
    meta, spec, status = (as_dict(document.get(name)) for name in ("metadata", "spec", "status"))
    gpus = gpus_of(spec, resource)
    try:
        submitted_at = datetime.fromisoformat(meta["creationTimestamp"])
        uid, name, version = str(meta["uid"]), str(meta["name"]), str(meta["resourceVersion"])
    except (KeyError, TypeError, ValueError):
        return None
    if not 1 <= gpus <= 65_536:
        return None
    conditions = conditions_of(status)
    state, since = _state_of(conditions, active=spec.get("active") is not False)
    admission = as_dict(status.get("admission"))
    own = as_dict(meta.get("annotations"))
    limit_s, priority = spec.get("maximumExecutionTimeSeconds"), spec.get("priority")
    return Workload(
        uid=uid,
        namespace=str(meta.get("namespace", "")),
        name=name,
        version=version,
        queue=str(spec.get("queueName") or ""),
        gpus=gpus,
        state=state,
        active=spec.get("active") is not False,
        reserved=is_true(conditions, "QuotaReserved"),
        cluster_queue=str(admission.get("clusterQueue") or ""),
        flavors=_flavors_of(admission, resource),
        checks=tuple(as_dict(each) for each in as_list(status.get("admissionChecks"))),
        annotations=annotations_of(document),
        own_annotations={str(key): str(value) for key, value in own.items()},
        submitted_at=submitted_at,
        since=since,
        time_limit_s=min(float(limit_s), LONGEST_S) if isinstance(limit_s, int) and limit_s > 0 else None,
        detail=str(as_dict(conditions.get("Finished") or conditions.get("Evicted")).get("message") or ""),
        priority=priority if isinstance(priority, int) else 0,
    )


def gpus_of(spec: Json, resource: str) -> int:
    """Return how many GPUs a workload asks for in its spec."""
    sets = map(as_dict, as_list(spec.get("podSets")))
    return sum(_count(each) * _gpus_of(as_dict(each.get("template")), resource) for each in sets)


def pods_of(spec: Json) -> int:
    """Return how many pods a workload has according to its spec."""
    return sum(map(_count, map(as_dict, as_list(spec.get("podSets")))))


def annotations_of(document: Json) -> dict[str, str]:
    """Return the annotations of a workload's pods and its own; its own take precedence."""
    sets = map(as_dict, as_list(as_dict(document.get("spec")).get("podSets")))
    said = [as_dict(as_dict(as_dict(each.get("template")).get("metadata")).get("annotations")) for each in sets]
    own = as_dict(as_dict(document.get("metadata")).get("annotations"))
    return {str(key): str(value) for each in (*said, own) for key, value in each.items()}


def conditions_of(status: Json) -> dict[Any, Json]:
    return {each.get("type"): each for each in map(as_dict, as_list(status.get("conditions")))}


def queues_of(
    cluster_queues: Iterable[Json],
    local_queues: Iterable[Json],
    flavors: Iterable[Json],
    checks: Iterable[Json],
    settings: KueueSettings,
) -> Queues:
    """Return the queues, checks and quotas in Kueue's objects."""
    ours = frozenset(
        name_of(each) for each in checks if as_dict(each.get("spec")).get("controllerName") == settings.controller
    )
    labels, zones = dict[str, Json](), dict[str, str | None]()
    for each in flavors:
        labels[name_of(each)] = as_dict(as_dict(each.get("spec")).get("nodeLabels"))
        zones[name_of(each)] = name_or_none(as_dict(as_dict(each.get("metadata")).get("annotations")).get(ZONE))
    checked: dict[str, frozenset[str]] = {}
    flavored: list[Flavored] = []
    for each in cluster_queues:
        spec, name = as_dict(each.get("spec")), name_of(each)
        strategy = as_list(as_dict(spec.get("admissionChecksStrategy")).get("admissionChecks"))
        wanted = {str(as_dict(rule).get("name")) for rule in strategy} | set(
            map(str, as_list(spec.get("admissionChecks")))
        )
        if wanted & ours:
            checked[name] = ours & wanted
        stopped = str(spec.get("stopPolicy") or "None")
        closed = None if stopped == "None" else f"Its queue is stopped ({stopped})."
        for flavor, gpus in _quotas(spec, settings.resource):
            label = str(labels.get(flavor, {}).get(settings.model_label) or flavor)
            model = settings.gpu_models.get(flavor) or settings.gpu_models.get(label) or label
            flavored.append(Flavored(name, flavor, gpus, model[:63], closed, zones.get(flavor)))
    clusters = {
        (str(as_dict(each.get("metadata")).get("namespace")), name_of(each)): str(
            as_dict(each["spec"]).get("clusterQueue")
        )
        for each in local_queues
        if each.get("spec")
    }
    return Queues(clusters, tuple(sorted(ours)), checked, tuple(flavored))


def _state_of(conditions: Mapping[Any, Json], *, active: bool) -> tuple[EngineJobState, datetime | None]:
    if is_true(conditions, "Finished"):
        failed = "fail" in str(conditions["Finished"].get("reason", "")).lower()
        return EngineJobState.FAILED if failed else EngineJobState.SUCCEEDED, _since(conditions["Finished"])
    if is_true(conditions, "Admitted"):
        return EngineJobState.RUNNING, _since(conditions["Admitted"])
    return EngineJobState.PENDING if active else EngineJobState.CANCELLED, None


def is_true(conditions: Mapping[Any, Json], kind: str) -> bool:
    return as_dict(conditions.get(kind)).get("status") == "True"


def _since(condition: Json) -> datetime | None:
    try:
        return datetime.fromisoformat(condition["lastTransitionTime"])
    except (KeyError, TypeError, ValueError):
        return None


def _flavors_of(admission: Json, resource: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in map(as_dict, as_list(admission.get("podSetAssignments"))):
        flavor, gpus = (
            as_dict(each.get("flavors")).get(resource),
            quantity(as_dict(each.get("resourceUsage")).get(resource)),
        )
        if isinstance(flavor, str) and gpus:
            found[flavor] = found.get(flavor, 0) + gpus
    return found


def _quotas(spec: Json, resource: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for group in map(as_dict, as_list(spec.get("resourceGroups"))):
        for flavor in map(as_dict, as_list(group.get("flavors"))):
            for each in map(as_dict, as_list(flavor.get("resources"))):
                gpus = min(quantity(each.get("nominalQuota")), MOST_QUOTA)
                if each.get("name") == resource and gpus:
                    found.append((name_of({"metadata": flavor}), gpus))
    return found


def _gpus_of(template: Json, resource: str) -> int:
    """Return the GPUs of a pod: the sum over its containers, which run at the same time."""
    total = 0
    for container in map(as_dict, as_list(as_dict(template.get("spec")).get("containers"))):
        resources = as_dict(container.get("resources"))
        wanted = as_dict(resources.get("requests")).get(resource, as_dict(resources.get("limits")).get(resource))
        total += quantity(wanted)
    return total


def quantity(value: object) -> int:
    """Return a whole quantity in Kubernetes's notation; 0 if it is not one.

    >>> [quantity(each) for each in ("8", 2, "1k", "500m", None)]
    [8, 2, 1000, 0, 0]
    """
    found = _QUANTITY.fullmatch(str(value))
    return int(found[1]) * _FACTORS[found[2]] if found else 0


def _count(pod_set: Json) -> int:
    count = pod_set.get("count")
    return count if isinstance(count, int) and count > 0 else 0


def name_of(document: Json) -> str:
    return str(as_dict(document.get("metadata")).get("name") or "")


def as_dict(value: object) -> Json:
    """Return a value that is an object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def as_list(value: object) -> list[Any]:
    """Return a value that is a list; an empty one for anything else."""
    return value if isinstance(value, list) else []  # pyright: ignore[reportUnknownVariableType]
