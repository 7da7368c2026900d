"""The policy: the head of the queue starts when its GPUs are free, and no job passes it, but as ``others`` says.

A job that begins to wait goes onto the virtual machine; when it ends there, it joins the queue. A gang whose worst
placement takes ``comm_heavy`` times its best or longer gets the fullest servers; while its iterations would still be
that much longer than at best, it waits up to ``tau`` times its length on the virtual machine for something better than
what it was first offered. Any other gang takes what the emptiest servers have left, at once. Never preempts.

The paper leaves open, and we fill in:

- whether jobs pass a gang that waits for better servers. Line 7 takes it from the queue before it waits, and section
  IV-C starts other jobs "immediately"; the loop of line 16 holds all up. That is our default; ``others="pass"`` is the
  other reading (``tests/unit/core/test_asrpt.py``). A gang that is passed has the first choice in every round;
- whether the machine runs while the head of the queue is held up. Algorithm 1 moves the machine in line 2, and does not
  come back to that line while line 25, or the loop of line 16, counts time. By that reading, our default, it stands
  still (``machine="waits"``). A machine that runs outpaces the cluster under load, and the queue becomes first come,
  first served. Theorem 1 is stated for one that runs and also holds for one that waits (``bounds.completion``);
- users' priorities come before lengths, on the machine and in the queue;
- with several GPU models, the queue is held up on those that its head may use; a job of a tenant over its quota, or a
  gang that would not fit even on the empty cluster, holds up no other job;
- a job that comes back because its node failed is a new arrival; a job without a prediction counts as length 0, as
  the paper's unseen groups do; a job without a graph is placed as pure data parallelism.

Source: A-SRPT, Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from services.core.cycle.capacity import Capacity, model_gpus
from services.core.cycle.graph_placing import COMM_HEAVY, Seats, Servers, mapper_of, place_by_graph, seats
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Action, Hold, Plan, Start
from services.core.cycle.ranking import Ranking
from services.core.cycle.reconcile import reconcile
from services.core.cycle.rounds import Preemption, has_tenants, queue_changes, ranks_whole_queue
from services.core.cycle.snapshot import QUEUED, Snapshot
from services.core.cycle.standing import Quota
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from services.core.domain.placement import Placement
from services.core.domain.reasons import Reason
from services.core.domain.solving import Method
from services.core.policies.asrpt.virtual_machine import EndedJob, Heap, VirtualJob, VirtualMachine
from services.core.policies.baselines.fixed_gang import GangParameter, fixed_sizes
from services.core.policies.parameters import check_parameters, parameter


@dataclass(frozen=True)
class AsrptConfig:
    """Parameters of A-SRPT."""

    comm_heavy: float = parameter(
        COMM_HEAVY,
        "A gang is communication-heavy if its worst placement takes at least this many times as long as its best. "
        "Default: the paper.",
        minimum=1.0,
    )
    tau: float = parameter(
        1.0,
        "How long a communication-heavy gang waits for a better placement, in multiples of its length on the "
        "virtual machine; 0: not at all, as on the paper's testbed. Default: ours; the paper prints none.",
        minimum=0.0,
    )
    others: Literal["wait", "pass"] = parameter(
        "wait",
        "What jobs behind a gang that waits for a better placement do: wait too, or pass it. Default: wait, the "
        "loop of Algorithm 1; pass: as its line 7 and the paper's text can be read.",
    )
    machine: Literal["waits", "runs"] = parameter(
        "waits",
        "What the virtual machine does while the head of the queue is held up. Default: waits, our reading of "
        "Algorithm 1, whose loop moves it only while nothing is held up; runs: as the proof of Theorem 1 has it.",
    )
    machine_speed: float = parameter(
        1.0,
        "Speed of the virtual machine against the whole cluster at its best placements. Below 1, jobs wait less in "
        "the queue and more on the machine, where shorter ones overtake them. Default: the paper.",
        minimum=0.01,
    )
    placement: Literal["heavy-edge", "refined"] = parameter(
        "heavy-edge", "How replicas are mapped to GPUs. Default: the paper."
    )
    gang: GangParameter = "min"

    def __post_init__(self) -> None:
        check_parameters(self)


@dataclass(frozen=True)
class Offer:
    """What a gang that waits for better servers was first offered."""

    iteration_s: float  #: Its iteration time with that offer, ``kappa``
    until_s: float  #: When it takes whatever is available, UTC seconds


@dataclass(frozen=True)
class AsrptMemory:
    """The jobs that wait: on the virtual machine, or in the queue it makes."""

    machine: VirtualMachine = field(default_factory=VirtualMachine)  #: The virtual machine
    queue: Heap[EndedJob] = field(default_factory=Heap[EndedJob])  #: Jobs that have ended on it
    offers: Mapping[JobId, Offer] = field(default_factory=dict[JobId, Offer])
    """Among those, the gangs that wait for better servers."""
    held_up: int | None = None  #: Rank of the job that held up the queue at the end of the round, None if none did
    started: tuple[EndedJob, ...] = ()
    """What the round was to start. A job that waits nonetheless, as an order of the grid held it, keeps its place."""


class Asrpt:
    """Adaptive shortest remaining processing time first."""

    name = "a-srpt"
    initial = staticmethod(AsrptMemory)

    def __init__(self, config: AsrptConfig) -> None:
        self.config = config

    @property
    def placement(self) -> str:
        return self.config.placement

    def decide(self, snapshot: Snapshot, memory: AsrptMemory) -> tuple[Plan, AsrptMemory]:
        """Advance the virtual machine to now, and start what the queue's order and the free GPUs allow."""
        machine, queue = self._moved(snapshot, memory)
        offers, passed = memory.offers, frozenset[JobId]()
        while True:
            line, behind = self._line(snapshot, queue, passed)
            placer, plan = self._placed(snapshot, offers, line, passed)
            started = {action.job_id for action in plan.actions if isinstance(action, Start)}
            if self.config.others == "wait":
                break
            offers = placer.offers = _queued(snapshot, {**offers, **placer.offers}, started)
            waits = {job_id for job_id, offer in offers.items() if snapshot.now_s < offer.until_s}
            if waits <= passed:
                break
            passed |= waits
        if started:
            queue = behind
            for job in line:
                if job.job_id not in started:
                    queue = queue.with_item(job)
        actions = tuple(map(placer.explained, plan.actions)) if placer.declined else plan.actions
        held_up = self._held_up(snapshot, queue, started, passed)
        starting = tuple(job for job in line if job.job_id in started)
        following = AsrptMemory(machine, queue, placer.offers, held_up, starting)
        return Plan(snapshot.version, actions, look_again_s=self._look_again_s(snapshot, following)), following

    def _placed(
        self, snapshot: Snapshot, offers: Mapping[JobId, Offer], line: Sequence[EndedJob], passed: Collection[JobId]
    ) -> tuple[_Placer, Plan]:
        """Return the plan that starts what it can of a line without the gangs that others pass, and its placer."""
        placer = _Placer(snapshot, self.config, offers, {job.job_id: job.length_s for job in line})
        which = [snapshot.jobs.index[job.job_id] for job in line]
        nowhere = [job for job in which if self._fits_nowhere(snapshot, job)]
        placer.declined.update((snapshot.jobs.ids[job], Reason.NO_ELIGIBLE_NODE) for job in nowhere)
        placer.declined.update(dict.fromkeys(passed, Reason.BETTER_PLACEMENT))
        order = [job for job in which if job not in nowhere and snapshot.jobs.ids[job] not in passed]
        which_run = np.array(order, dtype=np.int64)
        ranking = Ranking(which_run, fixed_sizes(snapshot, self.config.gang, which_run), Reason.SHORTER_FIRST)
        return placer, reconcile(snapshot, ranking, preemption=Preemption.NEVER, place=placer, backfill=False)

    def dump(self, memory: AsrptMemory) -> dict[str, Any]:
        machine = memory.machine
        return {
            "now_s": machine.now_s,
            "running": None if machine.running is None else list(machine.running),
            "ends_s": machine.ends_s,
            "waiting": [list(job) for job in sorted(machine.waiting)],
            "queue": [list(job) for job in sorted(memory.queue)],
            "offers": {job_id: [offer.iteration_s, offer.until_s] for job_id, offer in memory.offers.items()},
            "held_up": memory.held_up,
            "started": [list(job) for job in memory.started],
        }

    def load(self, stored: dict[str, Any]) -> AsrptMemory:
        running = stored.get("running")
        machine = VirtualMachine(
            float(stored.get("now_s", 0.0)),
            None if running is None else VirtualJob(*running),
            float(stored.get("ends_s", 0.0)),
            Heap(VirtualJob(*job) for job in stored.get("waiting", [])),
        )
        offers = {JobId(job_id): Offer(*offer) for job_id, offer in stored.get("offers", {}).items()}
        queue = Heap(EndedJob(*job) for job in stored.get("queue", []))
        started = tuple(EndedJob(*job) for job in stored.get("started", []))
        return AsrptMemory(machine, queue, offers, stored.get("held_up"), started)

    def _moved(self, snapshot: Snapshot, memory: AsrptMemory) -> tuple[VirtualMachine, Heap[EndedJob]]:
        """Return the machine and queue as of now: with the jobs that began to wait, without those that no longer do."""
        queue, jobs = memory.queue, snapshot.jobs
        for each in memory.started:
            if (job := jobs.index.get(each.job_id)) is not None and jobs.phase[job] == QUEUED:
                queue = queue.with_item(each)
        new, gone = queue_changes(snapshot, memory.machine.job_ids().union(job.job_id for job in queue))
        machine = memory.machine
        if self._stands_still(memory):
            machine = machine.stood_still(snapshot.now_s)
        machine, ended = machine.run(self._arrivals(snapshot, new), snapshot.now_s)
        for job in ended:
            queue = queue.with_item(job)
        if gone:
            machine = machine.without(gone)
            queue = Heap(job for job in queue if job.job_id not in gone)
        return machine, queue

    def _arrivals(self, snapshot: Snapshot, new: Sequence[int]) -> list[tuple[float, VirtualJob]]:
        if not new:
            return []
        jobs, total = snapshot.jobs, max(snapshot.total_gpus, 1) * self.config.machine_speed
        sizes = fixed_sizes(snapshot, self.config.gang, np.array(new))
        arrivals: list[tuple[float, VirtualJob]] = []
        for job, gpus in zip(new, sizes.tolist(), strict=True):
            predicted_s = float(jobs.remaining_s[job])
            length_s = 0.0 if math.isnan(predicted_s) else predicted_s * gpus / total
            since_s = min(float(jobs.waiting_since_s[job]), snapshot.now_s)
            rank, submitted_s = -int(jobs.priority[job]), float(jobs.submitted_s[job])
            arrivals.append((since_s, VirtualJob(rank, length_s, submitted_s, jobs.ids[job], length_s)))
        return sorted(arrivals)

    def _line(
        self, snapshot: Snapshot, queue: Heap[EndedJob], passed: Collection[JobId]
    ) -> tuple[list[EndedJob], Heap[EndedJob]]:
        """Return the jobs of the queue that may start in this round, in order, and the queue that remains.

        They are the first that fit together, and those that they pass, unless all must be ranked
        (``ranks_whole_queue``).
        """
        line: list[EndedJob] = []
        if ranks_whole_queue(snapshot):
            return sorted(queue), Heap()
        if not queue:
            return line, queue
        index, total = snapshot.jobs.index, snapshot.total_gpus
        room = sum(Capacity(snapshot).room)
        while queue:
            first = queue.first
            job = index[first.job_id]
            gpus, passes = self._gpus(snapshot, job), first.job_id in passed
            fits = gpus <= total and snapshot.jobs.eligible[job, 0]
            if not passes and fits and not self._fits_nowhere(snapshot, job):
                if gpus > room:
                    break
                room -= gpus
            line.append(first)
            queue = queue.without_first()
        return line, queue

    def _gpus(self, snapshot: Snapshot, job: int) -> int:
        return int(fixed_sizes(snapshot, self.config.gang, np.array([job]))[0])

    def _fits_nowhere(self, snapshot: Snapshot, job: int) -> bool:
        """Whether a gang's tensor groups would not fit even on the empty cluster."""
        graph = snapshot.graphs.get(snapshot.jobs.ids[job])
        if graph is None or not graph.has_tensor_groups:
            return False
        gpus = self._gpus(snapshot, job)
        mapper, nodes = mapper_of(graph, gpus, snapshot.network), snapshot.nodes
        empty: Ints = np.where(nodes.schedulable, nodes.gpus, 0)
        models = np.flatnonzero(snapshot.jobs.eligible[job]).tolist()
        method = Method(self.config.placement)
        return all(seats(nodes.gpu_model, mapper, model, empty, method, Servers.FULLEST) is None for model in models)

    def _held_up(
        self, snapshot: Snapshot, queue: Heap[EndedJob], started: Collection[JobId], passed: Collection[JobId]
    ) -> int | None:
        """Return the rank of the first job of the queue that holds up those behind it, None if none does.

        Not counted, because others pass them: a gang that would not fit on the empty cluster, a job whose tenant has
        reached its quota with what the round started, a job that is confined to nodes, and those in ``passed``.
        """
        if not queue:
            return None
        jobs, index = snapshot.jobs, snapshot.jobs.index
        quota = Quota.of(snapshot, all_runs_on=True)
        if quota is not None:
            for job_id in started:
                quota.claim(index[job_id], self._gpus(snapshot, index[job_id]))
        while queue:
            first = queue.first
            job = index[first.job_id]
            gpus = self._gpus(snapshot, job)
            fits = bool((jobs.eligible[job] & (model_gpus(snapshot) >= gpus)).any())
            fits = fits and not snapshot.confined(first.job_id) and first.job_id not in passed
            if fits and (quota is None or quota.refusal(job, gpus) is None) and not self._fits_nowhere(snapshot, job):
                return first.rank
            queue = queue.without_first()
        return None

    def _stands_still(self, memory: AsrptMemory) -> bool:
        """Whether the machine pauses until the queue moves; for a job of higher priority it runs."""
        running, held_up = memory.machine.running, memory.held_up
        return self.config.machine == "waits" and held_up is not None and (running is None or held_up <= running.rank)

    def _look_again_s(self, snapshot: Snapshot, memory: AsrptMemory) -> float | None:
        """Return when something that may not start now may, even if nothing else happens; UTC seconds."""
        times = [offer.until_s for offer in memory.offers.values()]
        machine = memory.machine
        if machine.running is not None and not self._stands_still(memory):
            blocked = len(snapshot.gpu_models) == 1 and not has_tenants(snapshot) and not snapshot.confines
            held_up = memory.held_up
            if not (blocked and held_up is not None and held_up <= machine.running.rank):
                times.append(machine.ends_s)
        return min((time_s for time_s in times if time_s > snapshot.now_s), default=None)


