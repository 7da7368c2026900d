"""PowerFlow's scheduler: who runs, on how many GPUs, at which control value, within the power limit.

The paper re-plans at each arrival, end and scaling. Here an active round, at fixed intervals, does so: it gives out all
GPUs anew (``allocate``) and may stop and resize jobs. A passive round, triggered by an arrival, an end or a
release, stops no gang: it gives free GPUs to waiting jobs by the same greedy, taking what runs as given, and chooses
all control values anew (``watts``). A job that was stopped to be resized waits for the size it got in the last active
round. Shorter intervals between active rounds come closer to the paper; each round costs restarts.

A running job keeps its size if a larger one would not save ``resize_gain`` times its restart, or if a smaller one
would help no other job.

Source: PowerFlow section 5, Algorithm 1.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat

import numpy as np

from services.core.cycle.capacity import Capacity, model_gpus
from services.core.cycle.placers import PLACERS
from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.memory import dumped, loaded
from services.core.policies.powerflow.allocate import Room, allocate_gpus
from services.core.policies.powerflow.config import PowerflowConfig
from services.core.policies.powerflow.limit import limit_w
from services.core.policies.powerflow.migration import moves
from services.core.policies.powerflow.profiling import (
    Measurement,
    PowerflowMemory,
    begun,
    to_measure,
    under_way,
)
from services.core.policies.powerflow.view import Tables, View, choices_of, view_of
from services.core.policies.powerflow.watts import correction, set_within, stated_error_w


class Powerflow:
    """Energy-aware elastic scheduling under a power limit. Preempts and resizes in active rounds."""

    name = "powerflow"
    initial, dump, load = staticmethod(PowerflowMemory), staticmethod(dumped), partial(loaded, PowerflowMemory)

    def __init__(self, config: PowerflowConfig) -> None:
        self.config = config

    def decide(self, snapshot: Snapshot, memory: PowerflowMemory) -> tuple[Plan, PowerflowMemory]:
        """Return Algorithm 1's plan, and the memory with the sizes at which stopped jobs are to come back."""
        config, capacity = self.config, Capacity(snapshot)
        active = snapshot.trigger is Trigger.ACTIVE
        memory = under_way(snapshot, memory)
        limit = (1 - config.margin) * limit_w(snapshot, config)
        if math.isfinite(limit):
            measuring = bool(memory.measured)
            ratio = correction(snapshot, Tables(snapshot, config), memory.correction, measuring=measuring)
            memory, limit = replace(memory, correction=ratio), limit / ratio
        view = view_of(snapshot, config, capacity.model, _fixed_gpus(snapshot, memory, capacity, active=active))
        room = room_of(snapshot, capacity, limit, config)
        plan, following = self._within(snapshot, memory, capacity, view, room)
        if room.depends_on_placement and _all_idle(snapshot, plan):
            plan, following = self._within(snapshot, memory, capacity, view, room.wherever_placed())
        return plan, following

    def _within(
        self, snapshot: Snapshot, memory: PowerflowMemory, capacity: Capacity, view: View, room: Room
    ) -> tuple[Plan, PowerflowMemory]:
        config, active = self.config, snapshot.trigger is Trigger.ACTIVE
        view, sizes = allocate(snapshot, view, room, capacity, config, active=active)
        ranking = ranking_of(snapshot, view, sizes, room)
        shown = _on_their_models(snapshot, view, sizes, room)
        plan = reconcile(shown, ranking, preemption=Preemption.at(snapshot.trigger), place=PLACERS[self.placement])
        if active:
            ranked: list[int] = ranking.order.tolist()
            ids = map(snapshot.jobs.ids.__getitem__, ranked)
            memory = replace(memory, targets=dict(zip(ids, ranking.gpus.tolist(), strict=True)))
        if active and config.migration:
            plan = replace(plan, actions=(*moves(shown, plan, ranking, view, config), *plan.actions))
        found = to_measure(snapshot, plan, view.tables, config, memory)
        pinned = memory.measured.keys() | found.keys()
        all_placed = _all_placed(snapshot, view, ranking, plan)
        plan, unmeasured = set_within(snapshot, plan, view.tables, room.limit_w, config, pinned, all_placed=all_placed)
        begin = _of_gangs(snapshot, plan, {job_id: each for job_id, each in found.items() if job_id not in unmeasured})
        actions = (*plan.actions, *(each.action for each in begin))
        return replace(plan, actions=actions), begun(snapshot, memory, begin, config)

    @property
    def placement(self) -> str:
        return self.config.placement

    def power_limit_w(self, snapshot: Snapshot) -> float:
        return limit_w(snapshot, self.config)

    def power_error_w(self, snapshot: Snapshot) -> float:
        return stated_error_w(snapshot, Tables(snapshot, self.config))


