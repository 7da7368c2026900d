"""The layer over every policy that keeps windows: GPUs of a reservation are its holder's, those of maintenance free.

Until a window begins, its GPUs are used by what will be gone by then: gangs that end before it by their limit, and
gangs that may be stopped, which are stopped their grace period ahead. So a policy sees each GPU model split by which of
the waiting jobs may start on its nodes, and gangs that have to go as stopping. Of a node that is reserved in part, no
more gangs are stopped than needed: those of lowest priority first, and among these the youngest.

In a reservation, waiting jobs of its holder start on its GPUs, oldest first, before the policy decides, each as wide as
fits; they are not stopped while it lasts. What the holder has not taken after ``LENT_AFTER_S`` is lent to gangs that
may be stopped, and is taken back when a job of the holder waits. In maintenance, nodes take no work.

Service instances, and jobs on slices, are placed on nodes without windows. Nothing is remembered: the same snapshot and
windows give the same result.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from services.core.cycle.capacity import left_free, model_gpus, resumed_size
from services.core.cycle.levels import show_within, with_within_reasons
from services.core.cycle.plan import Action, Hold, Plan, Preempt, Start
from services.core.cycle.policy import Layer, Memory, Policy
from services.core.cycle.services import without_devices
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, JobTable, Snapshot
from services.core.domain.arrays import Bools, Floats
from services.core.domain.carbon import CarbonCurve
from services.core.domain.ids import NodeId
from services.core.domain.placement import NodeShare, Placement
from services.core.domain.reasons import Reason
from services.core.domain.windows import Ending, Window, most_taken

SHORTEST_S = 600.0  #: A gang that a window would stop sooner than this is not started there
LENT_AFTER_S = 600.0  #: How long the GPUs of a reservation are kept from its start for a holder without waiting jobs
MARGIN_S = 10.0  #: Gangs are stopped so much earlier than their grace period before a window
UNKNOWN = Ending(math.inf)


def closed(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with GPU models split by who may start on their nodes, and nodes in maintenance closed."""
    jobs, nodes, now_s = snapshot.jobs, snapshot.nodes, snapshot.now_s
    waits: Bools = (jobs.phase == QUEUED) | (jobs.phase == PREEMPTING)
    may: list[Bools] = [np.ones(len(jobs), dtype=np.bool_)] * len(nodes)
    taken, schedulable = np.zeros(len(nodes), dtype=np.bool_), nodes.schedulable.copy()
    in_force: list[list[int]] = []
    endings = endings_of(snapshot)
    for window in snapshot.windows:
        here = [nodes.index[node_id] for node_id in window.gpus if node_id in nodes.index]
        allowed = ~waits | _allowed(snapshot, window, endings)
        for node in here:
            may[node] = may[node] & allowed
        taken[here] = True
        if window.start_s <= now_s and window.holder is None:
            schedulable[here] = False
        elif window.start_s <= now_s:
            in_force.append(here)
    for here in in_force * len(in_force):  # a gang may span the nodes of a reservation, whatever else is ahead of each
        together = np.logical_and.reduce([may[node] for node in here]) if here else waits
        for node in here:
            may[node] = together
    groups: dict[tuple[int, bytes], int] = {}
    columns: list[Bools] = []
    of: list[int] = []
    for model, each in zip(nodes.gpu_model.tolist(), may, strict=True):
        group = groups.setdefault((model, each.tobytes()), len(groups))
        of.append(group)
        if group == len(columns):
            columns.append(jobs.eligible[:, model] & each)
    for model in set(range(len(snapshot.gpu_models))).difference(model for model, _ in groups):
        groups[model, b""] = len(groups)
        columns.append(jobs.eligible[:, model])
    models = [model for model, _ in groups]
    eligible = np.stack(columns, axis=1) if columns else jobs.eligible
    split: dict[str, Any] = {
        name: getattr(snapshot, name)[models] if getattr(snapshot, name).size else getattr(snapshot, name)
        for name in ("idle_w", "host_w", "gpu_memory_gib", "limit_range_w")
    }
    return snapshot.again(
        **split,
        gpu_models=tuple(snapshot.gpu_models[model] for model in models),
        settable=tuple(snapshot.settable[model] for model in models) if snapshot.settable else (),
        control_curves=tuple(
            {
                (at, kind): curve
                for at, model in enumerate(models)
                for (of_model, kind), curve in each.items()
                if of_model == model
            }
            for each in snapshot.control_curves
        ),
        undivided=frozenset(at for at, model in enumerate(models) if model in snapshot.undivided),
        gangs=tuple({at: each[model] for at, model in enumerate(models) if model in each} for each in snapshot.gangs),
        jobs=JobTable.of_columns({**vars(jobs), "eligible": eligible}),
        nodes=replace(nodes, gpu_model=np.array(of, dtype=np.int64), schedulable=schedulable),
        services=tuple(replace(each, nodes=each.nodes & ~taken) for each in snapshot.services),
        slice_jobs=tuple(
            replace(each, units=each.units & ~taken[[unit.node for unit in snapshot.slice_units]])
            for each in snapshot.slice_jobs
        ),
    )