def _queued(snapshot: Snapshot, offers: Mapping[JobId, Offer], started: Collection[JobId]) -> dict[JobId, Offer]:
    """Return the offers of the gangs that still wait after a round; one whose time is over takes what it gets next."""
    jobs = snapshot.jobs
    waits = {job_id for job_id in offers if (job := jobs.index.get(job_id)) is not None and jobs.phase[job] == QUEUED}
    return {job_id: offer for job_id, offer in offers.items() if job_id in waits and job_id not in started}


class _Placer:
    """Places gangs in the order of the queue; no job passes one that waits, on its GPU model, unless ``others`` may."""

    def __init__(
        self, snapshot: Snapshot, config: AsrptConfig, offers: Mapping[JobId, Offer], length_s: Mapping[JobId, float]
    ) -> None:
        self._snapshot = snapshot
        self._config = config
        self._method = Method(config.placement)
        self._length_s = length_s
        self._before = offers
        self._closed: set[int] = set()
        self.offers: dict[JobId, Offer] = {}  #: The offers of gangs that wait for better servers
        self.declined: dict[JobId, Reason] = {}  #: Why a gang that could have been placed was not

    def __call__(self, snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
        job_id = snapshot.jobs.ids[job]
        if gpu_model in self._closed:
            self.declined[job_id] = Reason.SHORTER_FIRST
            return None
        comm_heavy = self._config.comm_heavy

        def accepts(least_s: float, found: Seats) -> bool:
            return found.time_s <= comm_heavy * least_s or not self._waits(job_id, found.time_s)

        placed = place_by_graph(
            snapshot, job, gpus, gpu_model, free, method=self._method, comm_heavy=comm_heavy, accepts=accepts
        )
        if placed is None:
            if self._config.others == "wait" or job_id not in self.offers:
                self._closed.add(gpu_model)
            self.declined[job_id] = Reason.BETTER_PLACEMENT
        return placed

    def explained(self, action: Action) -> Action:
        if not isinstance(action, Hold) or action.job_id not in self.declined:
            return action
        offer = self.offers.get(action.job_id)
        return Hold(action.job_id, self.declined[action.job_id], None if offer is None else offer.until_s)

    def _waits(self, job_id: JobId, iteration_s: float) -> bool:
        """Return whether a gang waits for something better than this, noting its offer if so."""
        now_s = self._snapshot.now_s
        offer = self._before.get(job_id)
        if offer is None:
            offer = Offer(iteration_s, now_s + self._config.tau * self._length_s[job_id])
        if iteration_s < offer.iteration_s or now_s >= offer.until_s:
            return False
        self.offers[job_id] = offer
        return True
