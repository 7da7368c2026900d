"""Gandiva's packing: two jobs on one GPU as long as they do more there than in turns.

A job that has had a turn of its own has a measured rate: the share of its work that it does per second. Where more jobs
wait than GPUs are free, those of them with a rate are put beside running jobs with one, beside the least busy first,
which are those that draw the least. Two jobs in turns would each do half of what they do alone. A pair whose rates,
each over the rate alone, sum to less than 1 is therefore undone, and not tried again; both may go with others. A pair
is undone too where a GPU is free and nobody waits for it.

Source: Xiao et al., Gandiva, OSDI'18, section 3.3 and the greedy heuristic of section 4.2. Departures: only jobs of one
GPU are packed; a rate is measured over a turn and not over a few mini-batches, so that a restart counts in it, alone as
in a pair; pairs are made and undone in active rounds only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from services.core.cycle.plan import Plan, Preempt, Start
from services.core.cycle.sharing import may_share
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, JobTable, Snapshot
from services.core.domain.arrays import Floats
from services.core.domain.ids import JobId
from services.core.domain.reasons import Reason


@dataclass(frozen=True)
class Pair:
    """Two jobs on one GPU, since when, and the shares of their work that were done by then."""

    jobs: tuple[JobId, JobId]
    since_s: float
    done: tuple[float, float]


@dataclass(frozen=True)
class PackingMemory:
    """What is known of jobs and pairs.

    Attributes:
        began: The share of its work that a job had done when it last got a GPU for itself.
        rates: What a job does alone: the share of its work per second, and the GPU model.
        pairs: Those that share a GPU.
        refused: Those that did less than in turns, each in order of the ids.
    """

    began: Mapping[JobId, float] = field(default_factory=dict[JobId, float])
    rates: Mapping[JobId, tuple[float, str]] = field(default_factory=dict[JobId, tuple[float, str]])
    pairs: tuple[Pair, ...] = ()
    refused: frozenset[tuple[JobId, JobId]] = field(default_factory=frozenset[tuple[JobId, JobId]])

    def dump(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "began": dict(self.began),
            "rates": {job_id: list(rate) for job_id, rate in self.rates.items()},
            "pairs": [[list(pair.jobs), pair.since_s, list(pair.done)] for pair in self.pairs],
            "refused": sorted(map(list, self.refused)),
        }

    @classmethod
    def load(cls, stored: Mapping[str, Any]) -> PackingMemory:
        """Return what ``dump`` wrote; what is missing is empty."""
        return cls(
            {JobId(job_id): float(done) for job_id, done in stored.get("began", {}).items()},
            {JobId(job_id): (float(rate), str(model)) for job_id, (rate, model) in stored.get("rates", {}).items()},
            tuple(
                Pair((JobId(one), JobId(other)), float(since_s), (float(mine), float(others)))
                for (one, other), since_s, (mine, others) in stored.get("pairs", [])
            ),
            frozenset((JobId(one), JobId(other)) for one, other in stored.get("refused", [])),
        )


@dataclass(frozen=True)
class Packed:
    """What becomes of pairs in an active round.

    Attributes:
        starts: Of guests, each beside a job that runs.
        hosts: Those jobs.
        stops: Of guests.
        memory: As if all of this were done.
    """

    starts: tuple[Start, ...]
    hosts: tuple[JobId, ...]
    stops: tuple[Preempt, ...]
    memory: PackingMemory


def look(snapshot: Snapshot, memory: PackingMemory, quantum_s: float) -> PackingMemory:
    """Return the memory of the jobs that there are, with the rates of those that have had a turn alone by now."""
    jobs, guests = snapshot.jobs, snapshot.guests
    known = {*jobs.ids, *(guests.ids if guests is not None else ())}
    paired = {job_id for pair in snapshot.shared for job_id in pair}
    began = {job_id: done for job_id, done in memory.began.items() if job_id in known and job_id not in paired}
    rates = {job_id: rate for job_id, rate in memory.rates.items() if job_id in known}
    models = _model_of(snapshot)
    for job_id, done in began.items():
        job = jobs.index.get(job_id)
        if job is None or jobs.phase[job] != RUNNING or jobs.gpus[job] != 1 or models.get(job) is None:
            continue
        had_s, more = snapshot.now_s - jobs.waiting_since_s.item(job), jobs.progress.item(job) - done
        if had_s >= quantum_s and more > 0:  # neither holds of a job that reports nothing
            rates[job_id] = more / had_s, models[job]
    there = {tuple(sorted(pair)) for pair in snapshot.shared}
    pairs = tuple(pair for pair in memory.pairs if tuple(sorted(pair.jobs)) in there)
    refused = frozenset(pair for pair in memory.refused if known.issuperset(pair))
    return PackingMemory(began, rates, pairs, refused)


def pack(snapshot: Snapshot, order: Collection[int], memory: PackingMemory, quantum_s: float) -> Packed:
    """Return which pairs are made and undone.

    Args:
        snapshot: The cluster at an active round, as a policy sees it.
        order: Rows of the jobs that wait, the first to run first.
        memory: As ``look`` returned it.
        quantum_s: How long a pair is watched before it is judged.
    """
    jobs = snapshot.jobs
    stops, refused = _judged(snapshot, memory, quantum_s)
    left_over, free = _left_over(snapshot, order)
    if not left_over:
        stops = _apart(snapshot, memory, stops, free)
    rates, guests = memory.rates, [job for job in left_over if _can_be_guest(snapshot, job, memory)]
    hosts = _hosts(snapshot, memory) if guests else []
    quota = _quota_left(snapshot)
    starts: list[Start] = []
    pairs: list[Pair] = []
    for guest in guests:
        tenant = jobs.tenants[guest]
        if quota.get(tenant, 1) < 1:
            continue
        for at, host in enumerate(hosts):
            one, other = jobs.ids[host], jobs.ids[guest]
            tried = (min(one, other), max(one, other)) in refused
            if tried or rates[one][1] != rates[other][1] or not may_share(snapshot, host, guest):
                continue
            placement = jobs.placements[host]
            assert placement is not None
            starts.append(Start(other, placement, Reason.PACKED, shares=True))
            pairs.append(Pair((one, other), snapshot.now_s, (_done(jobs, host), _done(jobs, guest))))
            if tenant in quota:
                quota[tenant] -= 1
            del hosts[at]
            break
    gone = {stop.job_id for stop in stops}
    kept = tuple(pair for pair in memory.pairs if not gone.intersection(pair.jobs))
    paired = {job_id for pair in pairs for job_id in pair.jobs}
    began = {job_id: done for job_id, done in memory.began.items() if job_id not in paired}
    after = replace(memory, began=began, pairs=(*kept, *pairs), refused=refused)
    return Packed(tuple(starts), tuple(pair.jobs[0] for pair in pairs), tuple(stops), after)


def started(snapshot: Snapshot, plan: Plan, memory: PackingMemory) -> PackingMemory:
    """Return the memory with what the jobs that start on GPUs of their own have done so far."""
    jobs = snapshot.jobs
    starts = (action for action in plan.actions if isinstance(action, Start) and not action.shares)
    rows = ((start.job_id, jobs.index[start.job_id]) for start in starts)
    done = {job_id: _done(jobs, job) for job_id, job in rows}
    done = {job_id: share for job_id, share in done.items() if share == share}
    return replace(memory, began={**memory.began, **done}) if done else memory


def gain_of(snapshot: Snapshot, pair: Pair, memory: PackingMemory) -> float:
    """Return what two jobs do together over what they would do in turns; NaN where one reports nothing."""
    run_s = snapshot.now_s - pair.since_s
    gain = 0.0
    for job_id, before in zip(pair.jobs, pair.done, strict=True):
        gain += (_progress(snapshot, job_id) - before) / run_s / memory.rates[job_id][0]
    return gain


def _done(jobs: JobTable, job: int) -> float:
    """Return the share of a job's work that is done; NaN of one that ran and reported nothing."""
    done = jobs.progress.item(job)
    return 0.0 if done != done and not jobs.attained_gpu_s.item(job) > 0 else done


