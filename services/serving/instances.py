"""Instances as the controller sees them: their rows, and the jobs they run as."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

from services.contracts.apps import AppSpec, FleetSpec
from services.contracts.jobs import SliceName
from services.contracts.nodes import Listener
from services.contracts.schema import Message, Name, is_none, maybe
from services.contracts.serving import InstancePod, InstanceState, PoolPlace, PoolSpec, ServerMode, ServerProbes
from services.core.domain.jobs import JobState


class InstanceReason(StrEnum):
    """Why an instance waits, leaves or ended, if that is not its job's own reason. The codes are public API."""

    def __new__(cls, code: str, sentence: str = "") -> Self:
        reason = str.__new__(cls, code)
        reason._value_ = code
        reason.sentence = sentence  #: What is said of an instance by default
        return reason

    sentence: str

    LOADING = "loading", "Its process runs and does not answer yet."
    ADMISSION_UNAVAILABLE = "admission_unavailable", "Its job could not be submitted yet; that is tried again."
    REFUSED = "refused"  #: Its job was refused
    JOB_MISSING = "job_missing", "Its job no longer exists."
    PORT_TAKEN = "port_taken", "Another process listens on its port, and would be given its requests."
    KEY_REFUSED = "key_refused", "Whoever answers on its port refuses the key that the instance was given."
    NOT_READY = "not_ready"  #: It did not answer within ``ready_timeout_s``
    UNHEALTHY = "unhealthy"  #: It was silent for ``unhealthy_timeout_s``
    CLUSTER_SILENT = "cluster_silent", "Its cluster has not said yet that it knows of it."
    NO_POD = "no_pod", "Its workload has no pod for it yet."
    SCALED_BY_OTHERS = "scaled_by_others"  #: Its workload's replicas are not set by plans
    NOT_NEEDED = "not_needed", "The plan in force does not need it."
    TERMS_CHANGED = "terms_changed", "The pool was changed: another instance takes its place."
    POOL_DELETED = "pool_deleted", "Its pool is being deleted."
    APP_DELETED = "app_deleted", "Its application is being deleted."
    REPARTITIONED = "repartitioned", "Its GPU is cut anew, or given to other instances."


LEFT_AS_PLANNED = (
    *(InstanceReason.NOT_NEEDED, InstanceReason.TERMS_CHANGED, InstanceReason.REPARTITIONED),
    *(InstanceReason.POOL_DELETED, InstanceReason.APP_DELETED),
)
"""The reasons of instances that left without a fault."""


APP_PREFIX = "app:"  #: Of an application's name in ``pool_instances.pool``; no pool's name has a colon

NOT_OF_PROCESS = {"name", "idle_w", "start_s", "stop_s", "start_wh", "stop_wh", "max_requests"}
"""Of a mode: what may change while its instances keep running."""


class InstanceTerms(Message):
    """The specs that an instance is made from."""

    mode: ServerMode
    place: PoolPlace
    probes: ServerProbes
    fleet: Name | None = maybe("Of an application's instance: the fleet that it runs on.", exclude_if=is_none)
    slice: SliceName | None = maybe("Of an application's instance: the slice that it runs on.", exclude_if=is_none)

    def process(self) -> dict[str, Any]:
        """Return what its process depends on; instances for which this is equal run the same process."""
        if self.mode.workload is not None:
            return {"cluster": self.place.cluster, "workload": str(self.mode.workload)}
        return {
            **self.mode.model_dump(exclude=NOT_OF_PROCESS),
            **self.place.model_dump(include={"zone", "node_labels"}),
            "grace_s": self.probes.grace_s,
            **({"fleet": self.fleet, "slice": self.slice} if self.fleet else {}),
        }


