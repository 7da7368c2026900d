"""Moves that pay for themselves: jobs are stopped in order to come back in other free blocks.

A move can pay in two cases, and a round makes at most one:

- there are enough free devices for a gang, but no free block. Moving the jobs off one block costs each a restart; it
  saves the gang the wait until such a block would become free by itself. It pays if that wait is ``resize_gain``
  times the restarts together.
- a node could be powered down. Moving its jobs into free blocks of nodes that stay awake costs what their gangs draw
  while they restart; it saves what the whole node draws idle until the last of them would have ended. It pays if that
  energy is ``resize_gain`` times the cost, since the restarts also take time.

Source: PowerFlow section 5.3 asks for migration; what it may cost is ours.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from services.core.cycle.buddy import buddy
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.snapshot import Phase, Snapshot
from services.core.domain.reasons import Reason
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.view import View


def moves(snapshot: Snapshot, plan: Plan, ranking: Ranking, view: View, config: PowerflowConfig) -> list[Preempt]:
    """Return the stops of jobs that should move: the first set that pays, in node order; usually none."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    stopped = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
    starts = [action for action in plan.actions if isinstance(action, Start)]
    started = {start.job_id for start in starts}
    on: dict[int, list[int]] = defaultdict(list)
    fixed: set[int] = {nodes.index[share.node_id] for start in starts for share in start.placement.shares}
    for job in np.flatnonzero(jobs.gpus > 0).tolist():
        at = [node for node, _ in snapshot.held_by(job)]
        movable = jobs.phase[job] == Phase.RUNNING and jobs.preemptible[job] and len(at) == 1
        movable = movable and jobs.ids[job] not in snapshot.bound
        if not movable or jobs.ids[job] in stopped:
            fixed.update(at)
        elif nodes.schedulable[at[0]]:
            on[at[0]].append(job)
    runnable = set(view.jobs.tolist())
    waits = (
        (job, gpus)
        for job, gpus in zip(ranking.order.tolist(), ranking.gpus.tolist(), strict=True)
        if jobs.phase[job] == Phase.QUEUED and jobs.ids[job] not in started and job in runnable
    )
    candidates = sorted(set(on) - fixed, key=lambda node: (int(jobs.gpus[on[node]].sum()), node))
    found, moving = list[int](), _Moving(snapshot, starts, view, config, on)
    if first := next(waits, None):
        found = moving.for_a_gang(candidates, first)
    elif config.power_down and snapshot.idle_w.size and not stopped:
        found = moving.for_a_node(candidates)
    return [Preempt(jobs.ids[job], Reason.DEFRAGMENTATION, int(jobs.gpus[job])) for job in found]


@dataclass(frozen=True)
class _Moving:
    snapshot: Snapshot
    starts: list[Start]
    view: View
    config: PowerflowConfig
    on: dict[int, list[int]]  #: The jobs that may move, by node

    def for_a_gang(self, candidates: list[int], waiting: tuple[int, int]) -> list[int]:
        """Return the jobs to move off a node so that the first waiting gang finds a block there."""
        nodes, on, (job, gpus) = self.snapshot.nodes, self.on, waiting
        model = int(self.view.gpu_model[np.flatnonzero(self.view.jobs == job)[0]])
        fits = [node for node in candidates if nodes.gpu_model[node] == model and nodes.gpus[node] >= gpus]
        if not fits or int(nodes.free_gpus[nodes.gpu_model == model].sum()) < gpus:
            return []
        saved_s = min(max(map(self._left_s, on[node])) for node in fits)
        for node in fits:
            cost_s = self.config.resize_gain * self.config.restart_s * len(on[node])
            if cost_s <= saved_s and self._find_room(on[node], node, asleep=True):
                return on[node]
        return []

    def for_a_node(self, candidates: list[int]) -> list[int]:
        """Return the jobs of a node that is worth emptying."""
        snapshot, nodes, jobs, tables = self.snapshot, self.snapshot.nodes, self.snapshot.jobs, self.view.tables
        for node in (node for node in candidates if nodes.may_sleep[node]):
            on, model = self.on[node], int(nodes.gpu_model[node])
            saved_j = float(snapshot.idle_w[model]) * int(nodes.gpus[node]) * max(map(self._left_s, on))
            drawn_w = sum(float(tables.gang(job, model, int(jobs.gpus[job]))[1][-1]) for job in on)
            cost_j = self.config.resize_gain * self.config.restart_s * drawn_w
            if saved_j >= cost_j and self._find_room(on, node, asleep=False):
                return on
        return []

    def _find_room(self, moved: list[int], node: int, *, asleep: bool) -> bool:
        """Whether all these jobs find free blocks on other nodes: ones in use, or, to help a gang, also empty ones."""
        nodes, held = self.snapshot.nodes, self.snapshot.jobs.gpus
        usable = nodes.schedulable & (asleep | (~nodes.asleep & (nodes.free_gpus < nodes.gpus)))
        usable[node] = False
        elsewhere = replace(self.snapshot, nodes=replace(nodes, schedulable=usable))
        free = FreeDevices(elsewhere.nodes)
        for start in self.starts:
            shares = [(nodes.index[share.node_id], share.devices) for share in start.placement.shares]
            if all(usable[at] for at, _ in shares):
                free.take_devices(shares)
        model = int(nodes.gpu_model[node])
        widest_first = sorted(moved, key=lambda job: -int(held[job]))
        return all(buddy(elsewhere, job, int(held[job]), model, free) is not None for job in widest_first)

    def _left_s(self, job: int) -> float:
        """Return how long a running job still takes at its size; one of unknown length is assumed half done."""
        view, jobs = self.view, self.snapshot.jobs
        row = int(np.flatnonzero(view.jobs == job)[0])
        work_s = float(view.work_s[row])
        if not np.isfinite(work_s):
            return self.snapshot.now_s - float(jobs.waiting_since_s[job])
        return work_s / float(view.tables.gang(job, int(view.gpu_model[row]), int(jobs.gpus[job]))[0][-1])
