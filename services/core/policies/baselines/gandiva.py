"""Gandiva: jobs take turns, so that none queues for long.

A job that has run for a quantum goes to the end of the line if others wait, and runs on if none does; its size is what
its user asked for. A gang that sits on several nodes is moved to one as soon as one has room for it.

Departures from the paper, all because a job here has its devices to itself: jobs are not packed onto one GPU, and they
do not grow into idle ones (PowerFlow, which compares with Gandiva, has it inelastic too). The paper's quantum of a
minute rests on suspending within a second; here a quantum ends with a checkpoint, and in an active round, so that in
practice it lasts as long as the interval between those.

Source: Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI'18, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from services.core.cycle.plan import Plan, Preempt, Reason, Start
from services.core.cycle.ranking import Preemption, contenders, rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.snapshot import Phase, Snapshot, Trigger
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import Parameter, check_parameters

MOVES, HAS_QUANTUM, WAITS, HAD_QUANTUM = range(4)


@dataclass(frozen=True)
class GandivaConfig:
    """Parameters of Gandiva."""

    quantum_s: Annotated[
        float,
        Parameter(
            "How long a job runs before it gives way to waiting jobs, which happens in active rounds. Default: the "
            "paper.",
            unit="s",
            minimum=1.0,
            formerly="time_slice_s",
        ),
    ] = 60.0
    migrate: Annotated[bool, Parameter("Whether gangs that span nodes are moved to one that has room for them.")] = True
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class GandivaMemory:
    """The jobs that were stopped to be moved: they keep their turn."""

    moving: frozenset[JobId] = field(default_factory=frozenset[JobId])


class Gandiva:
    """Turns of one quantum each; users' priorities come first. Preempts in active rounds."""

    name = "gandiva"

    def __init__(self, config: GandivaConfig) -> None:
        self.config = config

    def initial(self) -> GandivaMemory:
        """Return the memory of a policy that moves no gang."""
        return GandivaMemory()

    def decide(self, snapshot: Snapshot, memory: GandivaMemory) -> tuple[Plan, GandivaMemory]:
        """Return the plan of whose turn it is, and of the gangs to move."""
        jobs = snapshot.jobs
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        sizes = fixed_sizes(snapshot, self.config.gang, which)
        turn = self._turns(snapshot, memory)
        since = np.where(turn == HAD_QUANTUM, -jobs.waiting_since_s, jobs.waiting_since_s)  # the longest runs last
        keys = turn[which], since[which], jobs.submitted_s[which]
        ranking = rank(snapshot, which, sizes, *keys, preemption=preemption)
        plan = reconcile(snapshot, ranking, preemption=preemption)
        waits = (jobs.phase == Phase.QUEUED) | (jobs.phase == Phase.PREEMPTING)
        started = {action.job_id for action in plan.actions if isinstance(action, Start)}
        moving = {job_id for job_id, wait in zip(jobs.ids, waits.tolist(), strict=True) if wait} & memory.moving
        moves = list(_moves(snapshot, plan)) if self.config.migrate and snapshot.trigger is Trigger.ACTIVE else []
        moving = (moving - started) | {move.job_id for move in moves}
        return Plan(plan.snapshot_version, (*plan.actions, *moves)), GandivaMemory(frozenset(moving))

    def dump(self, memory: GandivaMemory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        return {"moving": sorted(memory.moving)}

    def load(self, stored: dict[str, Any]) -> GandivaMemory:
        """Return the memory that ``dump`` wrote; what is missing is empty."""
        return GandivaMemory(frozenset(map(JobId, stored.get("moving", []))))

    def _turns(self, snapshot: Snapshot, memory: GandivaMemory) -> Ints:
        """Return each job's place in line: (n_jobs,) ``MOVES``, ``HAS_QUANTUM``, ``WAITS`` or ``HAD_QUANTUM``."""
        jobs = snapshot.jobs
        holds = (jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)
        had_quantum = (jobs.phase == Phase.RUNNING) & (snapshot.now_s - jobs.waiting_since_s >= self.config.quantum_s)
        turn = np.where(holds, np.where(had_quantum, HAD_QUANTUM, HAS_QUANTUM), WAITS)
        if memory.moving:
            moved = np.fromiter((job_id in memory.moving for job_id in jobs.ids), np.bool_, len(jobs))
            turn[moved & ~holds] = MOVES
        return turn


def _moves(snapshot: Snapshot, plan: Plan) -> Iterator[Preempt]:
    """Yield the stops of gangs that span nodes where one node, after the plan's starts, has room for the whole gang."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    index = {node_id: at for at, node_id in enumerate(nodes.ids)}
    free = np.where(nodes.schedulable, nodes.free_gpus, 0)
    for action in plan.actions:
        if isinstance(action, Start):
            for share in action.placement.shares:
                free[index[share.node_id]] -= len(share.devices)
    named = {action.job_id for action in plan.actions}
    spans = [
        job
        for job in np.flatnonzero((jobs.phase == Phase.RUNNING) & jobs.preemptible & (jobs.gpus > 1)).tolist()
        if (placement := jobs.placements[job]) is not None and len(placement.shares) > 1 and jobs.ids[job] not in named
    ]
    for job in sorted(spans, key=lambda job: (-int(jobs.gpus[job]), jobs.ids[job])):
        placement = jobs.placements[job]
        on = [index.get(share.node_id) for share in placement.shares] if placement is not None else [None]
        if any(at is None or not nodes.schedulable[at] for at in on):
            continue
        same_model = nodes.gpu_model == nodes.gpu_model[on[0]]
        fits = np.flatnonzero(same_model & (free >= jobs.gpus[job]))
        if fits.size:
            free[fits[0]] -= jobs.gpus[job]
            yield Preempt(jobs.ids[job], Reason.DEFRAGMENTATION, int(jobs.gpus[job]))
