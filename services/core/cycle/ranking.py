"""Orders: what a policy hands to the round, and how ties end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.core.cycle.plan import Reason
from services.core.cycle.snapshot import Bools, Floats, Ints, Phase, Snapshot
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId

FEW = 16
"""Fewer jobs are sorted sooner than sifted."""
QUEUED, PREEMPTING = int(Phase.QUEUED), int(Phase.PREEMPTING)


@dataclass(frozen=True)
class Ranking:
    """The jobs a policy wants to run, best first.

    A job that is not in the ranking is not wanted: it waits, and an active round stops it.

    Attributes:
        order: (n_ranked,) indices into the snapshot's job table, each at most once.
        gpus: (n_ranked,) the size each of them should have, on its job's grid.
        unranked: Why the other jobs wait.
    """

    order: Ints
    gpus: Ints
    unranked: Reason = Reason.WAITING_FOR_ROUND

    def __post_init__(self) -> None:
        if self.order.shape != self.gpus.shape or self.order.ndim != 1:
            raise DomainError("a ranking needs one size per job")


def order_by(ids: tuple[JobId, ...], *keys: Floats | Ints | Bools) -> Ints:
    """Return the indices of ``ids`` by the keys, smallest first; the first key counts most, the id last.

    Ids are compared only where all keys tie, because comparing ten thousand strings costs more than the rest.

    Args:
        ids: Job ids, unique.
        keys: At least one (n_jobs,) column without NaN.
    """
    reverse = keys[::-1]
    order = np.lexsort(reverse)
    if order.size < 2:
        return order
    tied = np.zeros(order.size + 1, dtype=np.bool_)
    tied[1:-1] = True
    for key in keys:
        ranked = key[order]
        tied[1:-1] &= ranked[1:] == ranked[:-1]
    if not tied.any():
        return order
    positions = np.flatnonzero(tied[:-1] | tied[1:])
    involved = order[positions].tolist()
    by_id = np.zeros(order.size, dtype=np.int64)
    by_id[sorted(involved, key=ids.__getitem__)] = np.arange(len(involved))
    return np.lexsort((by_id, *reverse))


def order_waiting(
    snapshot: Snapshot, *keys: Floats | Ints | Bools, sizes: Ints | None = None, backfill: bool = True
) -> Ints:
    """Return the jobs without devices, or about to be without, by users' priorities and then as ``order_by``.

    All that a round needs which stops nobody: those that hold devices go on, wherever they rank. Where nobody reads
    reasons, jobs that certainly get nothing in this round are left out before they are sorted (``_within_reach``).

    Args:
        snapshot: The cluster.
        keys: As for ``order_by``.
        sizes: (n_jobs,) the sizes they will be ranked at; None leaves nobody out.
        backfill: Whether a job that does not fit lets those below it start.
    """
    jobs = snapshot.jobs
    waits = np.flatnonzero((jobs.phase == QUEUED) | (jobs.phase == PREEMPTING))
    if waits.size < 2:
        return waits
    if sizes is not None and waits.size > FEW and not snapshot.reasons:
        waits = _within_reach(snapshot, waits, keys[0][waits], sizes[waits], backfill)
    ids = tuple(map(jobs.ids.__getitem__, waits.tolist()))
    order = order_by(ids, *(key[waits] for key in keys))
    return wishes_first(waits[order], jobs.priority)


def _within_reach(snapshot: Snapshot, waits: Ints, key: Floats | Ints | Bools, sizes: Ints, backfill: bool) -> Ints:
    """Return the waiting jobs that may get something, on a cluster of one GPU model without quotas and priorities.

    With room for r GPUs, nothing is left below the r-th one-GPU job that fits; without backfilling, a job takes a GPU
    or blocks all below it, so that none below the (r + 1)-th job matters.
    """
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) != 1 or snapshot.tenant_gpu_quota or not snapshot.nodes.all_schedulable:
        return waits
    if jobs.priority.any() or not jobs.eligible.all():
        return waits
    room = int(snapshot.nodes.free_gpus.sum() + jobs.gpus[jobs.phase == PREEMPTING].sum())
    if not backfill:
        possible = sizes <= snapshot.total_gpus  # a wider one never blocks
        if int(possible.sum()) <= room + 1:
            return waits
        return waits[possible & (key <= np.partition(key[possible], room)[room])]
    if not room:
        return waits[:0]
    fits = sizes <= room
    single = key[sizes == 1]
    if single.size > room:
        fits &= key <= np.partition(single, room - 1)[room - 1]
    return waits[fits]


def wishes_first(order: Ints, priority: Ints) -> Ints:
    """Return ``order`` with the users' priorities put before it: higher first, otherwise unchanged."""
    wishes = priority[order]
    if not wishes.any():
        return order
    return order[np.argsort(-wishes, kind="stable")]
