"""Rankings, which a policy hands to the round, and how ties are broken.

A caller may let a round leave out what it would not use (``RoundHints``). Only the functions here use the hints, so
that policies have the same code, and decide the same, with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import repeat

import numpy as np

from services.core.cycle.plan import Action, Hold
from services.core.cycle.snapshot import PREEMPTING, QUEUED, RoundHints, Snapshot, Trigger
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.ids import JobId
from services.core.domain.plain_members import plain_members
from services.core.domain.reasons import Reason

FEW = 16
"""Fewer jobs are sorted sooner than sifted."""
MANY = 512
"""So many jobs are sorted sooner by their first key alone, and those that tie by the others."""


@plain_members
class Preemption(Enum):
    """Whether running jobs may be stopped for better-ranked ones."""

    NEVER = "never"
    """The policy lets every job run to its end."""
    LATER = "later"
    """Not in this round, but in the next active one; a job that will then displace others has that as its reason."""
    NOW = "now"

    @classmethod
    def at(cls, trigger: Trigger) -> Preemption:
        """Return what a preemptive policy may do in a round with this trigger."""
        return cls.NOW if trigger is Trigger.ACTIVE else cls.LATER


@dataclass(frozen=True)
class Ranking:
    """The jobs a policy wants to run, best first.

    A job that is not in the ranking is not wanted: it waits, and an active round stops it.

    Attributes:
        order: (n_ranked,) indices into the snapshot's job table, each at most once.
        gpus: (n_ranked,) the size each of them should have, on its job's grid.
        unranked: Why the other jobs wait.
        expects: Called where reasons are read: indices of other jobs, and when the policy expects to rank them, UTC
            seconds, NaN: unknown; (n,) each.
    """

    order: Ints
    gpus: Ints
    unranked: Reason = Reason.WAITING_FOR_ROUND
    expects: Callable[[], tuple[Ints, Floats]] | None = None

    def __post_init__(self) -> None:
        if self.order.shape != self.gpus.shape or self.order.ndim != 1:
            raise DomainError("a ranking needs one size per job")

    def expecting(self, expects: Callable[[], tuple[Ints, Floats]]) -> Ranking:
        """Return the ranking with the times at which other jobs are expected to be ranked."""
        return replace(self, expects=expects)

    def expected_s(self) -> dict[int, float]:
        """Return when other jobs are expected to be ranked, UTC seconds, by index; without those of unknown time."""
        if self.expects is None:
            return {}
        others, start_s = self.expects()
        known = np.isfinite(start_s)
        return dict(zip(others[known].tolist(), start_s[known].tolist(), strict=True))


def order_by(ids: Sequence[JobId], *keys: Floats | Ints | Bools, which: Ints | None = None) -> Ints:
    """Return the positions in the keys, smallest first; the first key counts most, the id last.

    Ids are compared only where all keys tie, because comparing ten thousand strings costs more than the rest.

    Args:
        ids: Job ids, unique.
        keys: At least one (n_jobs,) column without NaN; (n_which,) where ``which`` is given.
        which: (n_which,) indices of the jobs meant; None for all.
    """
    order = _sorted(keys)
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
    runs: list[int] = np.cumsum(~tied[positions]).tolist()  # those that tie with each other stand side by side
    order[positions] = [at for _, _, at in sorted(zip(runs, map(ids.__getitem__, indices), involved, strict=True))]
    return order


def _sorted(keys: tuple[Floats | Ints | Bools, ...]) -> Ints:
    """Return the positions by all keys, as ``np.lexsort``, which sorts all by every key; that takes longer.

    Stable sorts take a fraction of the time of numpy's other ones, and of its partitions, where many values are equal.
    """
    first = keys[0]
    if first.size < MANY:
        return np.lexsort(keys[::-1])
    if first.dtype != np.float64:
        return _by_queue(first, keys)
    order = np.argsort(first, kind="stable")
    if len(keys) == 1:
        return order
    ranked = first[order]
    tied = np.append(False, ranked[1:] == ranked[:-1])
    positions = np.flatnonzero(tied | np.append(tied[1:], False))
    involved = order[positions]
    runs = np.cumsum(~tied[positions])
    if runs.size and runs[0] == runs[-1]:  # one value that many share, such as zero of those that never ran
        order[positions] = involved[_sorted(tuple(key[involved] for key in keys[1:]))]
        return order
    others = [key[involved] for key in keys[:0:-1]]
    order[positions] = involved[np.lexsort((*others, runs))]
    return order


def _by_queue(queue: Floats | Ints | Bools, keys: tuple[Floats | Ints | Bools, ...]) -> Ints:
    """Return the positions by all keys, of which the first names queues and the like: few values, that many share."""
    lowest, highest = int(queue.min()), int(queue.max())
    if len(keys) == 1 or highest - lowest > FEW:
        return np.lexsort(keys[::-1])
    parts = [np.flatnonzero(queue == value) for value in range(lowest, highest + 1)]
    return np.concatenate([part[_sorted(tuple(key[part] for key in keys[1:]))] for part in parts])


def among_first(count: int, *keys: Floats | Ints | Bools) -> Ints:
    """Return the positions of all that may be among the first ``count`` by these keys, those that tie with the last
    included; they are found without sorting the rest.

    Args:
        count: At least 1.
        keys: At least one (n,) column without NaN; the first counts most.
    """
    some = np.arange(keys[0].size)
    found: list[Ints] = []
    for key in keys:
        if some.size <= count:
            break
        values = key[some]
        last = np.sort(values, kind="stable")[count - 1]
        before = some[values < last]
        found.append(before)
        count -= before.size
        some = some[values == last]
    return np.concatenate((*found, some))


def gives_reasons(snapshot: Snapshot) -> bool:
    """Whether the round has to say why each job waits."""
    return snapshot.hints.reasons


def with_holds(snapshot: Snapshot, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return a plan's actions, without the holds if the round gives no reasons."""
    if snapshot.hints.reasons:
        return tuple(actions)
    return tuple(action for action in actions if not isinstance(action, Hold))