def _judged(
    snapshot: Snapshot, memory: PackingMemory, quantum_s: float
) -> tuple[list[Preempt], frozenset[tuple[JobId, JobId]]]:
    """Return the stops of guests in pairs that do less than in turns, and all pairs that are not to be tried again."""
    stops: list[Preempt] = []
    refused = set(memory.refused)
    for pair in memory.pairs:
        if snapshot.now_s - pair.since_s < quantum_s or not gain_of(snapshot, pair, memory) < 1.0:
            continue
        refused.add((min(pair.jobs), max(pair.jobs)))
        stops += _stop_of_guest(snapshot, pair)
    return stops, frozenset(refused)


def _apart(snapshot: Snapshot, memory: PackingMemory, stops: list[Preempt], free: int) -> list[Preempt]:
    """Return these stops with those of as many guests more as find a free GPU, the pairs made last first."""
    gone = {stop.job_id for stop in stops}
    for pair in sorted(memory.pairs, key=lambda pair: (-pair.since_s, pair.jobs)):
        more = [stop for stop in _stop_of_guest(snapshot, pair) if stop.job_id not in gone]
        if len(stops) + len(more) <= free:
            stops = [*stops, *more]
    return stops


def _stop_of_guest(snapshot: Snapshot, pair: Pair) -> list[Preempt]:
    """Return the stop of the guest of a pair; none where one of the two stops already."""
    guests, jobs = snapshot.guests, snapshot.jobs
    for one, other in (pair.jobs, pair.jobs[::-1]):
        if guests is not None and one in guests.index and other in jobs.index:
            going = guests.phase[guests.index[one]] == PREEMPTING or jobs.phase[jobs.index[other]] == PREEMPTING
            return [] if going else [Preempt(one, Reason.UNPACKED, 1)]
    return []


