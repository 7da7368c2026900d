"""Gandiva: jobs take turns, so that none queues for long, and share GPUs where that does more.

A job that has run for a quantum goes to the end of the line if others wait, and runs on if none does; its size is what
its user asked for. A gang that sits on several nodes is moved to one as soon as one has room for it. Where jobs wait,
two of one GPU each share one as long as they do more there than in turns (``packing.py``); the two have their turn
together, which begins anew with their pair.

Departures from the paper: jobs do not grow into idle GPUs (PowerFlow, which compares with Gandiva, has it inelastic
too). The paper's quantum of a minute rests on suspending within a second; here a quantum ends with a checkpoint, and in
an active round, so that in practice it lasts as long as the interval between those.

Source: Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI'18, sections 3 and 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lab.policies.baselines.packing import Packed, PackingMemory, look, pack, started
from services.core.cycle.plan import Hold, Plan, Preempt, Start
from services.core.cycle.ranking import rank
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, contenders, with_holds
from services.core.cycle.snapshot import QUEUED, Phase, Snapshot, Trigger
from services.core.cycle.sorting import order_by, wishes_first
from services.core.domain.arrays import Floats, Ints
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter

MOVES, HAS_QUANTUM, WAITS, HAD_QUANTUM = range(4)


@dataclass(frozen=True)
class TurnsConfig:
    """Parameters of turns."""

    quantum_s: float = parameter(
        60.0,
        "How long a job runs before it gives way to waiting jobs, which happens in active rounds. Default: the paper.",
        unit="s",
        minimum=1.0,
        formerly="time_slice_s",
    )
    migrate: bool = parameter(True, "Whether gangs that span nodes are moved to one that has room for them.")
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class GandivaConfig(TurnsConfig):
    """Parameters of Gandiva."""

    packing: bool = parameter(
        True, "Whether two jobs of one GPU each share one where others wait, as long as they do more than in turns."
    )


@dataclass(frozen=True)
class GandivaMemory:
    """What Gandiva remembers.

    Attributes:
        moving: The jobs that were stopped to be moved: they keep their turn.
        packing: What is known of jobs and pairs.
    """

    moving: frozenset[JobId] = field(default_factory=frozenset[JobId])
    packing: PackingMemory = field(default_factory=PackingMemory)


class Gandiva:
    """Turns of one quantum each; users' priorities come first. Preempts in active rounds."""

    name = "gandiva"

    def __init__(self, config: GandivaConfig) -> None:
        self.config = config

    @property
    def packs(self) -> bool:
        """Whether jobs share GPUs."""
        return self.config.packing

    def initial(self) -> GandivaMemory:
        """Return the memory of a policy that moves no gang."""
        return GandivaMemory()

    def decide(self, snapshot: Snapshot, memory: GandivaMemory) -> tuple[Plan, GandivaMemory]:
        """Return the plan of whose turn it is, of the gangs to move, and of the pairs to make and to undo."""
        since_s = snapshot.jobs.waiting_since_s
        if not self.packs:
            return self._take_turns(snapshot, memory, since_s)
        if snapshot.shared:
            since_s = _since_pairs_began(snapshot)
        if snapshot.trigger is Trigger.PASSIVE:
            plan, turns = self._take_turns(snapshot, memory, since_s)
            return plan, replace(turns, packing=started(snapshot, plan, memory.packing))
        known = look(snapshot, memory.packing, self.config.quantum_s)
        waits = np.flatnonzero(snapshot.jobs.phase == QUEUED)
        order = self._order(snapshot, memory, since_s, waits)
        packed = pack(snapshot, waits[order].tolist(), known, self.config.quantum_s)
        plan, turns = self._beside(snapshot, memory, since_s, packed)
        return plan, replace(turns, packing=started(snapshot, plan, packed.memory))

    def dump(self, memory: GandivaMemory) -> dict[str, Any]:
        """Return the memory as JSON values."""
        return {"moving": sorted(memory.moving), "packing": memory.packing.dump()}

    def load(self, stored: dict[str, Any]) -> GandivaMemory:
        """Return the memory that ``dump`` wrote; what is missing is empty."""
        packing = PackingMemory.load(stored.get("packing", {}))
        return GandivaMemory(frozenset(map(JobId, stored.get("moving", []))), packing)

    def _beside(
        self, snapshot: Snapshot, memory: GandivaMemory, since_s: Floats, packed: Packed
    ) -> tuple[Plan, GandivaMemory]:
        """Return the plan with new pairs, whose turn begins now, and of the turns of all others."""
        jobs = snapshot.jobs
        if not packed.starts:
            plan, turns = self._take_turns(snapshot, memory, since_s)
            return replace(plan, actions=(*plan.actions, *packed.stops)), turns
        others = np.ones(len(jobs), dtype=np.bool_)
        others[[jobs.index[start.job_id] for start in packed.starts]] = False
        since_s = since_s.copy()
        since_s[[jobs.index[host] for host in packed.hosts]] = snapshot.now_s
        rest = replace(
            snapshot,
            jobs=jobs.rows(others),
            **snapshot.less(Counter(jobs.rows(~others).tenants)),
        )
        plan, turns = self._take_turns(rest, memory, since_s[others])
        stopped = {action.job_id for action in plan.actions if isinstance(action, Preempt)}
        pairs = zip(packed.starts, packed.hosts, strict=True)
        beside = [Hold(start.job_id, Reason.WAITING_FOR_ROUND) if host in stopped else start for start, host in pairs]
        actions = (*plan.actions, *packed.stops, *with_holds(snapshot, beside))
        return replace(plan, actions=actions), turns

    def _take_turns(self, snapshot: Snapshot, memory: GandivaMemory, since_s: Floats) -> tuple[Plan, GandivaMemory]:
        """Return the plan of whose turn it is and of the gangs to move; ``since_s``: (n_jobs,) when turns began."""
        jobs = snapshot.jobs
        preemption = Preemption.at(snapshot.trigger)
        which = contenders(snapshot, preemption)
        sizes = fixed_sizes(snapshot, self.config.gang, which)
        turn = self._turns(snapshot, memory, since_s)
        ranking = rank(snapshot, which, sizes, *_keys(snapshot, turn, since_s, which), preemption=preemption)
        plan = reconcile(snapshot, ranking, preemption=preemption)
        waits = (jobs.phase == Phase.QUEUED) | (jobs.phase == Phase.PREEMPTING)
        started = {action.job_id for action in plan.actions if isinstance(action, Start)}
        moving = {job_id for job_id, wait in zip(jobs.ids, waits.tolist(), strict=True) if wait} & memory.moving
        moves = list(_moves(snapshot, plan)) if self.config.migrate and snapshot.trigger is Trigger.ACTIVE else []
        moving = (moving - started) | {move.job_id for move in moves}
        following = GandivaMemory(frozenset(moving), memory.packing)
        return Plan(plan.snapshot_version, (*plan.actions, *moves)), following

    def _order(self, snapshot: Snapshot, memory: GandivaMemory, since_s: Floats, which: Ints) -> Ints:
        """Return these jobs' positions in the order of their turns."""
        turn = self._turns(snapshot, memory, since_s)
        order = order_by(snapshot.jobs.ids, *_keys(snapshot, turn, since_s, which), which=which)
        return wishes_first(order, snapshot.jobs.priority[which])

    def _turns(self, snapshot: Snapshot, memory: GandivaMemory, since_s: Floats) -> Ints:
        """Return each job's place in line: (n_jobs,) ``MOVES``, ``HAS_QUANTUM``, ``WAITS`` or ``HAD_QUANTUM``."""
        jobs = snapshot.jobs
        holds = (jobs.phase == Phase.STARTING) | (jobs.phase == Phase.RUNNING)
        had_quantum = (jobs.phase == Phase.RUNNING) & (snapshot.now_s - since_s >= self.config.quantum_s)
        turn = np.where(holds, np.where(had_quantum, HAD_QUANTUM, HAS_QUANTUM), WAITS)
        if memory.moving:
            moved = np.fromiter((job_id in memory.moving for job_id in jobs.ids), np.bool_, len(jobs))
            turn[moved & ~holds] = MOVES
        return turn