def without_indices(snapshot: Snapshot) -> RoundHints:
    """Return the round's hints for a snapshot of other jobs, to which indices of these jobs mean nothing."""
    return replace(snapshot.hints, contenders=None, newly_waiting=None, before=None)


def waiting(snapshot: Snapshot) -> Ints:
    """Return the indices of the jobs that a round without stops ranks: those that wait, and those that are stopping.

    Where the round gives no reasons, queued jobs that certainly get nothing may be left out.
    """
    if snapshot.hints.contenders is not None:
        return snapshot.hints.contenders
    phase = snapshot.jobs.phase
    return np.flatnonzero((phase == QUEUED) | (phase == PREEMPTING))


def stopping(snapshot: Snapshot) -> Ints:
    """Return the indices of the jobs that are stopping."""
    phase, sorted_out = snapshot.jobs.phase, snapshot.hints.contenders
    if sorted_out is None:
        return np.flatnonzero(phase == PREEMPTING)
    return sorted_out[phase[sorted_out] == PREEMPTING]


def every_job(snapshot: Snapshot) -> Ints:
    """Return the indices of all jobs."""
    return np.arange(len(snapshot.jobs))


def contenders(snapshot: Snapshot, preemption: Preemption) -> Ints:
    """Return the indices of the jobs that a policy has to rank in this round.

    Those are all jobs where running ones may be stopped, and those of ``waiting`` otherwise. A round whose successor
    may stop jobs ranks all too if it gives reasons: it then says who will displace others.
    """
    if preemption is Preemption.NOW or (preemption is Preemption.LATER and snapshot.hints.reasons):
        return every_job(snapshot)
    return waiting(snapshot)


def last_index(snapshot: Snapshot, index: Callable[[], Mapping[JobId, int]], which: Ints | None = None) -> Ints:
    """Return where each of these jobs stood in the table of the last active round, -1 where it did not: (n_which,).

    By this a policy finds what it remembers of jobs in columns, although their indices change from round to round.

    Args:
        snapshot: The cluster.
        index: Returns the indices by id, as the policy remembers them; called only if the round does not tell them.
        which: (n_which,) indices of the jobs meant; None for all.
    """
    before = snapshot.hints.before
    if before is not None:
        return before if which is None else before[which]
    ids = snapshot.jobs.ids
    named = ids if which is None else map(ids.__getitem__, which.tolist())
    return np.fromiter(map(index().get, named, repeat(-1)), np.int64, len(ids) if which is None else which.size)


def queue_changes(snapshot: Snapshot, known: Callable[[], set[JobId]]) -> tuple[list[int], set[JobId]]:
    """Return what changes a queue that a policy keeps itself.

    Args:
        snapshot: The cluster.
        known: Returns the jobs of the policy's queue; called only if they have to be compared with the snapshot.

    Returns:
        The indices of the jobs that wait and are not in the queue, and the jobs of the queue that no longer wait.
    """
    if snapshot.hints.newly_waiting is not None:
        return snapshot.hints.newly_waiting.tolist(), set()
    ids = snapshot.jobs.ids
    queued: list[int] = np.flatnonzero(snapshot.jobs.phase == QUEUED).tolist()
    in_queue = known()
    new = [job for job in queued if ids[job] not in in_queue]
    return new, in_queue.difference(ids[job] for job in queued)


