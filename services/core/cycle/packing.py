"""Moves that make room in one domain: gangs are stopped that fit elsewhere, so that one that must lie within it starts.

This is for a gang that waits although enough GPUs are free: those ranked before it keep some of each domain. A round
that may stop gangs then makes the cheapest such set of moves, if any pays: what the gang would wait until a domain has
room by itself, times its GPUs, is at least ``GAIN`` times what the moves cost: a restart and the work since the last
save, times the GPUs of each.

A gang moves only if it may be stopped, holds its GPUs for ``REST_S`` and its guaranteed run, and fits on what is free
elsewhere; nobody moves while others stop. So nothing is moved back and forth, and at most one gang is helped a round.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from services.core.cycle.capacity import resumed_size
from services.core.cycle.filling import Ranked, Verdict
from services.core.cycle.levels import sums
from services.core.cycle.placers import PLACERS
from services.core.cycle.placing import FreeDevices
from services.core.cycle.plan import Preempt, Start
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RUNNING, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.reasons import Reason

GAIN = 2.0
AGAIN_S = 120.0  #: What it takes a gang to begin again
REST_S = 3_600.0
MOST_MOVED = 8  #: Gangs that are moved for one
MOST_TRIED = 4  #: Gangs for which moves are looked for in one round


def moves(snapshot: Snapshot, ranked: Ranked, verdicts: Ints, starts: Iterable[Start]) -> list[Preempt]:
    """Return the stops of gangs that make room for the first gang that lacks only a domain, if they pay."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    if (jobs.phase == PREEMPTING).any():
        return []
    taken = {share.node_id: list[int]() for start in starts for share in start.placement.shares}
    for share in (share for start in starts for share in start.placement.shares):
        taken[share.node_id] += share.devices
    free = tuple(
        tuple(each for each in devices if each not in taken.get(node_id, ()))
        for node_id, devices in zip(nodes.ids, nodes.free_devices, strict=True)
    )
    counts = np.fromiter(map(len, free), np.int64, len(nodes))
    shown = snapshot.again(nodes=replace(nodes, free_devices=free, free_gpus=counts))
    waits = np.flatnonzero((verdicts == Verdict.SHORT) & (ranked.phase == QUEUED)).tolist()
    waits = [at for at in waits if jobs.ids[ranked.jobs[at]] in snapshot.within][:MOST_TRIED]
    keeps = np.zeros(len(jobs), dtype=np.bool_)
    keeps[ranked.jobs[verdicts == Verdict.KEEP]] = True
    for at in waits:
        if found := _for_a_gang(shown, ranked.jobs.item(at), ranked.wanted.item(at), keeps):
            return [Preempt(jobs.ids[job], Reason.DEFRAGMENTATION, resumed_size(jobs, job)) for job in found]
    return []


def _for_a_gang(snapshot: Snapshot, job: int, gpus: int, keeps: Bools) -> list[int]:
    """Return the gangs to move for one, those that cost least; none if no moves pay."""
    jobs, nodes = snapshot.jobs, snapshot.nodes
    of = nodes.domains[:, snapshot.within[jobs.ids[job]]]
    left_s = jobs.remaining_s * jobs.min_gpus / np.maximum(jobs.gpus, 1)
    left_s = np.where(np.isnan(left_s), snapshot.now_s - jobs.waiting_since_s, left_s)  # half done, as far as one knows
    wait_s, ways = np.inf, list[tuple[float, list[int]]]()
    for model in np.flatnonzero(jobs.eligible[job]).tolist():
        its = nodes.schedulable & (nodes.gpu_model == model)
        free, held = sums(of, np.where(its, nodes.free_gpus, 0)), _held(snapshot, of, its)
        for domain in np.flatnonzero(sums(of, np.where(its, nodes.gpus, 0)) >= gpus).tolist():
            here, lacks = held.get(domain, {}), gpus - int(free[domain])
            wait_s = min(wait_s, _until_s(left_s, here, lacks))
            found = _cheapest(snapshot, here, lacks, keeps) if free.sum() >= gpus else []
            if found and _fits_elsewhere(snapshot, found, its & (of == domain), model):
                ways.append((sum(_cost_gpu_s(snapshot, each) for each in found), found))
    if not ways:
        return []
    cost_gpu_s, found = min(ways)
    return found if gpus * wait_s >= GAIN * cost_gpu_s else []


def _held(snapshot: Snapshot, of: Ints, its: Bools) -> dict[int, dict[int, int]]:
    """Return how many devices of these nodes each gang holds, by domain."""
    found = dict[int, dict[int, int]]()
    for job in np.flatnonzero(snapshot.jobs.gpus > 0).tolist():
        for node, devices in snapshot.held_by(job):
            if its[node]:
                here = found.setdefault(int(of[node]), {})
                here[job] = here.get(job, 0) + len(devices)
    return found


def _until_s(left_s: Floats, here: dict[int, int], lacks: int) -> float:
    """Return how long it takes until so many devices are released by themselves; 0: others than gangs hold them."""
    for job in sorted(here, key=lambda job: (left_s[job], job)):
        lacks -= here[job]
        if lacks <= 0:
            return float(left_s[job])
    return 0.0


def _cheapest(snapshot: Snapshot, here: dict[int, int], lacks: int, keeps: Bools) -> list[int]:
    """Return gangs that hold so many of the devices and may move, those first that cost least for each device."""
    jobs, found = snapshot.jobs, list[int]()
    pinned = {*snapshot.bound, *(job_id for pair in snapshot.shared for job_id in pair)}
    for job in sorted(here, key=lambda job: (_cost_gpu_s(snapshot, job) / here[job], jobs.ids[job])):
        since_s, saves = jobs.waiting_since_s.item(job), snapshot.saves.get(jobs.ids[job])
        rested = snapshot.now_s - since_s >= max(REST_S, snapshot.min_run_s)
        saved = saves is None or saves.last_s >= since_s
        may = keeps[job] and jobs.preemptible[job] and jobs.phase[job] == RUNNING and rested and saved
        if may and jobs.ids[job] not in pinned and len(found) < MOST_MOVED:
            found.append(job)
            lacks -= here[job]
            if lacks <= 0:
                return found
    return []


def _cost_gpu_s(snapshot: Snapshot, job: int) -> float:
    """Return what a move costs a gang, GPU seconds; one that does not tell saves its work when it is asked to stop."""
    saves = snapshot.saves.get(snapshot.jobs.ids[job])
    lost_s = 0.0 if saves is None else max(snapshot.now_s - saves.last_s, 0.0)
    return snapshot.jobs.gpus.item(job) * (AGAIN_S + lost_s)


def _fits_elsewhere(snapshot: Snapshot, moved: list[int], inside: Bools, model: int) -> bool:
    nodes = snapshot.nodes
    elsewhere = snapshot.again(nodes=replace(nodes, schedulable=nodes.schedulable & ~inside))
    free, place = FreeDevices(elsewhere.nodes), PLACERS[snapshot.placement]
    sizes = {job: resumed_size(snapshot.jobs, job) for job in moved}
    widest_first = sorted(moved, key=lambda job: (-sizes[job], job))
    return all(place(elsewhere, job, sizes[job], model, free) is not None for job in widest_first)