def _fixed_gpus(snapshot: Snapshot, memory: PowerflowMemory, capacity: Capacity, *, active: bool) -> Ints:
    """Return the one size each job may have in this round, 0 if it may have any: (n_jobs,).

    A job that holds devices keeps its size, unless an active round may restart it and it is not being measured. In a
    passive round, one that was stopped comes back at the size the last active round gave it, if that is still possible.
    """
    jobs = snapshot.jobs
    holds = (jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)
    if active:
        free = (jobs.phase == Phase.RUNNING) & jobs.preemptible & capacity.movable
        free &= ~np.fromiter(map(memory.measured.__contains__, jobs.ids), np.bool_, len(jobs))
        return np.where(holds & ~free, jobs.gpus, 0)
    most = int(capacity.total.max(initial=0))
    targets = np.fromiter(map(memory.targets.get, jobs.ids, repeat(0)), np.int64, len(jobs))
    on_grid = (targets >= jobs.min_gpus) & (targets <= np.minimum(jobs.max_gpus, most))
    on_grid &= (targets - jobs.min_gpus) % jobs.step_gpus == 0
    return np.where(holds, jobs.gpus, np.where(on_grid, targets, 0))


def room_of(snapshot: Snapshot, capacity: Capacity, limit: float, config: PowerflowConfig) -> Room:
    """Return what there is to share out: nodes that take work, and what jobs still hold on drained ones.

    Nodes that may be powered down draw nothing while unused.
    """
    jobs, nodes = snapshot.jobs, snapshot.nodes
    n_models = len(snapshot.gpu_models)
    idle_w = snapshot.idle_w if snapshot.idle_w.size else np.zeros(n_models)
    on = capacity.model >= 0
    beside = np.bincount(capacity.model[on], (jobs.gpus - capacity.held)[on], n_models).astype(np.int64)
    goes_off = nodes.asleep | (nodes.may_sleep & config.power_down)
    stays_on = np.bincount(nodes.gpu_model, nodes.gpus * (nodes.schedulable & ~goes_off), n_models).astype(np.int64)
    drained = ~nodes.schedulable & ~(goes_off & (nodes.free_gpus == nodes.gpus))
    drained_w = float((nodes.free_gpus * idle_w[nodes.gpu_model])[drained].sum())
    per_node = int(nodes.gpus.max(initial=1))
    return Room(model_gpus(snapshot) + beside, idle_w, per_node, limit, drained_w, stays_on + beside)


def allocate(
    snapshot: Snapshot, view: View, room: Room, capacity: Capacity, config: PowerflowConfig, *, active: bool
) -> tuple[View, Ints]:
    """Return the size of each row, as ``allocate_gpus`` does, and the view with the choices it was taken from.

    An active round allocates to all jobs that may move and, if some should rather stay, once more with those fixed.
    """
    preemptible, movable = snapshot.jobs.preemptible[view.jobs], capacity.movable[view.jobs]
    keeps = view.holds & ~(preemptible & movable) if active else view.holds

    def greedily(view: View, keeps: Bools) -> Ints:
        return allocate_gpus(
            view.choices, room, gpu_model=view.gpu_model, keeps=keeps, work_s=view.work_s, config=config
        )

    sizes = greedily(view, keeps)
    if not active:
        return view, sizes
    stays = _stays(snapshot, view, sizes, room, keeps, config)
    if stays.any():
        held = snapshot.jobs.gpus[view.jobs]
        fixed = np.where(stays | (view.choices.gpus[:, 1:].sum(axis=1) == 0), np.where(view.holds, held, 0), 0)
        choices = choices_of(snapshot, view.tables, view.jobs, view.gpu_model, fixed)
        view = replace(view, choices=choices)
        sizes = greedily(view, keeps | stays)
    return view, sizes


def _stays(snapshot: Snapshot, view: View, sizes: Ints, room: Room, keeps: Bools, config: PowerflowConfig) -> Bools:
    """Return which running jobs should keep their size instead of taking the one they got: (n_rows,).

    Those are jobs whose larger size saves too little, and jobs that would shrink although everything fits anyway.
    """
    jobs = snapshot.jobs
    held = np.where(view.holds, jobs.gpus[view.jobs], 0)
    got = np.where(sizes >= 0, view.choices.gpus[np.arange(len(view.jobs)), np.maximum(sizes, 0)], 0)
    moves = view.holds & ~keeps & (jobs.phase[view.jobs] == Phase.RUNNING) & (got > 0) & (got != held)
    stays = moves & (got > held)
    grows = np.flatnonzero(stays)
    stays[grows] = _saved_s(snapshot, view, grows, held[grows], got[grows]) < config.resize_gain * config.restart_s
    shrinks = moves & (got < held)
    if shrinks.any():
        kept = np.where(stays | shrinks, held, got)
        taken = np.bincount(view.gpu_model, kept, room.gpus.size)
        runs = np.flatnonzero(kept)
        draws_w = math.fsum(_least_energy_w(view, runs, kept[runs]).tolist())
        idle_w = sum(room.idle_draw_w(gpu_model, int(held)) for gpu_model, held in enumerate(taken.tolist()))
        if bool((taken <= room.gpus).all()) and room.other_w + idle_w + draws_w <= room.limit_w:
            stays |= shrinks
    return stays