def endings_of(snapshot: Snapshot) -> tuple[Floats, Floats]:
    """Return how much longer the run of each job may take, and its grace period, seconds: both (n_jobs,)."""
    found = [snapshot.endings.get(job_id, UNKNOWN) for job_id in snapshot.jobs.ids]
    left_s, grace_s = np.array(found, dtype=np.float64).reshape(-1, 2).T
    return left_s, grace_s


def _of_holder(snapshot: Snapshot, window: Window) -> Bools:
    return np.fromiter((tenant == window.holder for tenant in snapshot.jobs.tenants), np.bool_, len(snapshot.jobs))


def _allowed(snapshot: Snapshot, window: Window, endings: tuple[Floats, Floats]) -> Bools:
    """Return which jobs may start on the nodes of a window: (n_jobs,)."""
    left_s, grace_s = endings
    ahead_s, holder = window.start_s - snapshot.now_s, _of_holder(snapshot, window)
    if ahead_s <= 0:
        return holder | snapshot.jobs.preemptible
    return holder | (left_s <= ahead_s) | (snapshot.jobs.preemptible & (grace_s + MARGIN_S + SHORTEST_S <= ahead_s))


class Keeping(Layer[Memory]):
    """A policy whose plans keep windows; it is given snapshots that ``closed`` returned."""

    def __init__(self, policy: Policy[Memory], before: Snapshot) -> None:
        super().__init__(policy)
        self._before = before

    def decide(self, snapshot: Snapshot, memory: Memory) -> tuple[Plan, Memory]:
        """Return the policy's plan, with what windows require, and its memory."""
        needs = _Needs(snapshot)
        for window in snapshot.windows:
            needs.keep(window)
        plan, following = self.inner.decide(needs.shown(), memory)
        again_s = min(plan.look_again_s or math.inf, needs.again_s)
        actions = (*needs.stops.values(), *needs.starts.values(), *plan.actions)
        plan = replace(plan, actions=actions, look_again_s=again_s if again_s < math.inf else None)
        return self._with_reasons(plan) if snapshot.reasons else plan, following

    def _with_reasons(self, plan: Plan) -> Plan:
        """Return the plan, giving jobs that would have room but for windows that reason."""
        before = show_within(self._before) if self._before.within else self._before
        jobs, endings = before.jobs, endings_of(before)  # of all jobs, also those that no policy is shown
        kept_off = np.zeros(len(jobs), dtype=np.bool_)
        nodes = before.nodes
        for window in before.windows:
            in_force = window.start_s <= before.now_s
            models = nodes.gpu_model[[nodes.index[each] for each in window.gpus if each in nodes.index]]
            kept_off |= jobs.eligible[:, models.astype(np.int64)].any(axis=1) & ~(
                _of_holder(before, window) if in_force else _allowed(before, window, endings)
            )
        rooms = {
            Reason.NOT_ENOUGH_FREE_GPUS: left_free(before, plan.actions),
            Reason.NO_ELIGIBLE_NODE: model_gpus(before),
        }

        def explained(action: Action) -> Action:
            if not isinstance(action, Hold) or (room := rooms.get(action.reason)) is None:
                return action
            job = jobs.index[action.job_id]
            but_for = kept_off[job] and (room[jobs.eligible[job]] >= jobs.min_gpus[job]).any()
            return Hold(action.job_id, Reason.RESERVED) if but_for else action

        plan = replace(plan, actions=tuple(map(explained, plan.actions)))
        return with_within_reasons(self._before, plan) if self._before.within else plan


