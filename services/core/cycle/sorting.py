"""Sorting by several keys; ties are broken by job id."""

from collections.abc import Sequence

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.ids import JobId


def order_by(ids: Sequence[JobId], *keys: Floats | Ints | Bools, which: Ints | None = None) -> Ints:
    """Return the positions in the order of the keys, smallest first; the first key counts most, the id last.

    Ids are compared only where all keys tie, because comparing ten thousand strings costs more than the rest.

    Args:
        keys: At least one (n_jobs,) column without NaN; (n_which,) where ``which`` is given.
        which: (n_which,) indices of the jobs meant; None for all.
    """
    order = np.lexsort(keys[::-1])
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


def among_first(count: int, *keys: Floats | Ints | Bools) -> Ints:
    """Return the positions of all that may be among the first ``count`` by these keys, including ties with the last.

    They are found without sorting the rest.

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


def wishes_first(order: Ints, priority: Ints) -> Ints:
    """Return ``order`` stably sorted by the users' priorities, highest first."""
    wishes = priority[order]
    if not np.count_nonzero(wishes):
        return order
    return order[np.argsort(-wishes, kind="stable")]