def _keys(snapshot: Snapshot, turn: Ints, since_s: Floats, which: Ints) -> tuple[Ints, Floats, Floats]:
    since_s = np.where(turn == HAD_QUANTUM, -since_s, since_s)  # the longest runs last
    return turn[which], since_s[which], snapshot.jobs.submitted_s[which]


def _since_pairs_began(snapshot: Snapshot) -> Floats:
    """Return when each job's turn began: with a guest, when that came; (n_jobs,) UTC seconds."""
    since_s, guests = snapshot.jobs.waiting_since_s.copy(), snapshot.guests
    for host, guest in guests_of(snapshot).items():
        assert guests is not None
        since_s[host] = max(since_s.item(host), guests.waiting_since_s.item(guest))
    return since_s


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
        if (placement := jobs.placements[job]) is not None
        and len(placement.shares) > 1
        and jobs.ids[job] not in named
        and jobs.ids[job] not in snapshot.bound
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


def guests_of(snapshot: Snapshot) -> dict[int, int]:
    """Return the rows of the hosts in the table that a policy sees, and of their guests in ``Snapshot.guests``."""
    jobs, guests = snapshot.jobs, snapshot.guests
    if guests is None:
        return {}
    sides = (side for one, other in snapshot.shared for side in ((one, other), (other, one)))
    return {
        jobs.index[host]: guests.index[guest] for host, guest in sides if host in jobs.index and guest in guests.index
    }
