"""Pollux' rounds.

An active round finds every job's size anew (``active_sizes``), per GPU model: Pollux knows one kind of GPU, so that
here a job stays with the model it sits on, and a waiting one goes where most GPUs per job are. A passive round fills
free GPUs with the jobs that were given some, then with those that came since, at their smallest size.

Users' priorities come first: a job of a higher priority goes without GPUs only if all below it do.

Source: Pollux section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np

from lab.policies.pollux.allocate import least_cost_sizes
from lab.policies.pollux.config import PolluxConfig
from lab.policies.pollux.memory import PolluxMemory, dump_memory, load_memory
from lab.policies.pollux.packing import Apart, even_sizes, fit, spanned_nodes
from lab.policies.pollux.speedup import costs, restart_factor, speedups
from services.core.cycle.capacity import Capacity, possible_sizes
from services.core.cycle.placing import consolidated
from services.core.cycle.plan import Plan, Preempt
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.cycle.sorting import order_by, wishes_first
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.policies.batches import goodput_of, with_batches

NOTHING = 1e-9
"""A cost that is rounding."""
LEVELS = 4
"""How many levels of priority count in sharing out; with more, costs would lose their digits."""


class Pollux:
    """Co-adaptive scheduling for goodput. Preempts and resizes in active rounds."""

    name = "pollux"

    def __init__(self, config: PolluxConfig) -> None:
        self.config = config

    def initial(self) -> PolluxMemory:
        """Return the memory of a policy that has given nothing."""
        return PolluxMemory()

    def decide(self, snapshot: Snapshot, memory: PolluxMemory) -> tuple[Plan, PolluxMemory]:
        """Return the plan towards the sizes of the greatest fitness, or in a passive round towards the last ones."""
        jobs = snapshot.jobs
        active = snapshot.trigger is Trigger.ACTIVE
        if active:
            memory = self._following(snapshot, memory)
        given = np.fromiter(map(memory.sizes.get, jobs.ids, repeat(0)), np.int64, len(jobs))
        order = placing_order(snapshot, memory)
        stays = holding(snapshot) & ((given == 0) | (given == jobs.gpus))
        gpus = np.where(stays, jobs.gpus, possible_sizes(snapshot, given))
        ranking = Ranking(order, gpus[order])
        place = Apart(snapshot) if self.config.avoid_interference else consolidated
        plan = reconcile(snapshot, ranking, preemption=Preemption.at(snapshot.trigger), place=place)
        plan = with_batches(snapshot, plan)
        stopped = [action.job_id for action in plan.actions if isinstance(action, Preempt)]
        if stopped:
            restarts = dict(memory.restarts)
            restarts.update((job_id, restarts.get(job_id, 0) + 1) for job_id in stopped)
            memory = replace(memory, restarts=restarts)
        return plan, memory

    def dump(self, memory: PolluxMemory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        return dump_memory(memory)

    def load(self, stored: dict[str, Any]) -> PolluxMemory:
        """Return the memory that ``dump`` wrote; what is missing is empty."""
        return load_memory(stored)

    def _following(self, snapshot: Snapshot, memory: PolluxMemory) -> PolluxMemory:
        """Return the memory with this round's sizes, of live jobs alone."""
        jobs = snapshot.jobs
        predicted = (jobs.goodput_curve >= 0) | (jobs.speed_curve >= 0)
        unknown = zip(jobs.ids, jobs.gpus.tolist(), predicted.tolist(), strict=True)
        largest = {job_id: max(memory.largest.get(job_id, 0), gpus) for job_id, gpus, known in unknown if not known}
        restarts = {job_id: memory.restarts[job_id] for job_id in jobs.ids if job_id in memory.restarts}
        memory = PolluxMemory(restarts=restarts, largest=largest)
        sizes = active_sizes(snapshot, memory, self.config)
        kept = holding(snapshot) & (sizes == jobs.gpus)
        first = order_by(jobs.ids, ~kept, -sizes, jobs.submitted_s)
        given = first[sizes[first] > 0].tolist()
        return replace(memory, sizes={jobs.ids[job]: int(sizes[job]) for job in given})


@dataclass(frozen=True)
class Offer:
    """The jobs that one GPU model is shared out to; columns are (n,) and what they may have (n, n_sizes + 1).

    Attributes:
        jobs: Indices into the job table, those with the least service first.
        one, spread: Cost at 0, 1, ... GPUs of one node (of several beyond the largest) and of several.
    """

    jobs: Ints
    one: Floats
    spread: Floats


