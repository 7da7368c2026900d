"""Rankings, which a policy hands to the round, and how their ties are broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from services.core.cycle.rounds import Preemption
from services.core.cycle.sifting import has_nothing_to_do, within_reach
from services.core.cycle.snapshot import Snapshot
from services.core.cycle.sorting import order_by, wishes_first
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.errors import DomainError
from services.core.domain.reasons import Reason


@dataclass(frozen=True)
class Ranking:
    """The jobs a policy wants to run, best first.

    A job that is not in the ranking is not wanted: it waits, and an active round stops it.
    """

    order: Ints  #: (n_ranked,) indices into the snapshot's job table, each at most once
    gpus: Ints  #: (n_ranked,) the size each of them should have, on its job's grid
    unranked: Reason = Reason.WAITING_FOR_ROUND  #: Why the other jobs wait
    expects: Callable[[], tuple[Ints, Floats]] | None = None
    """Called where reasons are read: returns the indices of other jobs and when the policy expects to rank them, UTC
    seconds, NaN if unknown; (n,) each."""

    def __post_init__(self) -> None:
        if self.order.shape != self.gpus.shape or self.order.ndim != 1:
            raise DomainError("a ranking needs one size per job")

    def expecting(self, expects: Callable[[], tuple[Ints, Floats]]) -> Ranking:
        return replace(self, expects=expects)

    def expected_s(self) -> dict[int, float]:
        """Return when other jobs are expected to be ranked, UTC seconds, by index; unknown ones are left out."""
        if self.expects is None:
            return {}
        others, start_s = self.expects()
        known = np.isfinite(start_s)
        return dict(zip(others[known].tolist(), start_s[known].tolist(), strict=True))


def rank(
    snapshot: Snapshot,
    which: Ints,
    sizes: Ints,
    *keys: Floats | Ints | Bools,
    preemption: Preemption,
    backfill: bool = True,
    unranked: Reason = Reason.WAITING_FOR_ROUND,
) -> Ranking:
    """Return these jobs ranked by users' priorities and then by ``order_by``.

    A round that gives no reasons leaves out those that certainly get nothing, before it sorts the rest
    (``sifting.within_reach``).

    Args:
        which: (n_which,) indices of the wanted jobs, some or all of ``contenders``.
        sizes: (n_which,) the sizes they are ranked at.
        keys: As for ``order_by``; each (n_which,).
        preemption: The value used to make the plan (``reconcile``).
        backfill: Whether jobs below one that does not fit may start.
    """
    if which.size < 2 or (preemption is Preemption.NOW and has_nothing_to_do(snapshot, which, sizes)):
        return Ranking(which, sizes, unranked)
    reach = within_reach(snapshot, which, sizes, keys, preemption, backfill=backfill)
    if reach is not None:
        which, sizes, keys = which[reach], sizes[reach], tuple(key[reach] for key in keys)
    order = order_by(snapshot.jobs.ids, *keys, which=which)
    order = wishes_first(order, snapshot.jobs.priority[which])
    return Ranking(which[order], sizes[order], unranked)
