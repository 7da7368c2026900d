"""What kind of round it is: whether it may stop jobs, and which jobs it has to look at.

A round that gives no reasons leaves out jobs that certainly stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from itertools import repeat

import numpy as np

from services.core.cycle.plan import Action, Hold
from services.core.cycle.snapshot import PREEMPTING, QUEUED, Snapshot, Trigger
from services.core.domain.arrays import Ints
from services.core.domain.ids import JobId
from services.core.domain.plain_members import plain_members


@plain_members
class Preemption(Enum):
    """Whether running jobs may be stopped for higher-ranked ones."""

    NEVER = "never"  #: The policy lets every job run to its end
    LATER = "later"
    """Not in this round, but in the next active one; a job that will then displace others has that as its reason."""
    NOW = "now"

    @classmethod
    def at(cls, trigger: Trigger) -> Preemption:
        """Return when a preemptive policy may stop jobs, in a round with this trigger."""
        return cls.NOW if trigger is Trigger.ACTIVE else cls.LATER


def with_holds(snapshot: Snapshot, actions: Iterable[Action]) -> tuple[Action, ...]:
    """Return a plan's actions, dropping the holds if the round gives no reasons."""
    if snapshot.reasons:
        return tuple(actions)
    return tuple(action for action in actions if not isinstance(action, Hold))


def waiting(snapshot: Snapshot) -> Ints:
    """Return the indices of the jobs ranked by a round that stops none: those that wait, and those that stop."""
    phase = snapshot.jobs.phase
    return np.flatnonzero((phase == QUEUED) | (phase == PREEMPTING))


def stopping(snapshot: Snapshot) -> Ints:
    return np.flatnonzero(snapshot.jobs.phase == PREEMPTING)


def every_job(snapshot: Snapshot) -> Ints:
    return np.arange(len(snapshot.jobs))


def contenders(snapshot: Snapshot, preemption: Preemption) -> Ints:
    """Return the indices of the jobs that a policy has to rank in this round.

    These are all jobs if running ones may be stopped, and otherwise those of ``waiting``. A round that gives reasons
    also ranks all if the next one may stop jobs: it then says who will displace others.
    """
    if preemption is Preemption.NOW or (preemption is Preemption.LATER and snapshot.reasons):
        return every_job(snapshot)
    return waiting(snapshot)


def last_index(snapshot: Snapshot, index: Mapping[JobId, int], which: Ints | None = None) -> Ints:
    """Return where each of these jobs stood in the table of the last active round, -1 if it was not there: (n_which,).

    A policy uses this to find what it remembers of jobs in columns, although their indices change from round to round.

    Args:
        index: The indices by id, as the policy remembers them.
        which: (n_which,) indices of the jobs meant; None for all.
    """
    ids = snapshot.jobs.ids
    named = ids if which is None else map(ids.__getitem__, which.tolist())
    return np.fromiter(map(index.get, named, repeat(-1)), np.int64, len(ids) if which is None else which.size)


def queue_changes(snapshot: Snapshot, in_queue: set[JobId]) -> tuple[list[int], set[JobId]]:
    """Return the changes to a queue that a policy keeps itself.

    Returns:
        The indices of waiting jobs that are not in the queue, and the jobs in the queue that no longer wait.
    """
    ids = snapshot.jobs.ids
    queued: list[int] = np.flatnonzero(snapshot.jobs.phase == QUEUED).tolist()
    new = [job for job in queued if ids[job] not in in_queue]
    return new, in_queue.difference(ids[job] for job in queued)


def ranks_whole_queue(snapshot: Snapshot) -> bool:
    """Whether a strict queue must be ranked to its end, rather than only to the first job that finds no room.

    That is the case if the round gives reasons; with several GPU models or tenant quotas, where a job that does not fit
    blocks only some of those behind it; where GPUs are divided between tenants, which changes the order; and where jobs
    are confined to nodes, because such a job blocks none.
    """
    return snapshot.reasons or len(snapshot.gpu_models) > 1 or has_tenants(snapshot) or snapshot.confines


def is_uniform(snapshot: Snapshot) -> bool:
    """Whether all devices are equivalent for all jobs: one GPU model, on nodes that take work, no confined jobs."""
    return len(snapshot.gpu_models) == 1 and snapshot.nodes.all_schedulable and not snapshot.confines


def has_tenants(snapshot: Snapshot) -> bool:
    return bool(snapshot.tenant_gpu_quota or snapshot.tenant_guarantees) or snapshot.shares is not None
