"""What a Kubernetes cluster says of the workloads that pools scale there, and what it is to do with them."""

from ipaddress import ip_address
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from services.contracts.schema import Flag, Int, Message, Text, check_once, many, maybe, said

KubernetesName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
Replicas = Annotated[Int, Field(ge=0, le=100_000)]


class WorkloadName(Message):
    """A workload of the namespace that a cluster's process looks after."""

    kind: Literal["Deployment", "LeaderWorkerSet"] = "Deployment"
    name: KubernetesName

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class Workload(WorkloadName):
    """What a mode's instances are in a cluster: the pods of a Deployment, or the leaders of a LeaderWorkerSet."""

    port: Int = said("Where a pod's server listens.", default=8000, ge=1, le=65_535)
    min_replicas: Replicas = said("It has at least as many replicas, whatever is planned.", default=0)


class ClusterPod(Message):
    """A pod that is not ending."""

    uid: Text = said("Its own, which no other pod has.", max_length=100)
    name: KubernetesName
    address: Text | None = maybe("Its IP address.", max_length=45)
    ready: Flag = said("Whether it takes requests.", default=False)
    ordinal: Int = said("Of a group of a LeaderWorkerSet, which ends the highest first: its number.", default=0, ge=0)
    unschedulable: Text = said("Why it has no node; empty if it has one.", default="", max_length=500)

    @field_validator("address")
    @classmethod
    def _is_ip(cls, value: str | None) -> str | None:
        return value and str(ip_address(value))


class WorkloadReport(WorkloadName):
    """A workload as it is."""

    replicas: Replicas
    pods: list[ClusterPod] = many("Its pods.", max_length=10_000)
    left_alone: Text = said("Why it is not scaled, such as an autoscaler of its own.", default="", max_length=500)


class ClusterReport(Message):
    """The workloads of a cluster that may be scaled."""

    workloads: list[WorkloadReport] = Field(max_length=1_000)

    @model_validator(mode="after")
    def _is_of_each_once(self) -> Self:
        check_once(map(str, self.workloads), "names {} twice")
        check_once((pod.uid for each in self.workloads for pod in each.pods), "has the pod {} in two workloads")
        return self


class WorkloadOrder(WorkloadName):
    """What is to become of a workload; one without an order stays as it is."""

    replicas: Replicas | None = said("Null: no pool names it any more, so that it gets back the count it had before.")
    leave: list[str] = many("The pods that go first, by name.")


class ClusterOrders(Message):
    """What a cluster is to do."""

    workloads: list[WorkloadOrder]
    instances: list[str] = many("Pods that are instances of pools, by name: no endpoints are registered for them.")
