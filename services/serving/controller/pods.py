"""Which pods are instances, and how many replicas a workload of a Kubernetes cluster is to have. Pure.

An instance is given any pod that none has yet, and another one when that is gone. The controller starts and drains
instances as it does those that are jobs; one that it stops has ended when its workload has no more pods than the others
need.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.clusters import ClusterPod, WorkloadReport
from services.contracts.serving import InstanceState
from services.serving.instances import Instance


@dataclass(frozen=True, slots=True)
class Fitted:
    """What becomes of a workload and of its instances."""

    replicas: int | None  #: None if no plan says so
    given: Mapping[str, ClusterPod | None]  #: The pods of instances that go on, by instance
    gone: Collection[str]  #: Instances that have ended
    leave: Sequence[str]  #: Pods that go first, by name


def fitted(
    report: WorkloadReport, instances: Sequence[Instance], planned: Mapping[str, int] | None, least: int
) -> Fitted:
    """Return how many replicas a workload is to have, and which pod each of its instances is.

    It has one for each instance that has not been stopped, and for those that a plan wants and nobody has made yet.

    Args:
        instances: Those that have not ended.
        planned: How many instances plans in force want, by pool; None if no pool names the workload.
        least: How many replicas it must have at least.
    """
    stay = [each for each in instances if each.state is not InstanceState.STOPPING]
    pods = {pod.uid: pod for pod in report.pods}
    replicas: int | None = None
    if planned is not None and not report.left_alone and (planned or instances):
        made = Counter(each.pool for each in stay)
        # The highest group of a LeaderWorkerSet goes first: none may go whose number is below that of one in use.
        numbers = [pods[each.pod.uid].ordinal for each in stay if each.pod and each.pod.uid in pods]
        wanted = sum(max(made[pool], planned.get(pool, 0)) for pool in {*made, *planned})
        replicas = max(wanted, least, *(number + 1 for number in numbers if number))
    is_scaled = replicas is None or len(pods) <= replicas
    gone = {
        each.id
        for each in instances
        if each.state is InstanceState.STOPPING and (is_scaled or each.pod is None or each.pod.uid not in pods)
    }
    given = _given([each for each in instances if each.id not in gone], pods, replicas)
    held = {pod.uid for each in stay if (pod := given[each.id])}
    leave = [] if is_scaled else [pod.name for uid, pod in pods.items() if uid not in held]
    return Fitted(replicas, given, gone, leave)


def _given(
    instances: Sequence[Instance], pods: Mapping[str, ClusterPod], replicas: int | None
) -> dict[str, ClusterPod | None]:
    """Return the pod of each instance: the one it has, or one that none has, and that stays, if it is to serve."""
    given = {each.id: pods.get(each.pod.uid or "") if each.pod else None for each in instances}
    taken = {pod.uid for pod in given.values() if pod}
    free = [
        pod for uid, pod in pods.items() if uid not in taken and (replicas is None or pod.ordinal < max(replicas, 1))
    ]
    free.sort(key=lambda pod: (pod.ordinal, not pod.ready, pod.name))
    open_to = (InstanceState.READY, InstanceState.STARTING, InstanceState.WANTED)
    needy = [each for each in instances if given[each.id] is None and each.state in open_to]
    needy.sort(key=lambda each: (open_to.index(each.state), each.id))
    return given | {each.id: pod for each, pod in zip(needy, free, strict=False)}
