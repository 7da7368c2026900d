"""The slices of a GPU, the 19 layouts that cut it, and which slices several GPUs can hold together."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from services.core.domain.errors import DomainError
from services.core.domain.gpus import SLICE_SEVENTHS
from services.core.solvers.model import ModelBuilder
from services.core.solvers.solve import solve

SLICES = SLICE_SEVENTHS
"""The slice types 1g, 2g, 3g, 4g and 7g, in sevenths of a GPU; everything counted by slice type is in this order."""

SliceCounts = tuple[int, int, int, int, int]  #: How many slices of each type

LAYOUTS: tuple[tuple[int, ...], ...] = (
    (7,),
    (3, 4),
    (2, 1, 4),
    (1, 1, 1, 4),
    (3, 3),
    (2, 1, 3),
    (1, 1, 1, 3),
    (3, 2, 2),
    (3, 2, 1, 1),
    (3, 1, 1, 2),
    (3, 1, 1, 1, 1),
    (2, 1, 2, 2),
    (2, 1, 2, 1, 1),
    (2, 1, 1, 1, 2),
    (1, 1, 1, 2, 1, 1),
    (1, 1, 1, 1, 1, 2),
    (2, 1, 1, 1, 1, 1),
    (1, 2, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 1, 1),
)
"""The 19 layouts by their places on the GPU, layout 1 of the paper first (Clover, Figure 1)."""


def counts_of(slices: Sequence[int]) -> SliceCounts:
    """Return how many slices of each type there are among sizes in sevenths; ``DomainError`` for another size."""
    found = Counter(slices)
    if unknown := sorted(set(found) - set(SLICES)):
        raise DomainError(f"there is no slice of {unknown[0]}g; slices are {', '.join(f'{size}g' for size in SLICES)}")
    return found[1], found[2], found[3], found[4], found[7]


LAYOUT_COUNTS: tuple[SliceCounts, ...] = tuple(dict.fromkeys(counts_of(layout) for layout in LAYOUTS))
"""The layouts that differ in what they hold, not only in places."""


@lru_cache(maxsize=1 << 18)
def can_be_cut(slices: SliceCounts, gpus: int) -> bool:
    """Return whether ``gpus`` GPUs can hold these slices at once; a slice of a layout may stay empty.

    Exact. A 7g takes a GPU of its own. Next to a 4g there is room for one 3g, or for three sevenths with at most one
    2g. Every other GPU holds two 3g; or one 3g and four sevenths with at most two 2g; or seven sevenths with at most
    three 2g. What remains is a choice of two numbers: how many 3g go next to a 4g, and how many GPUs have a single 3g.
    """
    ones, twos, threes, fours, sevens = slices
    open_gpus = gpus - sevens - fours
    if min(slices) < 0 or open_gpus < 0:
        return False
    for beside_four in range(min(fours, threes) + 1):
        rest = threes - beside_four
        for single in range(rest % 2, min(rest, open_gpus) + 1, 2):
            without = open_gpus - single - (rest - single) // 2
            if without < 0:
                continue
            places_for_twos = (fours - beside_four) + 2 * single + 3 * without
            sevenths = 3 * (fours - beside_four) + 4 * single + 7 * without
            if twos <= places_for_twos and 2 * twos + ones <= sevenths:
                return True
    return False


@dataclass(frozen=True)
class Realisation:
    """How GPUs are cut to hold a set of slices."""

    layouts: tuple[int, ...]  #: For each GPU the index of its layout in ``LAYOUTS``
    recut: tuple[int, ...]  #: The positions of the GPUs whose layout changes


def realise(slices: SliceCounts, current: Sequence[int], recut_cost: Sequence[float] | None = None) -> Realisation:
    """Return layouts for the GPUs that hold ``slices``, with the fewest GPUs cut anew, or at the least recut cost.

    Exact, by an integer programme over how many GPUs of each present layout stay and how many get which new one.

    Args:
        slices: What must be held; any further slices stay empty.
        current: For each GPU the index of its layout in ``LAYOUTS``.
        recut_cost: For each GPU the cost of cutting it anew, above 0; all the same by default.

    Raises:
        DomainError: an index is not a layout's, or the GPUs cannot hold the slices.
    """
    if any(not 0 <= layout < len(LAYOUTS) for layout in current):
        raise DomainError(f"a layout is a number from 0 to {len(LAYOUTS) - 1}")
    if not can_be_cut(slices, len(current)):
        raise DomainError(f"slices {_named(slices)} cannot be cut from {len(current)} GPUs")
    costs = [1.0] * len(current) if recut_cost is None else list(recut_cost)
    kinds = list(zip(current, costs, strict=True))
    present = sorted(set(kinds))
    held = np.array([counts_of(LAYOUTS[layout]) for layout, _ in present] + list(LAYOUT_COUNTS), dtype=np.int64)
    there = [kinds.count(kind) for kind in present] + [len(current)] * len(LAYOUT_COUNTS)
    model = ModelBuilder()
    cost = [-each for _, each in present] + [0.0] * len(LAYOUT_COUNTS)  # what is not saved by staying is paid
    columns = model.add_variables(len(held), upper=there, cost=cost, integer=True)
    model.add_rows(1, (0, columns, 1.0), lower=len(current), upper=len(current))
    rows = np.repeat(np.arange(len(SLICES)), len(held))
    model.add_rows(len(SLICES), (rows, np.tile(columns, len(SLICES)), held.T.ravel()), lower=np.array(slices))
    found = solve(model.build()).values
    if found is None:
        raise DomainError(f"no layouts were found for slices {_named(slices)}")
    chosen = found.astype(np.int64).tolist()
    staying = dict(zip(present, chosen[: len(present)], strict=True))
    new = [
        layout
        for counts, count in zip(LAYOUT_COUNTS, chosen[len(present) :], strict=True)
        for layout in [next(at for at, each in enumerate(LAYOUTS) if counts_of(each) == counts)] * count
    ]
    layouts, recut = list(current), list[int]()
    for gpu, kind in enumerate(kinds):
        if staying[kind] > 0:
            staying[kind] -= 1
        else:
            layouts[gpu] = new[len(recut)]
            recut.append(gpu)
    return Realisation(tuple(layouts), tuple(recut))


def _named(slices: SliceCounts) -> str:
    return " + ".join(f"{count} x {size}g" for count, size in zip(slices, SLICES, strict=True) if count) or "none"