def _left_over(snapshot: Snapshot, order: Collection[int]) -> tuple[list[int], int]:
    """Return the waiting jobs for which no GPUs are free, the first first, and how many GPUs nobody waits for."""
    nodes, jobs = snapshot.nodes, snapshot.jobs
    free = int(nodes.free_gpus[nodes.schedulable].sum())
    left_over: list[int] = []
    for job in order:
        gpus = jobs.min_gpus.item(job)
        if gpus <= free:
            free -= gpus
        elif jobs.phase[job] == QUEUED and jobs.eligible[job].any():
            left_over.append(job)
    return left_over, free


def _can_be_guest(snapshot: Snapshot, job: int, memory: PackingMemory) -> bool:
    jobs = snapshot.jobs
    known = jobs.ids[job] in memory.rates and not np.isnan(_done(jobs, job))
    return bool(jobs.shareable[job] and jobs.min_gpus[job] == 1 and known)


def _hosts(snapshot: Snapshot, memory: PackingMemory) -> list[int]:
    """Return the rows of the jobs that could have a guest, the least busy first."""
    jobs = snapshot.jobs
    paired = {job_id for pair in snapshot.shared for job_id in pair}
    runs: list[int] = np.flatnonzero((jobs.phase == RUNNING) & (jobs.gpus == 1) & jobs.shareable).tolist()
    known = (job for job in runs if jobs.ids[job] in memory.rates and not np.isnan(_done(jobs, job)))
    able = [job for job in known if jobs.ids[job] not in paired]
    drawn_w: Floats = np.nan_to_num(jobs.gpu_power_w, nan=np.inf)
    return sorted(able, key=lambda job: (drawn_w.item(job), jobs.ids[job]))


def _quota_left(snapshot: Snapshot) -> dict[str, int]:
    """Return how many GPUs more each tenant with a quota may hold."""
    left, jobs = dict(snapshot.tenant_gpu_quota), snapshot.jobs
    for job in np.flatnonzero(jobs.gpus > 0).tolist() if left else ():
        if jobs.tenants[job] in left:
            left[jobs.tenants[job]] -= jobs.gpus.item(job)
    return left


def _progress(snapshot: Snapshot, job_id: JobId) -> float:
    for table in (snapshot.jobs, snapshot.guests):
        if table is not None and (job := table.index.get(job_id)) is not None:
            return table.progress.item(job)
    return float("nan")


def _model_of(snapshot: Snapshot) -> dict[int, str]:
    """Return the name of the GPU model that each job sits on, by its row."""
    nodes, models = snapshot.nodes, snapshot.gpu_models
    sits = ((job, placement) for job, placement in enumerate(snapshot.jobs.placements) if placement is not None)
    where = ((job, nodes.index.get(placement.shares[0].node_id)) for job, placement in sits)
    return {job: models[nodes.gpu_model[at]] for job, at in where if at is not None}
