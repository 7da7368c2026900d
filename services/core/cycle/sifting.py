"""What a round need not look at: jobs that are certain to stay as they are.

Most rounds of a simulation start one job among thousands, and a live one may have a hundred thousand waiting. Nothing
here changes a decision (``tests/properties/test_sifting.py``): without this file ``reconcile`` decides the same, later.
"""

import numpy as np

from services.core.cycle.capacity import Capacity
from services.core.cycle.rounds import Preemption, has_tenants, is_uniform, stopping
from services.core.cycle.snapshot import PREEMPTING, QUEUED, Snapshot
from services.core.cycle.sorting import among_first
from services.core.domain.arrays import Bools, Floats, Ints

FEW = 16  #: Fewer jobs are sorted, or visited one by one, sooner than sifted
MANY = 512  #: An active round is sifted if its jobs outnumber the GPUs by more

Keys = tuple[Floats | Ints | Bools, ...]


def has_nothing_to_do(snapshot: Snapshot, order: Ints, gpus: Ints) -> bool:
    """Whether a round changes nothing, whatever the order: all jobs are wanted, and hold as many GPUs as they should.

    False where there are tenant quotas or shares, since those may have changed.
    """
    jobs = snapshot.jobs
    if order.size < len(jobs) or has_tenants(snapshot):
        return False
    return bool((jobs.gpus[order] == gpus).all() and (jobs.phase != PREEMPTING).all())


def within_reach(
    snapshot: Snapshot, which: Ints, sizes: Ints, keys: Keys, preemption: Preemption, *, backfill: bool
) -> Ints | Bools | None:
    """Return which jobs may get something, before they are sorted; None: all, or nearly all.

    Args:
        which: (n_which,) indices of the wanted jobs.
        sizes: (n_which,) the sizes they are ranked at.
        keys: What they will be sorted by; each (n_which,).
    """
    jobs = snapshot.jobs
    if snapshot.reasons or has_tenants(snapshot) or not is_uniform(snapshot) or jobs.priority[which].any():
        return None
    if preemption is Preemption.NOW:
        return _within_reach_of_stops(snapshot, which, sizes, keys) if backfill else None
    return _within_reach_of_room(snapshot, which, sizes, keys[0], backfill=backfill)


def _within_reach_of_room(
    snapshot: Snapshot, waits: Ints, sizes: Ints, key: Floats | Ints | Bools, *, backfill: bool
) -> Bools | None:
    """Return which waiting jobs may get something without stopping others.

    With room for r GPUs, nothing is left below the r-th one-GPU job that fits; without backfilling, a job takes a GPU
    or blocks all below it, so none below the (r + 1)-th job matters.
    """
    jobs = snapshot.jobs
    if waits.size <= FEW or not jobs.eligible[waits].all():
        return None
    room = snapshot.nodes.free_total + int(jobs.gpus[stopping(snapshot)].sum())
    if not backfill:
        possible = sizes <= snapshot.total_gpus  # a wider one never blocks
        if int(possible.sum()) <= room + 1:
            return None
        return possible & (key <= np.partition(key[possible], room)[room])
    fits = sizes <= room
    single = key[sizes == 1]
    if room and single.size > room:
        fits &= key <= np.partition(single, room - 1)[room - 1]
    return fits


def _within_reach_of_stops(snapshot: Snapshot, which: Ints, sizes: Ints, keys: Keys) -> Ints | None:
    """Return the positions of the jobs that an active round has to look at.

    With n GPUs, jobs below the n-th waiting one-GPU job get nothing, whatever is stopped.
    """
    jobs, gpus = snapshot.jobs, snapshot.total_gpus
    if which.size - gpus <= MANY:
        return None
    waits = jobs.phase[which] == QUEUED
    single = np.flatnonzero(waits & (sizes == 1) & jobs.eligible[which, 0])
    if single.size <= gpus:
        return None
    first = single[among_first(gpus + 1, *(key[single] for key in keys))]
    last = first[np.lexsort([key[first] for key in reversed(keys)])[-1]]
    reach, ties = ~waits, waits
    for key in keys:
        reach |= ties & (key < key[last])
        ties = ties & (key == key[last])
    return np.flatnonzero(reach | ties)


def sifted(
    snapshot: Snapshot, order: Ints, gpus: Ints, capacity: Capacity, preemption: Preemption, *, backfill: bool
) -> tuple[Ints, Ints]:
    """Return a ranking, (n_ranked,) indices and sizes, without jobs that a round without reasons leaves unchanged."""
    if snapshot.reasons:
        return order, gpus
    if preemption is Preemption.NOW:
        if not backfill or has_tenants(snapshot) or not is_uniform(snapshot):
            return order, gpus
        reach = _within_reach_of_stops(snapshot, order, gpus, (np.arange(order.size),))
        return (order, gpus) if reach is None else (order[reach], gpus[reach])
    phase = snapshot.jobs.phase[order]
    waits = (phase == QUEUED) | (phase == PREEMPTING)
    if np.count_nonzero(waits) < waits.size:
        order, gpus = order[waits], gpus[waits]
    if order.size > FEW and capacity.total.size == 1 and backfill and not (has_tenants(snapshot) or snapshot.confines):
        room = capacity.room[0]
        fits = np.flatnonzero((gpus <= room) & snapshot.jobs.eligible[order, 0])
        order, gpus = order[fits], gpus[fits]
        single = np.flatnonzero(gpus == 1)
        if single.size > room:
            order, gpus = order[: single[room]], gpus[: single[room]]
    return order, gpus


def starts_of_few(
    snapshot: Snapshot, order: Ints, gpus: Ints, preemption: Preemption, *, backfill: bool
) -> list[tuple[int, int, int]] | None:
    """Return (job, size, GPU model) of each start if these can be found quickly, one by one; None if they cannot.

    That is what ``Filler`` decides for one GPU model and no quota, in a round without preemption or reasons. Most of a
    simulation's rounds are like that, with one job to start.
    """
    if snapshot.reasons or preemption is Preemption.NOW or order.size >= FEW:
        return None
    if order.size and (snapshot.tenant_gpu_quota or snapshot.tenant_guarantees or not is_uniform(snapshot)):
        return None
    jobs = snapshot.jobs
    goes = stopping(snapshot)
    free = snapshot.nodes.free_total
    room = free + int(jobs.gpus[goes].sum()) if goes.size else free
    most = snapshot.total_gpus
    fit: list[tuple[int, int, int]] = []
    for job, wanted in zip(order.tolist(), gpus.tolist(), strict=True):
        phase = jobs.phase.item(job)
        if not room:
            break
        if phase not in (QUEUED, PREEMPTING) or wanted > most or not jobs.eligible.item(job, 0):
            continue
        if wanted > room:
            if not backfill:
                break
            continue
        room -= wanted
        if phase == QUEUED and wanted <= free:
            free -= wanted
            fit.append((job, wanted, 0))
    return fit
