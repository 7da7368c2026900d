"""Which worker clusters of MultiKueue a workload is nominated for: the one whose grid emits least over its run. Pure.

Kueue's manager cluster leaves that choice to an external controller, if its ``multiKueue.dispatcherName`` names one
that Kueue does not know: it copies a workload to the clusters in ``status.nominatedClusterNames``, and the first that
has room for it runs it. Nobody else nominates, so whatever is not ours to steer is nominated for all of them at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.engines import ZoneOutlook
from services.contracts.schema import name_or_none
from services.core.profiles.boards import board_of
from services.core.profiles.priors import ANY_FAMILY, family_of
from services.engines.kueue.reading import (
    STEER,
    ZONE,
    Json,
    annotations_of,
    as_dict,
    as_list,
    conditions_of,
    gpus_of,
    is_true,
    name_of,
    pods_of,
)
from services.engines.kueue.settings import KueueSettings

MULTIKUEUE = "kueue.x-k8s.io/multikueue"  #: The controllerName of MultiKueue's AdmissionChecks
GPU_MODEL, PUE = "wattshift.io/gpu-model", "wattshift.io/pue"
"""What operators write on a MultiKueueCluster beside its grid zone; by default GPUs are unknown, the PUE is 1."""
CLUSTERS = "wattshift.io/clusters"  #: What users read: the clusters in order, with the grams expected in each
_MOST = 20
_TIE = 0.01  #: Clusters whose grams differ by less than this share of the least are a tie
_POD_W = 100.0  #: Watts of a pod without GPUs; of those of one workload only the zones matter


@dataclass(frozen=True, slots=True)
class WorkerCluster:
    """A cluster that MultiKueue may send workloads to."""

    name: str
    zone: str = ""
    gpu_model: str = ""
    pue: float = 1.0


@dataclass(frozen=True, slots=True)
class Nominee:
    """A workload in a queue with a MultiKueue check."""

    uid: str
    namespace: str
    name: str
    version: str
    check: str
    waits: bool  #: Whether it still needs a cluster: it has quota and has passed all other checks, but has no cluster
    nominated: tuple[str, ...]
    cluster: str
    gpus: int
    pods: int
    length_s: float | None  #: How long it may run, according to its own spec
    left_alone: bool
    own_annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Nomination:
    """The clusters to nominate a workload for, and the annotations to write about it."""

    nominee: Nominee
    clusters: tuple[str, ...]
    note: str


def nominee_of(document: Json, checks: Iterable[str], resource: str) -> Nominee | None:
    """Return a workload that has one of these MultiKueue checks; None if it has none, or cannot be read."""
    meta, spec, status = (as_dict(document.get(name)) for name in ("metadata", "spec", "status"))
    states = {str(each.get("name")): each.get("state") for each in map(as_dict, as_list(status.get("admissionChecks")))}
    check = next((name for name in sorted(checks) if name in states), None)
    if check is None or not all(isinstance(meta.get(key), str) for key in ("uid", "name", "resourceVersion")):
        return None
    conditions = conditions_of(status)
    ready = all(state == "Ready" for name, state in states.items() if name != check)
    cluster = str(status.get("clusterName") or "")
    limit_s = spec.get("maximumExecutionTimeSeconds")
    return Nominee(
        uid=meta["uid"],
        namespace=str(meta.get("namespace", "")),
        name=meta["name"],
        version=meta["resourceVersion"],
        check=check,
        waits=is_true(conditions, "QuotaReserved")
        and not is_true(conditions, "Finished")
        and not is_true(conditions, "Evicted")
        and spec.get("active") is not False
        and states[check] == "Pending"
        and ready
        and not cluster,
        nominated=tuple(str(each) for each in as_list(status.get("nominatedClusterNames"))),
        cluster=cluster if not is_true(conditions, "Finished") else "",
        gpus=gpus_of(spec, resource),
        pods=max(pods_of(spec), 1),
        length_s=float(limit_s) if isinstance(limit_s, int) and limit_s > 0 else None,
        left_alone=annotations_of(document).get(STEER) == "off",
        own_annotations={str(key): str(value) for key, value in as_dict(meta.get("annotations")).items()},
    )


def worker_clusters_of(
    checks: Iterable[Json], configs: Iterable[Json], clusters: Iterable[Json]
) -> dict[str, tuple[WorkerCluster, ...]]:
    """Return the clusters of each MultiKueue check, in the order of its configuration."""
    known = {name_of(each): _cluster_of(each) for each in clusters}
    lists = {
        name_of(each): [str(name) for name in as_list(as_dict(each.get("spec")).get("clusters"))] for each in configs
    }
    found: dict[str, tuple[WorkerCluster, ...]] = {}
    for each in checks:
        spec = as_dict(each.get("spec"))
        if spec.get("controllerName") == MULTIKUEUE:
            names = lists.get(str(as_dict(spec.get("parameters")).get("name")), [])
            found[name_of(each)] = tuple(known.get(name, WorkerCluster(name)) for name in names)
    return found


def nomination_of(
    nominee: Nominee, ranked: Sequence[tuple[WorkerCluster, float | None]], *, steers: bool, waited: bool
) -> Nomination | None:
    """Return the clusters to nominate a workload that waits for now; None to leave it as it is.

    The first is the greenest. One that did not take the workload in time stays nominated, and the next one is added.

    Args:
        ranked: The clusters that it may go to, by ``ranking``.
        steers: Whether the choice is ours; if not, it is nominated for all.
        waited: Whether the nominated clusters have had their time.
    """
    names = [each.name for each, _ in ranked]
    if not steers or nominee.left_alone:
        some = tuple(names[:_MOST])
        return Nomination(nominee, some, "") if set(some) - set(nominee.nominated) else None
    kept = tuple(name for name in nominee.nominated if name in names)
    left = [name for name in names if name not in kept]
    if not left or (kept and not waited):
        return None
    return Nomination(nominee, (*kept, left[0])[:_MOST], _note(ranked))


def ranking(
    nominee: Nominee,
    clusters: Sequence[WorkerCluster],
    outlooks: Mapping[str, ZoneOutlook],
    load: Mapping[str, int],
    settings: KueueSettings,
    now_s: float,
) -> list[tuple[WorkerCluster, float | None]]:
    """Return the clusters, the greenest first, with the grams expected in each; None where they are unknown.

    Signals are never mixed: unless all zones have the same one, no grams are compared, and the least loaded is first.

    Args:
        outlooks: What zones will emit from now on; a cluster in a zone without one comes after all others.
        load: GPUs that workloads use or wait for, by cluster: among equals the least loaded is first.
    """
    signals = {outlooks[each.zone].signal for each in clusters if each.zone in outlooks}
    length_s = nominee.length_s or settings.dispatch_length_s
    grams = {
        each.name: _grams(nominee, each, outlooks[each.zone], now_s, length_s)
        for each in clusters
        if each.zone in outlooks and len(signals) == 1
    }
    least = min(grams.values(), default=0.0)
    tie = _TIE * abs(least) or 1.0

    def order(each: WorkerCluster) -> tuple[bool, int, int, str]:
        return (
            each.name not in grams,
            round((grams.get(each.name, least) - least) / tie),
            load.get(each.name, 0),
            each.name,
        )

    return [(each, grams.get(each.name)) for each in sorted(clusters, key=order)]


def loads_of(nominees: Iterable[Nominee]) -> dict[str, int]:
    """Return the GPUs, or pods if they use none, of the workloads that run in each cluster or wait for it."""
    found: dict[str, int] = {}
    for each in nominees:
        for name in (each.cluster,) if each.cluster else each.nominated if each.waits else ():
            found[name] = found.get(name, 0) + (each.gpus or each.pods)
    return found


def _grams(nominee: Nominee, cluster: WorkerCluster, outlook: ZoneOutlook, now_s: float, length_s: float) -> float:
    board = board_of(cluster.gpu_model)
    gpu_w = board.idle_w + family_of(ANY_FAMILY).demand * (board.peak_w - board.idle_w)
    power_w = nominee.gpus * gpu_w if nominee.gpus else nominee.pods * _POD_W
    mean = outlook.mean(now_s, now_s + length_s)
    return power_w * length_s / 3.6e6 * cluster.pue * mean


def _cluster_of(document: Json) -> WorkerCluster:
    said = as_dict(as_dict(document.get("metadata")).get("annotations"))
    try:
        pue = float(said.get(PUE, 1.0))
    except (TypeError, ValueError):
        pue = 1.0
    return WorkerCluster(
        name_of(document),
        name_or_none(said.get(ZONE)) or "",
        str(said.get(GPU_MODEL) or ""),
        pue if 1.0 <= pue <= 10.0 else 1.0,
    )


def _note(ranked: Sequence[tuple[WorkerCluster, float | None]]) -> str:
    words = [each.name if grams is None else f"{each.name} {grams:.0f}gCO2" for each, grams in ranked]
    return ", ".join(words)[:500]