class _Needs:
    """What windows require in one round: who stops, who of the holders starts, and which free devices stay free."""

    def __init__(self, snapshot: Snapshot) -> None:
        jobs, nodes = snapshot.jobs, snapshot.nodes
        self.stops: dict[int, Preempt] = {}
        self.starts: dict[int, Start] = {}
        self.again_s = math.inf
        self._snapshot = snapshot
        self._left_s, self._grace_s = endings_of(snapshot)
        self._free = [list(devices) for devices in nodes.free_devices]
        self._kept: dict[int, set[int]] = defaultdict(set)
        self._stays = np.zeros(len(jobs), dtype=np.bool_)  # of a holder, on what it has reserved
        self._on: dict[int, dict[int, int]] = defaultdict(dict)
        self._held = defaultdict[str, int](int, jobs.gpus_by_tenant())
        for job in np.flatnonzero(jobs.gpus > 0).tolist():
            for node, taken in snapshot.held_by(job):
                self._on[node][job] = len(taken)

    def keep(self, window: Window) -> None:
        """Add what one window requires."""
        snapshot, jobs, nodes, now_s = self._snapshot, self._snapshot.jobs, self._snapshot.nodes, self._snapshot.now_s
        found = sorted((nodes.index[each], gpus) for each, gpus in window.gpus.items() if each in nodes.index)
        taken = {node: min(gpus, nodes.gpus.item(node)) for node, gpus in found}
        in_force = window.start_s <= now_s
        its_own = _of_holder(snapshot, window)
        left = dict(taken)
        for node in taken:
            for job, devices in self._on[node].items():
                if its_own[job] and jobs.phase[job] in (STARTING, RUNNING) and job not in self.stops:
                    left[node] = max(left[node] - devices, 0)
                    self._stays[job] |= in_force
        if in_force and window.holder is not None:
            waits = self._start(left, np.flatnonzero(its_own & (jobs.phase == QUEUED)).tolist())
            lent_s = window.start_s + LENT_AFTER_S
            if now_s >= lent_s:
                for node in left:
                    left[node] = min(left[node], waits)
                    waits -= left[node]
            self._look(lent_s, window.end_s)
        else:
            self._look(window.start_s, window.end_s)
        for node, gpus in left.items():
            self._make_room(node, gpus, its_own, 0.0 if in_force else window.start_s)
            if in_force and window.holder is not None:
                self._kept[node].update(self._free[node][:gpus])
                del self._free[node][:gpus]

    def shown(self) -> Snapshot:
        """Return the snapshot that the policy sees."""
        snapshot, jobs, nodes = self._snapshot, self._snapshot.jobs, self._snapshot.nodes
        phase, gpus, placements = jobs.phase.copy(), jobs.gpus.copy(), list(jobs.placements)
        phase[list(self.stops)] = PREEMPTING
        for job, start in self.starts.items():
            phase[job], gpus[job], placements[job] = STARTING, start.gpus, start.placement
        free = tuple(tuple(sorted((*each, *self._kept[node]))) for node, each in enumerate(self._free))
        counts = np.fromiter(map(len, free), np.int64, len(nodes))
        kept = {node: devices for node, devices in self._kept.items() if devices}
        shown = replace(nodes, free_devices=free, free_gpus=counts)
        own: dict[str, Any] = {"phase": phase, "gpus": gpus, "placements": placements}
        return snapshot.again(
            jobs=JobTable.of_columns({**vars(jobs), **own, "preemptible": jobs.preemptible & ~self._stays}),
            nodes=without_devices(shown, kept) if kept else shown,
            services_gpus=snapshot.services_gpus + sum(map(len, kept.values())),
        )

    def _look(self, *times_s: float) -> None:
        self.again_s = min([self.again_s, *(each for each in times_s if each > self._snapshot.now_s)])

    def _start(self, left: dict[int, int], waiting: list[int]) -> int:
        """Start waiting jobs on reserved devices that are free, and return how many GPUs those need that do not fit."""
        snapshot, jobs, nodes, needs = self._snapshot, self._snapshot.jobs, self._snapshot.nodes, 0
        others = {each.job_id for each in (*snapshot.services, *snapshot.slice_jobs)}.union(snapshot.bound)
        for job in sorted(waiting, key=lambda job: (-jobs.priority[job], jobs.submitted_s[job], jobs.ids[job])):
            if job in self.starts or jobs.ids[job] in others:
                continue
            room = {node: min(left[node], len(self._free[node])) for node in left if nodes.schedulable[node]}
            models: list[int] = np.flatnonzero(jobs.eligible[job]).tolist()
            level, together = snapshot.within.get(jobs.ids[job]), defaultdict[tuple[int, int], list[int]](list)
            for node in room if level is None or level >= 0 else ():
                if nodes.gpu_model[node] in models:
                    domain = 0 if level is None else int(nodes.domains[node, level])
                    together[models.index(int(nodes.gpu_model[node])), domain].append(node)
            on = max((together[each] for each in sorted(together)), key=lambda on: sum(map(room.__getitem__, on)),
                     default=list[int]())  # fmt: skip
            low, high, step = (int(column[job]) for column in (jobs.min_gpus, jobs.max_gpus, jobs.step_gpus))
            tenant = jobs.tenants[job]
            most = min(high, sum(map(room.__getitem__, on)))
            if tenant in snapshot.tenant_gpu_quota:
                most = min(most, snapshot.tenant_gpu_quota[tenant] - self._held[tenant])
            if most < low:
                needs += low if together else 0  # what it may not use is not kept for it
                continue
            size = gpus = low + (most - low) // step * step
            shares: list[NodeShare] = []
            for node in sorted(on, key=lambda node: (-room[node], node)):
                if gpus and (count := min(room[node], gpus)):
                    shares.append(NodeShare(nodes.ids[node], tuple(self._free[node][:count])))
                    del self._free[node][:count]
                    left[node] -= count
                    gpus -= count
            self._held[tenant] += size
            self._stays[job] = True
            self.starts[job] = Start(jobs.ids[job], Placement(tuple(shares)), Reason.RESERVED)
        return needs

    def _make_room(self, node: int, gpus: int, its_own: Bools, start_s: float) -> None:
        """Stop gangs so that this many GPUs of a node are free at ``start_s``, UTC seconds; 0: as soon as can be."""
        jobs, now_s = self._snapshot.jobs, self._snapshot.now_s
        gpus -= len(self._free[node])
        goes_on: list[int] = []
        for job, devices in self._on[node].items():
            if job in self.stops or jobs.phase[job] == PREEMPTING or now_s + self._left_s[job] <= start_s:
                gpus -= devices
            elif jobs.preemptible[job] and not its_own[job]:
                goes_on.append(job)
        for job in sorted(goes_on, key=lambda job: (jobs.priority[job], -jobs.waiting_since_s[job], jobs.ids[job])):
            if gpus <= 0:
                break
            gpus -= self._on[node][job]
            stop_s = start_s - self._grace_s.item(job) - MARGIN_S
            if now_s < stop_s:
                self._look(stop_s)
                continue
            self.stops[job] = Preempt(jobs.ids[job], Reason.RESERVED, resumed_size(jobs, job))


