"""Orders: what a policy hands to the round, and how ties end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.core.cycle.plan import Reason
from services.core.cycle.snapshot import PREEMPTING, QUEUED, Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId

FEW = 16
"""Fewer jobs are sorted sooner than sifted."""


@dataclass(frozen=True)
class Ranking:
    """The jobs a policy wants to run, best first.

    A job that is not in the ranking is not wanted: it waits, and an active round stops it.

    Attributes:
        order: (n_ranked,) indices into the snapshot's job table, each at most once.
        gpus: (n_ranked,) the size each of them should have, on its job's grid.
        unranked: Why the other jobs wait.
        expected_s: When the policy expects to rank some of those, UTC seconds, by index.
    """

    order: Ints
    gpus: Ints
    unranked: Reason = Reason.WAITING_FOR_ROUND
    expected_s: Mapping[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        if self.order.shape != self.gpus.shape or self.order.ndim != 1:
            raise DomainError("a ranking needs one size per job")

    def expecting(self, others: Ints, start_s: Floats) -> Ranking:
        """Return the ranking with when these other jobs are expected to be ranked, UTC seconds, NaN: unknown: (n,)."""
        known = np.isfinite(start_s)
        return replace(self, expected_s=dict(zip(others[known].tolist(), start_s[known].tolist(), strict=True)))


def order_by(ids: Sequence[JobId], *keys: Floats | Ints | Bools, which: Ints | None = None) -> Ints:
    """Return the positions in the keys, smallest first; the first key counts most, the id last.

    Ids are compared only where all keys tie, because comparing ten thousand strings costs more than the rest.

    Args:
        ids: Job ids, unique.
        keys: At least one (n_jobs,) column without NaN; (n_which,) where ``which`` is given.
        which: (n_which,) indices of the jobs meant; None for all.
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
    involved: list[int] = order[positions].tolist()
    indices: list[int] = involved if which is None else which[involved].tolist()
    by_name = sorted(zip(map(ids.__getitem__, indices), involved, strict=True))
    by_id = np.zeros(order.size, dtype=np.int64)
    by_id[[at for _, at in by_name]] = np.arange(len(involved))
    return np.lexsort((by_id, *reverse))


def waiting(snapshot: Snapshot) -> Ints:
    """Return the indices of the jobs a round that stops nobody ranks: those that wait, and those that are stopping."""
    if snapshot.contenders is not None:
        return snapshot.contenders
    phase = snapshot.jobs.phase
    return np.flatnonzero((phase == QUEUED) | (phase == PREEMPTING))


def every_job(snapshot: Snapshot) -> Ints:
    """Return the indices of all jobs."""
    return np.arange(len(snapshot.jobs))


def rank(
    snapshot: Snapshot,
    which: Ints,
    sizes: Ints,
    *keys: Floats | Ints | Bools,
    unranked: Reason = Reason.WAITING_FOR_ROUND,
) -> Ranking:
    """Return these jobs by users' priorities and then as ``order_by``.

    Args:
        snapshot: The cluster.
        which: (n_which,) indices of the wanted jobs.
        sizes: (n_which,) the sizes they are ranked at.
        keys: As for ``order_by``; each (n_which,).
        unranked: Why the other jobs wait.
    """
    order = order_by(snapshot.jobs.ids, *keys, which=which)
    order = wishes_first(order, snapshot.jobs.priority[which])
    return Ranking(which[order], sizes[order], unranked)


def rank_waiting(
    snapshot: Snapshot,
    waits: Ints,
    sizes: Ints,
    *keys: Floats | Ints | Bools,
    backfill: bool = True,
    unranked: Reason = Reason.WAITING_FOR_ROUND,
) -> Ranking:
    """Return some or all of the ``waiting`` jobs as ``rank`` does, for a round that stops nobody.

    Those that hold devices go on, wherever they rank. Where nobody reads reasons, jobs that certainly get nothing in
    this round are left out before they are sorted (``_within_reach``); ``backfill`` says whether a job that does not
    fit lets those below it start.
    """
    if waits.size < 2:
        return Ranking(waits, sizes, unranked)
    if waits.size > FEW and not snapshot.reasons:
        reach = _within_reach(snapshot, waits, keys[0], sizes, backfill)
        if reach is not None:
            waits, sizes, keys = waits[reach], sizes[reach], tuple(key[reach] for key in keys)
    return rank(snapshot, waits, sizes, *keys, unranked=unranked)


def _within_reach(
    snapshot: Snapshot, waits: Ints, key: Floats | Ints | Bools, sizes: Ints, backfill: bool
) -> Bools | None:
    """Return which waiting jobs may get something; None (any may) unless there is one GPU model and no wishes.

    With room for r GPUs, nothing is left below the r-th one-GPU job that fits; without backfilling, a job takes a GPU
    or blocks all below it, so that none below the (r + 1)-th job matters.
    """
    jobs = snapshot.jobs
    if len(snapshot.gpu_models) != 1 or snapshot.tenant_gpu_quota or not snapshot.nodes.all_schedulable:
        return None
    if jobs.priority[waits].any() or not jobs.eligible[waits].all():
        return None
    room = int(snapshot.nodes.free_gpus.sum() + jobs.gpus[waiting(snapshot)].sum())  # the queued hold none
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


def wishes_first(order: Ints, priority: Ints) -> Ints:
    """Return ``order`` with the users' priorities put before it: higher first, otherwise unchanged."""
    wishes = priority[order]
    if not np.count_nonzero(wishes):
        return order
    return order[np.argsort(-wishes, kind="stable")]
