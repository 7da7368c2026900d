"""Service instances: jobs that are placed before any policy decides, and that no policy sees.

Each waiting instance, oldest first,

1. starts where its devices are free: on the node with the fewest that suffice, and on a sleeping one only if no other
   has them. If some would find no room this way although there is a way to place all that wait, they are placed
   together; or
2. reserves its devices on a node where the free ones, those of stopping gangs and those of preemptible gangs suffice:
   the node where gangs with the fewest GPUs must stop. Those of lowest priority stop first, and among these the
   youngest; or
3. reserves what is free or being released on the node where the fewest of the devices it needs are out of reach, and
   stops no gang: what is missing belongs to gangs that may not be preempted.

What was reserved is hidden from the policy, so that nothing starts there and a waiting service is never overtaken by
training jobs. Reservations are not stored: the next round finds them again, because devices being released cost no
stop.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.core.cycle.placing import FreeDevices, block_among
from services.core.cycle.plan import Action, Hold, Preempt, Start
from services.core.cycle.rounds import with_holds
from services.core.cycle.snapshot import PREEMPTING, JobTable, NodeTable, ServiceInstance, Snapshot
from services.core.domain.ids import JobId
from services.core.domain.packing import pack
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason

Device = tuple[int, int]  #: Node and device, by their indices


def place_services(snapshot: Snapshot) -> tuple[tuple[Action, ...], Snapshot]:
    """Return a start or a hold for every waiting service, along with the stops they need, and the policy's snapshot.

    The policy sees neither the services nor the devices they get or reserve; gangs that give way appear as stopping, on
    what is left of their devices.
    """
    placing = _Placing(snapshot)
    for service in snapshot.services:
        placing.serve(service)
    return with_holds(snapshot, (*placing.preempts, *placing.starts, *placing.holds)), placing.shown()


def without_devices(nodes: NodeTable, taken: dict[int, set[int]]) -> NodeTable:
    """Return the nodes without these devices, keyed by node; nodes that lose devices may not be powered down."""
    gpus, may_sleep, free_devices = nodes.gpus.copy(), nodes.may_sleep.copy(), list(nodes.free_devices)
    for node, devices in taken.items():
        gpus[node] -= len(devices)
        may_sleep[node] = False
        free_devices[node] = tuple(device for device in free_devices[node] if device not in devices)
    return replace(
        nodes,
        gpus=gpus,
        schedulable=nodes.schedulable & (gpus > 0),
        may_sleep=may_sleep,
        free_devices=tuple(free_devices),
        free_gpus=np.fromiter(map(len, free_devices), np.int64, len(nodes)),
    )


class _Placing:
    """Places services one after another; devices of one are not available to the next."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.preempts: list[Preempt] = []
        self.starts: list[Start] = []
        self.holds: list[Hold] = []
        self._snapshot, self._free = snapshot, FreeDevices(snapshot.nodes)
        self._held = defaultdict[str, int](int, snapshot.jobs.gpus_by_tenant())
        self._served: dict[str, int] = defaultdict(int)
        self._taken: dict[int, set[int]] = defaultdict(set)
        self._given_up: dict[int, set[Device]] = defaultdict(set)
        self._leaving: dict[int, dict[int, int]] = defaultdict(dict)
        self._on: dict[int, list[int]] = defaultdict(list)
        self._together = _placed_together(snapshot.services, snapshot.nodes, self._free.count.tolist())
        jobs = snapshot.jobs
        for job in np.flatnonzero(jobs.gpus > 0).tolist():
            if jobs.phase[job] == PREEMPTING:
                self._leave(job)
            elif jobs.preemptible[job]:
                for node, _ in snapshot.held_by(job):
                    self._on[node].append(job)
        for gangs in self._on.values():
            gangs.sort(key=lambda job: (-jobs.priority[job], jobs.submitted_s[job], jobs.ids[job]), reverse=True)

    def serve(self, service: ServiceInstance) -> None:
        if not service.nodes.any():
            self.holds.append(Hold(service.job_id, Reason.NO_ELIGIBLE_NODE))
        elif not self._is_within_quota(service):
            self.holds.append(Hold(service.job_id, Reason.TENANT_QUOTA))
        elif not self._start(service):
            self.holds.append(Hold(service.job_id, self._reserve(service)))

    def shown(self) -> Snapshot:
        snapshot, taken = self._snapshot, sum(map(len, self._taken.values()))
        for job, devices in self._given_up.items():  # still held, though the table shows it no more
            self._served[snapshot.jobs.tenants[job]] += len(devices)
        return replace(
            snapshot,
            jobs=self._without_services(),
            nodes=without_devices(snapshot.nodes, self._taken),
            **snapshot.less(self._served),
            measured_w=float("nan") if taken else snapshot.measured_w,
            services=(),
            services_gpus=snapshot.services_gpus + taken,
            services_w=snapshot.services_w + taken * self._expected_w(),
        )

    def _is_within_quota(self, service: ServiceInstance) -> bool:
        """Whether the tenant may hold the service on top of all it holds; if not, its other jobs must make room."""
        tenant = self._snapshot.jobs.tenants[self._snapshot.jobs.index[service.job_id]]
        limit = self._snapshot.tenant_gpu_quota.get(tenant)
        served = self._served[tenant] + service.gpus
        if limit is None or served <= limit:
            self._served[tenant] = served
        return limit is None or self._held[tenant] + served <= limit

    def _start(self, service: ServiceInstance) -> bool:
        nodes, count = self._snapshot.nodes, self._free.count
        fits: list[int] = np.flatnonzero(service.nodes & (count >= service.gpus)).tolist()
        if not fits:
            return False
        if (node := self._together.get(service.job_id, -1)) not in fits:
            node = min(fits, key=lambda node: (bool(nodes.asleep[node]), int(count[node]), node))
        devices = block_among(self._free.on(node), service.gpus)
        self._taken[node].update(devices)
        self.starts.append(Start(service.job_id, self._free.take_devices([(node, devices)]), Reason.SERVICE_INSTANCE))
        return True

    def _reserve(self, service: ServiceInstance) -> Reason:
        """Reserve as many of a service's devices as possible on one node, and return why it waits."""
        nodes = self._snapshot.nodes
        usable: list[int] = np.flatnonzero(service.nodes & nodes.schedulable).tolist()
        could = [
            self._look_at(node, service.gpus)
            for node in usable
            if nodes.gpus[node] - len(self._taken[node]) >= service.gpus
        ]
        if not could:
            return Reason.NOT_ENOUGH_FREE_GPUS
        missing, _, node, stops = min(could)
        for job in stops:
            self._stop(job)
        free = self._free.on(node)[: service.gpus]
        self._free.take_devices([(node, free)])
        leaving = self._leaving[node]
        released = sorted(leaving)[: service.gpus - len(free)]
        for device in released:
            self._given_up[leaving.pop(device)].add((node, device))
        self._taken[node].update(free, released)
        return Reason.NOT_ENOUGH_FREE_GPUS if missing else Reason.WAITING_FOR_RELEASE

    def _look_at(self, node: int, gpus: int) -> tuple[int, int, int, list[int]]:
        """Return how many devices a node lacks even so, the GPUs of the gangs to stop, the node, and those gangs."""
        missing = gpus - len(self._free.on(node)) - len(self._leaving[node])
        stops: list[int] = []
        for job in self._on[node]:
            if missing <= 0:
                break
            stops.append(job)
            missing -= self._devices_on(job, node)
        if missing > 0:
            return missing, 0, node, []
        for job in stops[::-1]:  # a narrow gang is spared where a wide one of higher rank had to stop after it
            if missing + self._devices_on(job, node) <= 0:
                stops.remove(job)
                missing += self._devices_on(job, node)
        return 0, sum(int(self._snapshot.jobs.gpus[job]) for job in stops), node, stops

    def _devices_on(self, job: int, node: int) -> int:
        placement, node_id = self._snapshot.jobs.placements[job], self._snapshot.nodes.ids[node]
        assert placement is not None
        return sum(len(share.devices) for share in placement.shares if share.node_id == node_id)

    def _stop(self, job: int) -> None:
        jobs = self._snapshot.jobs
        self.preempts.append(Preempt(jobs.ids[job], Reason.SERVICE_INSTANCE, int(jobs.gpus[job])))
        for gangs in self._on.values():
            if job in gangs:
                gangs.remove(job)
        self._leave(job)

    def _leave(self, job: int) -> None:
        for node, devices in self._snapshot.held_by(job):
            self._leaving[node].update(dict.fromkeys(devices, job))

    def _without_services(self) -> JobTable:
        """Return the training jobs; those that give way are shown as stopping, less the devices reserved from them."""
        jobs, ids = self._snapshot.jobs, self._snapshot.nodes.ids
        phase, gpus, placements = jobs.phase.copy(), jobs.gpus.copy(), list(jobs.placements)
        phase[[jobs.index[each.job_id] for each in self.preempts]] = PREEMPTING
        for job, devices in self._given_up.items():
            placements[job] = _less(placements[job], {(ids[node], device) for node, device in devices})
            gpus[job] -= len(devices)
        trains = np.ones(len(jobs), dtype=np.bool_)
        trains[[jobs.index[service.job_id] for service in self._snapshot.services]] = False
        return replace(jobs, phase=phase, gpus=gpus, placements=placements).rows(trains)

    def _expected_w(self) -> float:
        """Return the power to assume for each device a service is about to get: the highest known for any, watts."""
        snapshot = self._snapshot
        of_jobs = snapshot.jobs.gpu_power_w[np.isfinite(snapshot.jobs.gpu_power_w)]
        known = [*of_jobs.tolist(), *snapshot.idle_w.tolist(), snapshot.services_w / max(snapshot.services_gpus, 1)]
        return max(known)