DAY_S = 86_400.0


@dataclass(frozen=True)
class Slot:
    """GPUs of one model, in one zone, that can be had for a time."""

    start_s: float  #: UTC seconds
    gpus: Mapping[NodeId, int]  #: How many of each node
    gpu_model: int
    zone: int
    intensity: float  #: Mean of the zone over the slot, gCO2/kWh
    estimated: bool  #: Whether the forecast ends before it does, so that its last day stands in for later ones


class Stuck(NamedTuple):
    """A gang's part on a node that may not be stopped."""

    until_s: float  #: When the gang has ended at the latest, UTC seconds; inf: unknown
    job: int
    node: int
    gpus: int


def stuck(snapshot: Snapshot) -> list[Stuck]:
    """Return what holds GPUs and may not be stopped."""
    jobs = snapshot.jobs
    until_s = snapshot.now_s + endings_of(snapshot)[0]
    stays: list[int] = np.flatnonzero((jobs.phase != QUEUED) & ~jobs.preemptible).tolist()
    on = ((job, *held) for job in stays for held in snapshot.held_by(job))
    return [Stuck(until_s.item(job), job, node, len(devices)) for job, node, devices in on]


def slots(snapshot: Snapshot, usable: Bools, gpus: int, lasts_s: float, starts_s: Iterable[float]) -> list[Slot]:
    """Return the cleanest way to have this many GPUs from each of these times on, if any, the cleanest first.

    Args:
        usable: (n_nodes,) the nodes that may be reserved.
        lasts_s: How long they are wanted, seconds.
        starts_s: UTC seconds.
    """
    nodes, found = snapshot.nodes, list[Slot]()
    until_s, _, on, held = np.array(stuck(snapshot), dtype=np.float64).reshape(-1, 4).T
    on = on.astype(np.int64)
    for start_s in starts_s:
        room = nodes.gpus - np.bincount(on, held * (until_s > start_s), len(nodes)).astype(np.int64)
        for node_id in {node_id for window in snapshot.windows for node_id in window.gpus if node_id in nodes.index}:
            room[nodes.index[node_id]] -= most_taken(snapshot.windows, node_id, start_s, start_s + lasts_s)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node in np.flatnonzero(usable & (room > 0)).tolist():
            groups[int(nodes.zone[node]), int(nodes.gpu_model[node])].append(node)
        ways: list[Slot] = []
        for (zone, model), members in groups.items():
            taken, left = dict[NodeId, int](), gpus
            for node in sorted(members, key=lambda node: (-room[node], nodes.ids[node])):
                if left:
                    taken[nodes.ids[node]] = min(int(room[node]), left)
                    left -= taken[nodes.ids[node]]
            if not left:
                mean, estimated = mean_ahead(snapshot.outlooks[zone].curve, start_s, start_s + lasts_s)
                ways.append(Slot(start_s, taken, model, zone, mean, estimated))
        found += sorted(ways, key=lambda slot: (slot.intensity, len(slot.gpus), slot.zone, slot.gpu_model))[:1]
    return sorted(found, key=lambda slot: (slot.intensity, slot.start_s))


def mean_ahead(curve: CarbonCurve, start_s: float, end_s: float) -> tuple[float, bool]:
    """Return the mean intensity of a time ahead, gCO2/kWh, and whether it is that of the same hours on earlier days."""
    days = max(math.ceil((end_s - curve.end_s) / DAY_S), 0)
    return curve.mean(start_s - days * DAY_S, end_s - days * DAY_S), days > 0
