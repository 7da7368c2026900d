"""Jobs that are bound to nodes, because their checkpoints are there and nowhere else.

Such a job starts on exactly these nodes, all of them, in the order in which its gang had them, so that each rank finds
its part where it was written; otherwise it waits. ``run_cycle`` shows policies what it may still have: the sizes that
its nodes can hold, and no eligible GPU model while one of its nodes takes no work. ``reconcile`` counts what bound jobs
get node by node (``NodeRoom``) and places them before all others. As elsewhere, the policy's order decides who gets a
node's GPUs; free ones are kept for a bound job that waits for the rest.

Nothing here is used while no job is bound.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from services.core.cycle.levels import holding, sums, within_of
from services.core.cycle.placing import FreeDevices, block_among, fewest_nodes
from services.core.cycle.plan import Action, Hold, Plan, Start
from services.core.cycle.rounds import stopping
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, STARTING, JobTable, Snapshot
from services.core.domain.arrays import Bools, Ints
from services.core.domain.errors import PlanError
from services.core.domain.ids import JobId, NodeId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason

_SHORT = frozenset(
    {Reason.NOT_ENOUGH_FREE_GPUS, Reason.NO_ELIGIBLE_NODE, Reason.NOT_ENOUGH_FREE_SLICES, Reason.NO_SUCH_SLICE}
)
"""Reasons that are said of all nodes."""


def show_bound(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with bound jobs restricted to the sizes and GPU models that their nodes allow."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    low, high, eligible = jobs.min_gpus.copy(), jobs.max_gpus.copy(), jobs.eligible.copy()
    for job_id, on in snapshot.bound.items():
        job = jobs.index.get(job_id)
        if job is None:
            continue
        sizes = _sizes(snapshot, job, on)
        if sizes is None:
            if jobs.phase[job] == QUEUED:
                eligible[job] = False
            continue
        low[job], high[job] = sizes
        eligible[job] &= np.arange(len(snapshot.gpu_models)) == nodes.gpu_model[nodes.index[on[0]]]
    shown = JobTable.of_columns({**jobs.__dict__, "min_gpus": low, "max_gpus": high, "eligible": eligible})
    slices = tuple(replace(each, units=each.units & _units(snapshot, each.job_id)) for each in snapshot.slice_jobs)
    return snapshot.again(jobs=shown, slice_jobs=slices)


def _units(snapshot: Snapshot, job_id: JobId) -> Bools:
    """Return which slices a job may have, given the node to which it is bound: (n_slice_units,)."""
    on, ids = snapshot.bound.get(job_id), snapshot.nodes.ids
    here = (on is None or (ids[unit.node],) == on for unit in snapshot.slice_units)
    return np.fromiter(here, np.bool_, len(snapshot.slice_units))


def _sizes(snapshot: Snapshot, job: int, on: Sequence[NodeId]) -> tuple[int, int] | None:
    """Return the smallest and the largest gang that a job can have on its nodes; None if it can have none."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    rows = [nodes.index[node_id] for node_id in on if node_id in nodes.index]
    if len(rows) < len(on) or not nodes.schedulable[rows].all() or len(set(nodes.gpu_model[rows].tolist())) > 1:
        return None
    least, most, step, now = (each.item(job) for each in (jobs.min_gpus, jobs.max_gpus, jobs.step_gpus, jobs.gpus))
    whole = sum(map(nodes.gpus.item, rows))
    low = least + max(-((least - len(rows)) // step), 0) * step
    high = least + (min(most, whole) - least) // step * step
    if now:  # whatever became of its nodes, it has what it has
        low, high = min(low, now), max(high, now)
    return (low, high) if low <= high else None


def with_bound_reasons(snapshot: Snapshot, plan: Plan) -> Plan:
    """Return the plan, giving bound jobs that wait for their nodes that reason."""

    def explained(action: Action) -> Action:
        if not isinstance(action, Hold) or (on := snapshot.bound.get(action.job_id)) is None:
            return action
        reason = why_not_there(snapshot, action.job_id, on)
        if reason is not None:
            return Hold(action.job_id, reason)
        if action.reason in _SHORT:
            return Hold(action.job_id, Reason.CHECKPOINT_NODE_BUSY, action.expected_start_s)
        return action

    return replace(plan, actions=tuple(map(explained, plan.actions)))


def why_not_there(snapshot: Snapshot, job_id: JobId, on: Sequence[NodeId]) -> Reason | None:
    """Return why a job cannot start on the nodes to which it is bound, however free they are; None if it can."""
    nodes, job = snapshot.nodes, snapshot.jobs.index.get(job_id)
    if any(node_id not in nodes.index for node_id in on):
        return Reason.CHECKPOINT_NODE_AWAY
    can = job is None or _sizes(snapshot, job, on) is not None
    for each in snapshot.slice_jobs:
        if each.job_id == job_id:
            can = bool((each.units & _units(snapshot, job_id)).any())
    return None if can else Reason.CHECKPOINT_NODE_CLOSED


def check_bound(snapshot: Snapshot, starts: Iterable[Start]) -> None:
    """Raise unless bound jobs start on the nodes to which they are bound; ``PlanError`` names the job."""
    for start in starts:
        on = snapshot.bound.get(start.job_id)
        where = tuple(share.node_id for share in start.placement.shares)
        if on is not None and where != on:
            there, here = ", ".join(where), ", ".join(on)
            raise PlanError(f"job {start.job_id} cannot start on {there}: its checkpoint is on {here}")


def is_bound_elsewhere(snapshot: Snapshot, job_id: JobId, placement: Placement) -> bool:
    on = snapshot.bound.get(job_id)
    return on is not None and on != tuple(share.node_id for share in placement.shares)


def bound_among(snapshot: Snapshot, which: Ints) -> Bools:
    """Return which of these jobs are bound to nodes: (n_which,)."""
    if not snapshot.bound:
        return np.zeros(which.size, dtype=np.bool_)
    ids, bound = snapshot.jobs.ids, snapshot.bound
    return np.fromiter((ids[job] in bound for job in which.tolist()), np.bool_, which.size)


class NodeRoom:
    """What is left of the nodes' GPUs as a ranking is filled, for jobs that may not start just anywhere.

    These are the jobs that are bound to nodes, and the gangs that must lie within one domain of a level: each of them
    claims GPUs of certain nodes; other jobs claim none, since they are placed last and anywhere. But a job that already
    runs and continues keeps its GPUs.
    """

    def __init__(self, snapshot: Snapshot, *, reclaims: bool) -> None:
        """Count the available GPUs; with ``reclaims``, including those of jobs that may be stopped."""
        jobs, nodes = snapshot.jobs, snapshot.nodes
        index, takes = nodes.index, nodes.schedulable
        self._nodes = nodes
        self.shares: dict[int, list[tuple[int, int]]] = {}
        """Where each bound job starts: (node, number of GPUs), in the order of its nodes."""
        self.kept_back: dict[int, int] = defaultdict(int)
        """Free devices that nothing else may get in this round, by node."""
        self._on: dict[int, list[int]] = {}
        for job_id, on in snapshot.bound.items():
            job = jobs.index.get(job_id)
            if job is not None and all(node_id in index for node_id in on):
                self._on[job] = [index[node_id] for node_id in on]
        self._within = {jobs.index[each]: level for each, level in within_of(snapshot).items() if level >= 0}
        for job_id in snapshot.bound:
            self._within.pop(jobs.index.get(job_id, -1), None)
        self._free: Ints = np.where(takes, nodes.free_gpus, 0)
        self._soon: Ints = self._free.copy()  #: With those of jobs that are stopping
        self._room: Ints = self._free.copy()
        self._held: dict[int, list[tuple[int, int]]] = {}
        self._claimed: dict[int, tuple[Bools, list[tuple[int, int]]]] = {}
        self._largest: dict[tuple[int, int], int] = {}
        goes = set(stopping(snapshot).tolist())
        for job in np.flatnonzero(jobs.gpus > 0).tolist():
            held = [(node, len(devices)) for node, devices in snapshot.held_by(job) if takes[node]]
            for node, gpus in held:
                self._soon[node] += gpus if job in goes else 0
                if job in goes or (reclaims and jobs.preemptible[job] and jobs.phase[job] != PREEMPTING):
                    self._room[node] += gpus
            if held and jobs.phase[job] in (STARTING, RUNNING):
                self._held[job] = held

    def is_bound(self, job: int) -> bool:
        return job in self._on or job in self._within

    def fitting(self, job: int, gpus: int, models: int) -> int:
        """Return on which of these GPU models, as bits, a job's nodes have this many GPUs left, free or not."""
        if job in self._on:
            return models if self._spread(self._on[job], gpus, self._room) is not None else 0
        if job not in self._within:
            return models
        level, found = self._within[job], 0
        for model in (each for each in range(models.bit_length()) if models >> each & 1):
            if (level, model) not in self._largest:
                room = np.where(self._nodes.gpu_model == model, self._room, 0)
                self._largest[level, model] = int(sums(self._nodes.domains[:, level], room).max(initial=0))
            found |= (self._largest[level, model] >= gpus) << model
        return found

    def keeps(self, job: int) -> bool:
        """Whether the GPUs that a running job holds have not been claimed by jobs ranked before it."""
        return all(self._room[node] >= gpus for node, gpus in self._held.get(job, ()))

    def keep(self, job: int) -> None:
        self._take(self._room, self._held.get(job, ()))

    def claim(self, job: int, gpus: int, model: int) -> None:
        """Count as taken the GPUs that a job gets, now or later, if it may not start anywhere.

        A gang that must lie within a domain claims the one in which it can start now or, if there is none, soonest.
        """
        if job in self._on:
            self._take(self._room, self._spread(self._on[job], gpus, self._room) or ())
        if job not in self._within:
            return
        of, level = self._nodes.domains, self._within[job]
        of_model = self._nodes.gpu_model == model
        free, soon, room = (np.where(of_model, np.minimum(each, self._room), 0)
                            for each in (self._free, self._soon, self._room))  # fmt: skip
        tries = [*((free, each) for each in range(level + 1)), (soon, level), (room, level)]
        for count, each in tries:
            nodes = next(holding(of, count, gpus, each), None)
            if nodes is not None:
                shares = fewest_nodes(np.where(nodes, count, 0), gpus) or []
                self._claimed[job] = nodes, shares if count is free else []
                self._take(self._room, shares)
                self._take(self._soon, shares)
                return

    def has_free(self, job: int, gpus: int) -> bool:
        if job in self._within:
            return bool(self._claimed[job][1])
        return self._spread(self._on[job], gpus, self._free) is not None

    def start(self, job: int, gpus: int) -> None:
        """Give a job free GPUs of its nodes; the caller checks that there are enough."""
        if job in self._within:
            self._take(self._free, self._claimed[job][1])
        else:
            self.shares[job] = self._spread(self._on[job], gpus, self._free) or []
            self._take(self._free, self.shares[job])

    def keep_back(self, job: int, gpus: int, most: int, model: int) -> int:
        """Keep free GPUs of its nodes for a job that waits for more, at most ``most``; return how many."""
        kept = 0
        for node in self._on[job] if job in self._on else self._best_domain(job, gpus, model):
            count = min(int(self._free[node]), gpus - kept, most - kept)
            self._free[node] -= count
            self.kept_back[node] += count
            kept += count
        return kept

    def _best_domain(self, job: int, gpus: int, model: int) -> list[int]:
        """Return the nodes of the domain that a gang has claimed, or else of the one that has most of what it needs."""
        if job in self._claimed:
            return np.flatnonzero(self._claimed[job][0] & (self._nodes.gpu_model == model)).tolist()
        of, its = self._nodes.domains[:, self._within[job]], self._nodes.gpu_model == model
        whole = sums(of, np.where(its & self._nodes.schedulable, self._nodes.gpus, 0))
        room = np.where(whole >= gpus, sums(of, np.where(its, self._room, 0)), -1)
        return np.flatnonzero((of == room.argmax()) & its).tolist() if room.size and room.max() >= 0 else []

    def _take(self, left: Ints, shares: Iterable[tuple[int, int]]) -> None:
        for node, gpus in shares:
            left[node] -= gpus
        self._largest.clear()

    def place(self, job: int, free: FreeDevices) -> Placement:
        """Take the devices of a bound job that starts; on a single node, from the smallest block that suffices."""
        shares = self.shares[job]
        if len(shares) > 1:
            return free.take(shares)
        [(node, gpus)] = shares
        return free.take_devices([(node, block_among(free.on(node), gpus))])

    @staticmethod
    def _spread(on: Sequence[int], gpus: int, left: Ints) -> list[tuple[int, int]] | None:
        """Return how many GPUs a gang gets on each node, at least one on each; None if there are not enough."""
        has: list[int] = left[list(on)].tolist()
        if min(has) < 1 or sum(has) < gpus or gpus < len(on):
            return None
        shares: list[tuple[int, int]] = []
        for at, (node, count) in enumerate(zip(on, has, strict=True)):
            gives = min(count, gpus - (len(on) - at - 1))
            shares.append((node, gives))
            gpus -= gives
        return shares


class Widening:
    """How far bound jobs may grow together on their nodes, for policies that share out the GPUs of all nodes.

    What is left of each node is what is taken neither by the smallest gangs of the jobs bound to it nor by other jobs.
    """

    def __init__(self, snapshot: Snapshot, which: Ints, gpus: Ints) -> None:
        """Take the bound jobs among these, each with its minimum number of GPUs: both (n_which,)."""
        jobs, nodes = snapshot.jobs, snapshot.nodes
        self._on: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}
        if not snapshot.bound:
            return
        index = nodes.index
        at, smallest = cast(list[int], which.tolist()), cast(list[int], gpus.tolist())
        for job, least in zip(at, smallest, strict=True):
            on = snapshot.bound.get(jobs.ids[job])
            if on is not None and all(node_id in index for node_id in on):
                self._on[job] = [index[node_id] for node_id in on]
                self._left.update((node, nodes.gpus.item(node)) for node in self._on[job] if node not in self._left)
                self.take(job, least)
        for job in np.flatnonzero(jobs.gpus > 0).tolist() if self._on else ():
            for node, devices in snapshot.held_by(job) if job not in self._on else ():
                if node in self._left:
                    self._left[node] -= len(devices)

    def allows(self, job: int, more: int) -> bool:
        """Whether the job's nodes have this many more GPUs left; always true for a job that is not bound."""
        return job not in self._on or sum(max(self._left[node], 0) for node in self._on[job]) >= more

    def take(self, job: int, more: int) -> None:
        on = self._on.get(job, ())
        for at, node in enumerate(on):
            count = more if at == len(on) - 1 else min(max(self._left[node], 0), more)
            self._left[node] -= count
            more -= count