def placing_order(snapshot: Snapshot, memory: PolluxMemory) -> Ints:
    """Return all jobs (n_jobs,): those given GPUs in their order, then the others as they came; priorities first."""
    jobs = snapshot.jobs
    rank = {job_id: at for at, job_id in enumerate(memory.sizes)}
    at = np.fromiter(map(rank.get, jobs.ids, repeat(len(rank))), np.int64, len(jobs))
    return wishes_first(order_by(jobs.ids, at, jobs.submitted_s), jobs.priority)


def holding(snapshot: Snapshot) -> Bools:
    """Return which jobs hold devices and are not stopping: (n_jobs,)."""
    phase = snapshot.jobs.phase
    return (phase == Phase.STARTING) | (phase == Phase.RUNNING)


def active_sizes(snapshot: Snapshot, memory: PolluxMemory, config: PolluxConfig) -> Ints:
    """Return the size each job should have, 0 for none: (n_jobs,)."""
    capacity = Capacity(snapshot)
    sizes = np.zeros(len(snapshot.jobs), dtype=np.int64)
    models = _models(snapshot, capacity)
    for model in range(len(snapshot.gpu_models)):
        members = np.flatnonzero(models == model)
        if members.size and capacity.total[model]:
            ids = tuple(snapshot.jobs.ids[job] for job in members.tolist())
            served = np.nan_to_num(snapshot.jobs.attained_gpu_s[members], nan=0.0)
            members = members[order_by(ids, served, snapshot.jobs.submitted_s[members])]
            sizes[members] = _shared(snapshot, memory, config, members, model, int(capacity.total[model]))
    return sizes


def _models(snapshot: Snapshot, capacity: Capacity) -> Ints:
    """Return the GPU model each job competes for, -1 for those that no size can be given: (n_jobs,)."""
    jobs = snapshot.jobs
    models = np.where(holding(snapshot) & capacity.movable & (capacity.held == jobs.gpus), capacity.model, -1)
    waits = ~holding(snapshot) & jobs.eligible.any(axis=1)
    if len(snapshot.gpu_models) == 1:
        return np.where(waits, 0, models)
    rivals = np.bincount(models[models >= 0], minlength=len(snapshot.gpu_models))
    for job in np.flatnonzero(waits)[np.argsort(jobs.submitted_s[waits], kind="stable")].tolist():
        share = np.where(jobs.eligible[job], capacity.total / (rivals + 1.0), -1.0)
        models[job] = int(share.argmax())
        rivals[models[job]] += 1
    return models


def _shared(
    snapshot: Snapshot, memory: PolluxMemory, config: PolluxConfig, members: Ints, model: int, gpus: int
) -> Ints:
    """Return the sizes of the jobs that share one GPU model: (n_members,).

    Sizes of the least cost by count may find no place that suits them. Then the best of those sizes that always pack
    are tried too, and the better of the two is taken as far as it fits.
    """
    nodes = snapshot.nodes
    mine = np.flatnonzero(nodes.schedulable & (nodes.gpu_model == model))
    node_gpus = int(nodes.gpus[mine].max())
    offer = _offer(snapshot, memory, config, members, gpus, node_gpus)
    sizes = least_cost_sizes(offer.one, gpus)
    if not config.avoid_interference:
        return sizes
    cost, fitted = _fitted(snapshot, offer, mine, sizes)
    if cost <= float(offer.one[np.arange(members.size), sizes].sum()) + NOTHING:
        return fitted
    columns = int(offer.one.shape[1])
    held = np.where(holding(snapshot)[members], snapshot.jobs.gpus[members], 0)
    packs: Bools = np.tile(even_sizes(columns, node_gpus), (members.size, 1))
    packs[np.arange(members.size), held] = True
    sizes = least_cost_sizes(np.where(packs, offer.one, np.inf), gpus)
    other_cost, other = _fitted(snapshot, offer, mine, sizes)
    return other if other_cost < cost else fitted