def _saved_s(snapshot: Snapshot, view: View, rows: Ints, held: Ints, got: Ints) -> Floats:
    """Return how much sooner jobs end at another size, assuming those of unknown length half done; all (n_rows,)."""
    jobs, gpu_model = view.jobs[rows], view.gpu_model[rows]
    now, then = (view.tables.default_speed(jobs, gpu_model, gpus) for gpus in (held, got))
    work_s = view.work_s[rows]
    so_far_s = snapshot.now_s - snapshot.jobs.waiting_since_s[jobs]
    return np.where(np.isfinite(work_s), work_s / now, so_far_s) * (1 - now / then)


def _least_energy_w(view: View, rows: Ints, gpus: Ints) -> Floats:
    """Return the draw of gangs at their most efficient control values: (n_rows,)."""
    speed, power_w = (each[:, 0] for each in view.tables.gangs(view.jobs[rows], view.gpu_model[rows], gpus[:, None]))
    energy_j = np.divide(power_w, speed, out=np.full(speed.shape, np.inf), where=speed > 0)
    return np.take_along_axis(power_w, energy_j.argmin(axis=1)[:, None], axis=1)[:, 0]


def ranking_of(snapshot: Snapshot, view: View, sizes: Ints, room: Room) -> Ranking:
    """Return the jobs that got a size, in order of precedence, followed by those that no model can run."""
    jobs = snapshot.jobs
    rows = np.flatnonzero(sizes >= 0)
    order, gpus = view.jobs[rows], view.choices.gpus[rows, sizes[rows]]
    nowhere = jobs.phase == Phase.QUEUED
    nowhere[view.jobs] = False
    others = np.flatnonzero(nowhere)
    left = bool((np.bincount(view.gpu_model[rows], gpus, room.gpus.size) < room.gpus).any())
    return Ranking(
        np.concatenate((order, others)),
        np.concatenate((gpus, jobs.min_gpus[others])),
        Reason.POWER_LIMIT if left and math.isfinite(room.limit_w) else Reason.NOT_ENOUGH_FREE_GPUS,
    )


def _on_their_models(snapshot: Snapshot, view: View, sizes: Ints, room: Room) -> Snapshot:
    """Return the snapshot with every job that got a size bound to the GPU model whose power was counted for it.

    One that got none may come by its tenant's guarantee on any model; so may one that got GPUs which another gang of
    its tenant has by that guarantee, unless power is limited.
    """
    if len(snapshot.gpu_models) == 1:
        return snapshot
    eligible = snapshot.jobs.eligible.copy()
    eligible[view.jobs] = False
    eligible[view.jobs, view.gpu_model] = snapshot.jobs.eligible[view.jobs, view.gpu_model]
    free = sizes < 0
    if snapshot.tenant_guarantees and math.isinf(room.limit_w):
        jobs = snapshot.jobs
        waits = jobs.phase[view.jobs] == Phase.QUEUED
        free |= waits & np.array([jobs.tenants[job] in snapshot.tenant_guarantees for job in view.jobs.tolist()], bool)
    others = view.jobs[free]
    eligible[others] = snapshot.jobs.eligible[others]
    return replace(snapshot, jobs=replace(snapshot.jobs, eligible=eligible))


def _all_placed(snapshot: Snapshot, view: View, ranking: Ranking, plan: Plan) -> bool:
    """Whether every ranked job that could runs or starts by this plan, so that no job waits for an unused node."""
    phase = snapshot.jobs.phase[ranking.order[np.isin(ranking.order, view.jobs)]]
    waits = int(((phase == Phase.QUEUED) | (phase == Phase.PREEMPTING)).sum())
    starts = sum(isinstance(action, Start) for action in plan.actions)
    return waits == starts and not any(isinstance(action, Preempt) for action in plan.actions)


def _all_idle(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether no job holds a device and this plan starts none."""
    return not snapshot.jobs.gpus.any() and not any(isinstance(action, Start) for action in plan.actions)


def _of_gangs(snapshot: Snapshot, plan: Plan, found: Mapping[JobId, Measurement]) -> list[Measurement]:
    """Return the measurements of gangs that the plan starts or that are already running."""
    jobs, going = snapshot.jobs, (Phase.STARTING, Phase.RUNNING)
    starts = {action.job_id for action in plan.actions if isinstance(action, Start)}
    return [each for job_id, each in found.items() if job_id in starts or jobs.phase[jobs.index[job_id]] in going]