class Blueprint:
    """The specs of the instances of a pool or of an application."""

    def __init__(
        self,
        probes: ServerProbes,
        places: Iterable[PoolPlace],
        modes: Iterable[ServerMode],
        fleet: str | None = None,
        slices: Mapping[str, SliceName] | None = None,
    ) -> None:
        self.probes = probes
        self.places = {place.name: place for place in places}
        self.place = next(iter(self.places), "")
        self.modes = {mode.name: mode for mode in modes}
        self._fleet = fleet
        self._slices = slices or {}
        self._processes: dict[tuple[str, str], dict[str, Any]] = {}

    def terms(self, at: tuple[str, str]) -> InstanceTerms | None:
        """Return the specs of an instance created now; None if the place or mode is gone."""
        place, mode = self.places.get(at[0]), self.modes.get(at[1])
        if place is None or mode is None:
            return None
        return InstanceTerms(
            mode=mode, place=place, probes=self.probes, fleet=self._fleet, slice=self._slices.get(mode.name)
        )

    def is_current(self, at: tuple[str, str], process: dict[str, Any]) -> bool:
        """Whether an instance created now at that place and mode would run this process."""
        if at not in self._processes:
            terms = self.terms(at)
            self._processes[at] = terms.process() if terms else {}
        return self._processes[at] == process


def pool_blueprint(spec: PoolSpec) -> Blueprint:
    return Blueprint(spec.probes, spec.places, spec.modes)


def app_blueprint(spec: AppSpec, fleet: FleetSpec) -> Blueprint:
    """Return the specs of an application's instances: a mode for each variant on each slice, such as ``b7.3g``.

    ``7g`` is a whole GPU of the fleet.
    """
    modes: list[ServerMode] = []
    slices: dict[str, SliceName] = {}
    for variant in spec.variants:
        for profile in variant.profiles:
            name = f"{variant.name}.{profile.slice}"
            modes.append(
                ServerMode(
                    name=name,
                    gpu_model=fleet.gpu_model,
                    gpus=1,
                    command=variant.command,
                    image=variant.image,
                    environment=variant.environment
                    | {"WATTSHIFT_VARIANT": variant.name, "WATTSHIFT_SLICE": profile.slice},
                    working_dir=variant.working_dir,
                    max_requests=spec.concurrency,
                )
            )
            slices[name] = profile.slice
    place = PoolPlace(name=spec.fleet, zone=fleet.zone, signal=fleet.signal, node_labels=fleet.node_labels)
    return Blueprint(spec.probes, [place], modes, spec.fleet, slices)


@dataclass(frozen=True, slots=True)
class InstanceJob:
    """The job of an instance, or what stands for it: the pod of one in a Kubernetes cluster."""

    state: JobState
    reason: str | None = None
    detail: str | None = None
    cancel_requested: bool = False
    queued_at: datetime | None = None  #: Since when it has been waiting
    url: str | None = None  #: Where it listens; None unless its process runs
    running_at: datetime | None = None  #: Since when its process has been running
    listener: Listener | None = None  #: Who listens on its port; None if its node does not tell


@dataclass(frozen=True, slots=True)
class Instance:
    """A row of ``pool_instances`` that has not ended.

    ``pool`` is its owner's key: a pool's name, or ``app:`` and an application's name. ``job_id`` is found by the key of
    its submission if necessary.
    """

    id: str
    pool: str
    tenant_id: str
    place: str
    mode: str
    state: InstanceState
    terms: InstanceTerms
    created_at: datetime
    partition: str | None = None
    request_class: str | None = None
    job_id: str | None = None
    job: InstanceJob | None = None
    url: str | None = None
    reason: str | None = None
    detail: str | None = None
    ready_at: datetime | None = None
    silent_since: datetime | None = None
    draining_at: datetime | None = None
    stopping_at: datetime | None = None
    ended_at: datetime | None = None
    process: dict[str, Any] = field(default_factory=dict[str, Any])
    listener: Listener | None = None
    sealed_key: bytes | None = field(default=None, repr=False)
    checks_key: bool | None = None
    pod: InstancePod | None = None

    @property
    def at(self) -> tuple[str, str]:
        return self.place, self.mode

    @property
    def is_pod(self) -> bool:
        """Whether it is a pod of a Kubernetes cluster, and not a job."""
        return self.terms.mode.workload is not None

    @property
    def job_has_ended(self) -> bool:
        """Whether its job has ended and no other will run; false before it has a job."""
        return self.job_id is not None if self.job is None else self.job.state.is_final


@lru_cache(maxsize=4_096)
def read_terms(document: str) -> tuple[InstanceTerms, dict[str, Any]]:
    """Return stored terms, and what the process depends on; cached, because many instances share few terms."""
    terms = InstanceTerms.as_stored(document)
    return terms, terms.process()