def _fitted(snapshot: Snapshot, offer: Offer, nodes: Ints, sizes: Ints) -> tuple[float, Ints]:
    """Return what sizes cost once those that change have a place on these nodes, and the sizes then."""
    table, jobs = snapshot.nodes, snapshot.jobs
    kept = holding(snapshot)[offer.jobs] & (sizes == jobs.gpus[offer.jobs])
    mine: list[int] = nodes.tolist()
    where = {table.ids[node]: at for at, node in enumerate(mine)}
    counts = table.gpus[nodes].copy()
    for job in (*offer.jobs[kept].tolist(), *_unmoved(snapshot, offer.jobs)):
        placement = jobs.placements[job]
        for share in placement.shares if placement else ():
            if share.node_id in where:
                counts[where[share.node_id]] -= len(share.devices)
    moves, stays = np.flatnonzero(~kept), np.flatnonzero(kept)
    spanned = spanned_nodes(snapshot, offer.jobs[kept])[nodes]
    fitted, cost = fit(sizes[moves], counts, spanned, offer.one[moves], offer.spread[moves])
    sizes = sizes.copy()
    sizes[moves] = fitted
    return cost + float(offer.one[stays, sizes[stays]].sum()), sizes


def _unmoved(snapshot: Snapshot, members: Ints) -> list[int]:
    """Return the jobs that hold devices and are not shared out to."""
    others = holding(snapshot)
    others[members] = False
    return np.flatnonzero(others).tolist()


def _offer(
    snapshot: Snapshot, memory: PolluxMemory, config: PolluxConfig, members: Ints, gpus: int, node_gpus: int
) -> Offer:
    """Return what every size would cost; a job that may not be stopped, or that is starting, can have its own alone."""
    jobs = snapshot.jobs
    n = members.size
    present: Ints = np.where(holding(snapshot)[members], jobs.gpus[members], 0)
    least, step = jobs.min_gpus[members], jobs.step_gpus[members]
    most = np.minimum(possible_sizes(snapshot, _ceiling(snapshot, memory, config))[members], gpus)
    sizes = np.arange(1, max(int(most.max()), int(present.max()), 1) + 1)
    one, spread = goodput_of(snapshot, members, sizes.size, node_gpus)
    fair = np.clip(-(-gpus // members.size), least, np.maximum(most, least))
    fair = np.minimum(least + (fair - least) // step * step, sizes.size)
    age_s = snapshot.now_s - jobs.submitted_s[members]
    ids = map(jobs.ids.__getitem__, members.tolist())
    restarts = np.fromiter(map(memory.restarts.get, ids, repeat(0)), np.int64, n)
    factor = restart_factor(age_s, restarts, config.restart_s)
    apart = speedups(spread, fair, present, factor) * (spread / one)[np.arange(n), fair - 1][:, None]
    fixed = (present > 0) & (~jobs.preemptible[members] | (jobs.phase[members] == Phase.STARTING))
    grid: Bools = (sizes >= least[:, None]) & (sizes <= most[:, None]) & ((sizes - least[:, None]) % step[:, None] == 0)
    own: Bools = sizes == present[:, None]
    allowed: Bools = np.where(fixed[:, None], own, grid | own)
    nothing = np.where(fixed, np.inf, costs(np.zeros(n), config.fairness))

    def dear(speedup: Floats) -> Floats:
        cost = np.where(allowed, costs(speedup, config.fairness), np.inf)
        return _with_wishes(np.column_stack((nothing, cost)), snapshot, members, gpus)

    return Offer(members, dear(speedups(one, fair, present, factor)), dear(apart))


def _ceiling(snapshot: Snapshot, memory: PolluxMemory, config: PolluxConfig) -> Ints:
    """Return the largest size of each job before capacity: (n_jobs,)."""
    jobs = snapshot.jobs
    if not memory.largest:
        return jobs.max_gpus
    boundless = int(jobs.max_gpus.max(initial=1))
    had = np.fromiter(map(memory.largest.get, jobs.ids, repeat(boundless)), np.int64, len(jobs))
    return np.minimum(jobs.max_gpus, np.maximum((config.growth * had).astype(np.int64), jobs.min_gpus))


def _with_wishes(cost: Floats, snapshot: Snapshot, members: Ints, gpus: int) -> Floats:
    """Return the costs with going without GPUs made dearer by users' priorities."""
    _, level = np.unique(snapshot.jobs.priority[members], return_inverse=True)
    if level.any():
        finite = cost[np.isfinite(cost)]
        cost[:, 0] += np.where(level > 0, (np.ptp(finite) + 1.0) * (gpus + 1.0) ** np.minimum(level, LEVELS), 0.0)
    return cost