def ranks_whole_queue(snapshot: Snapshot) -> bool:
    """Whether a strict queue is to be ranked down to its end, and not only to the first job that finds no room.

    So it is where the round gives reasons, and with several GPU models or tenants' quotas, for then a job that does
    not fit stops only some of those behind it, and where GPUs are divided between tenants, which changes the order.
    A job that is bound to a node stops none.
    """
    return snapshot.hints.reasons or len(snapshot.gpu_models) > 1 or has_tenants(snapshot) or bool(snapshot.bound)


def is_uniform(snapshot: Snapshot) -> bool:
    """Whether all devices are alike to all jobs: of one GPU model, on nodes that take work."""
    return len(snapshot.gpu_models) == 1 and snapshot.nodes.all_schedulable and not snapshot.bound


def has_tenants(snapshot: Snapshot) -> bool:
    """Whether it matters whose a job is."""
    return bool(snapshot.tenant_gpu_quota) or snapshot.shares is not None


def rank(
    snapshot: Snapshot,
    which: Ints,
    sizes: Ints,
    *keys: Floats | Ints | Bools,
    preemption: Preemption,
    backfill: bool = True,
    unranked: Reason = Reason.WAITING_FOR_ROUND,
) -> Ranking:
    """Return these jobs by users' priorities and then as ``order_by``.

    A round that gives no reasons leaves out those that certainly get nothing before it sorts the rest
    (``_within_reach``, ``within_reach_of_stops``).

    Args:
        snapshot: The cluster.
        which: (n_which,) indices of the wanted jobs, some or all of ``contenders``.
        sizes: (n_which,) the sizes they are ranked at.
        keys: As for ``order_by``; each (n_which,).
        preemption: As the plan is made with (``reconcile``).
        backfill: Whether a job that does not fit lets those below it start.
        unranked: Why the other jobs wait.
    """
    if which.size < 2:
        return Ranking(which, sizes, unranked)
    if which.size > FEW and preemption is not Preemption.NOW and not snapshot.hints.reasons:
        reach = _within_reach(snapshot, which, keys[0], sizes, backfill)
        if reach is not None:
            which, sizes, keys = which[reach], sizes[reach], tuple(key[reach] for key in keys)
    if preemption is Preemption.NOW:
        ranking = Ranking(which, sizes, unranked)
        if leaves_all_as_is(snapshot, ranking):
            return ranking
        wishes = snapshot.jobs.priority[which].any()
        reach = within_reach_of_stops(snapshot, which, sizes, *keys) if backfill and not wishes else None
        if reach is not None:
            which, sizes, keys = which[reach], sizes[reach], tuple(key[reach] for key in keys)
    order = order_by(snapshot.jobs.ids, *keys, which=which)
    order = wishes_first(order, snapshot.jobs.priority[which])
    return Ranking(which[order], sizes[order], unranked)


def leaves_all_as_is(snapshot: Snapshot, ranking: Ranking) -> bool:
    """Whether a round has nothing to do, in whatever order: all jobs are wanted, and hold as many GPUs as they should.

    Without tenants' quotas and shares, that is; those may have changed.
    """
    jobs = snapshot.jobs
    if ranking.order.size < len(jobs) or has_tenants(snapshot):
        return False
    return bool((jobs.gpus[ranking.order] == ranking.gpus).all() and (jobs.phase != PREEMPTING).all())


def _within_reach(
    snapshot: Snapshot, waits: Ints, key: Floats | Ints | Bools, sizes: Ints, backfill: bool
) -> Bools | None:
    """Return which waiting jobs may get something; None (any may) unless there is one GPU model and no wishes.

    With room for r GPUs, nothing is left below the r-th one-GPU job that fits; without backfilling, a job takes a GPU
    or blocks all below it, so that none below the (r + 1)-th job matters.
    """
    jobs = snapshot.jobs
    if has_tenants(snapshot) or not is_uniform(snapshot):
        return None
    if jobs.priority[waits].any() or not jobs.eligible[waits].all():
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


def within_reach_of_stops(snapshot: Snapshot, which: Ints, sizes: Ints, *keys: Floats | Ints | Bools) -> Ints | None:
    """Return the positions of the jobs that an active round without reasons has to look at; None: all, or nearly.

    Waiting ones get nothing, whatever is stopped, below as many waiting one-GPU jobs as there are GPUs, where there is
    one GPU model, all nodes take work, and tenants do not change the order.
    """
    jobs, gpus = snapshot.jobs, snapshot.total_gpus
    if snapshot.hints.reasons or which.size - gpus <= MANY or has_tenants(snapshot) or not is_uniform(snapshot):
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


def wishes_first(order: Ints, priority: Ints) -> Ints:
    """Return ``order`` with the users' priorities put before it: higher first, otherwise unchanged."""
    wishes = priority[order]
    if not np.count_nonzero(wishes):
        return order
    return order[np.argsort(-wishes, kind="stable")]
