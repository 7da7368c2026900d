"""What Kubernetes clusters say of the workloads that pools scale there, and what they are told to do with them.

A cluster's process says again and again how its workloads are, and is told how many replicas each is to have. Both are
levels, so that either may be lost, repeated or late.
"""

from typing import Any

from services.contracts.clusters import ClusterOrders, ClusterPod, ClusterReport, WorkloadOrder, WorkloadReport
from services.contracts.identity import Identity
from services.contracts.serving import InstancePod
from services.core.domain.reasons import Reason
from services.kit.networks import is_within, read_networks
from services.serving.controller.pods import fitted
from services.serving.instances import Instance, InstanceReason
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.instances import InstanceOwner
from services.serving.settings import ServingSettings

UNNUMBERED = 1_000_000  #: The ordinal of an instance that has no pod: it leaves before those that have one


class Clusters:
    """Answers clusters' reports. A caller's concern the pools of its own tenant alone."""

    def __init__(self, repository: ServingRepository, settings: ServingSettings) -> None:
        self._repository = repository
        self._networks = read_networks(settings.endpoint_networks)

    async def report(self, cluster: str, report: ClusterReport, caller: Identity) -> ClusterOrders:
        """Give instances their pods, and return what is to become of the workloads."""
        orders: list[WorkloadOrder] = []
        pods: dict[str, InstancePod] = {}
        async with self._repository.writing() as queries:
            # Controllers pass over pools that are locked.
            pools, are_all = await queries.instances.lock_in(cluster, caller.tenant_id)
            now = await queries.now()
            instances = [
                each
                for pool in pools
                for each in await queries.instances.live_of(pool)
                if each.terms.place.cluster == cluster
            ]
            for each in report.workloads:
                its_own = [one for one in instances if str(one.terms.mode.workload) == str(each)]
                planned, least, port = await _wanted(queries, each, cluster, pools)
                # Another pool's instances may be those of one that cannot be read: then nothing gets less.
                fit = fitted(each, its_own, planned, least if are_all else max(least, each.replicas))
                if fit.replicas is not None:
                    orders.append(WorkloadOrder.of(each, replicas=fit.replicas, leave=list(fit.leave)))
                elif planned is None and are_all and len(fit.gone) == len(its_own):
                    orders.append(WorkloadOrder.of(each, replicas=None))
                for one in its_own:
                    found: dict[str, Any] = {"is_gone": True}
                    if one.id not in fit.gone:
                        found = self._known(one, each, fit.given[one.id], port)
                    pods[one.id] = _lasting(one.pod, InstancePod(since=now, **found))
            # Of what nothing was said, each keeps the pod that it has.
            await queries.instances.set_pods([(one, pods[one.id]) for one in instances if one.id in pods])
        return ClusterOrders(workloads=orders, instances=[pod.name for pod in pods.values() if pod.name])

    def _known(self, one: Instance, report: WorkloadReport, pod: ClusterPod | None, port: int | None) -> dict[str, Any]:
        """Return what is known of an instance's pod."""
        if pod is None:
            reason = InstanceReason.SCALED_BY_OTHERS if report.left_alone else InstanceReason.NO_POD
            ordinal = UNNUMBERED if report.kind == "LeaderWorkerSet" else 0
            return {"reason": reason.value, "detail": report.left_alone or reason.sentence, "ordinal": ordinal}
        known = {"uid": pod.uid, "name": pod.name, "ordinal": pod.ordinal}
        if pod.unschedulable:
            return known | {"reason": Reason.NOT_ENOUGH_FREE_GPUS.value, "detail": pod.unschedulable}
        if not pod.ready or not pod.address:
            return known | {"reason": InstanceReason.LOADING.value, "detail": InstanceReason.LOADING.sentence}
        if not is_within(pod.address, self._networks):
            detail = f"{pod.address} lies in none of the networks of WATTSHIFT_ENDPOINT_NETWORKS."
            return known | {"reason": InstanceReason.REFUSED.value, "detail": detail}
        host = f"[{pod.address}]" if ":" in pod.address else pod.address
        assert one.terms.mode.workload is not None
        return known | {"url": f"http://{host}:{port or one.terms.mode.workload.port}"}


async def _wanted(
    queries: Queries, report: WorkloadReport, cluster: str, pools: list[InstanceOwner]
) -> tuple[dict[str, int] | None, int, int | None]:
    """Return how many instances plans in force want of a workload, by pool, its least number, and its port.

    A plan for an earlier revision of its pool says nothing. None: no pool names the workload.
    """
    planned: dict[str, int] = {}
    named = [
        (pool, place.name, mode.name, mode.workload)
        for pool in pools
        if not pool.is_deleted
        for place in pool.blueprint.places.values()
        if place.cluster == cluster
        for mode in pool.blueprint.modes.values()
        if mode.workload is not None and str(mode.workload) == str(report)
    ]
    for pool, place, mode, _ in named:
        plan = await queries.instances.plan(pool.plan_id) if pool.plan_id else None
        if plan is not None and plan.revision == pool.revision:
            classes = plan.target.get((place, mode), {})
            planned[pool.key] = sum(classes.values()) - classes.get(None, 0)  # of which none is made, only kept
    if not named:
        return None, 0, None
    return planned, max(each.min_replicas for *_, each in named), named[0][3].port


def _lasting(known: InstancePod | None, found: InstancePod) -> InstancePod:
    """Return what was found, and since when it has been so."""
    if known is None or any(getattr(known, name) != getattr(found, name) for name in ("uid", "url", "reason")):
        return found
    return found.model_copy(update={"since": known.since})