def _placed_together(services: Sequence[ServiceInstance], nodes: NodeTable, free: Sequence[int]) -> dict[JobId, int]:
    """Return a node for each waiting service if all fit together but would not one after another; else nothing."""
    waiting = [service for service in services if service.nodes.any()]
    sizes = [service.gpus for service in waiting]
    if len(waiting) < 2 or sum(sizes) > sum(free):
        return {}
    left, is_room = list(free), True
    for service in waiting:  # as ``_start`` would
        fits = [node for node in np.flatnonzero(service.nodes).tolist() if left[node] >= service.gpus]
        if not fits:
            is_room = False
            break
        left[min(fits, key=lambda node: (bool(nodes.asleep[node]), left[node], node))] -= service.gpus
    if is_room:
        return {}
    found = pack(sizes, np.stack([service.nodes for service in waiting]), free)
    return {} if found is None else {service.job_id: node for service, node in zip(waiting, found, strict=True)}


def _less(placement: Placement | None, devices: set[tuple[str, int]]) -> Placement | None:
    """Return a placement without these devices; None if none are left."""
    shares = [
        NodeShare(share.node_id, left)
        for share in (placement.shares if placement else ())
        if (left := tuple(device for device in share.devices if (share.node_id, device) not in devices))
    ]
    return Placement(tuple(shares)) if shares else None
