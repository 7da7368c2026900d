"""What came of a grid's order, by the lines of the ledger.

A line's energy counts evenly over its interval. What is drawn in a time is the energy of all lines in it, divided by
its length; five minutes are compared with the mean limit in them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.orders import Curve

BUCKET_S = 300.0
SHORTEST_S = 60.0  #: Of less, lines that reach beyond it say too little


@dataclass(frozen=True)
class EnergyLines:
    """Lines of the ledger; every column is (n_lines,)."""

    owner: Ints  #: Index of the job that each is of
    start_s: Floats  #: UTC seconds
    end_s: Floats
    energy_j: Floats

    def within(self, begin_s: float, end_s: float, n_owners: int) -> Floats:
        """Return the energy of each owner in a time, J: (n_owners,)."""
        overlap_s = np.minimum(self.end_s, end_s) - np.maximum(self.start_s, begin_s)
        share = np.maximum(overlap_s, 0.0) / np.maximum(self.end_s - self.start_s, 1e-9)
        energy_j: Floats = np.zeros(n_owners)
        np.add.at(energy_j, self.owner, self.energy_j * np.minimum(share, 1.0))
        return energy_j


def mean_limit_w(curve: Curve, begin_s: float, end_s: float) -> float:
    """Return the mean of a step curve over a time in which it is finite, watts."""
    energy_j = 0.0
    for since_s, until_s, watts in _steps(curve, begin_s, end_s):
        energy_j += watts * (until_s - since_s)
    return energy_j / (end_s - begin_s)


def excess(lines: EnergyLines, curve: Curve, begin_s: float, end_s: float, baseline_w: float) -> float | None:
    """Return by how much the draw of the worst five minutes exceeds their limit; 0 if it does not.

    It is a share of the limit, and where that is 0 W, of the baseline. Each stretch of time in which there is a limit
    is judged by itself: in five minutes from its start, and by its last five minutes; a shorter one as a whole, unless
    it is below ``SHORTEST_S``. None: there is nothing to judge.
    """
    worst, n_owners = list[float](), int(lines.owner.max(initial=-1)) + 1
    for since_s, until_s in _judged(curve, begin_s, end_s):
        drawn_w = float(lines.within(since_s, until_s, n_owners).sum()) / (until_s - since_s)
        limit_w = mean_limit_w(curve, since_s, until_s)
        of_w = limit_w or baseline_w
        worst.append((drawn_w - limit_w) / of_w if of_w > 0 else 0.0)
    return max(*worst, 0.0) if worst else None


def _judged(curve: Curve, begin_s: float, end_s: float) -> Iterator[tuple[float, float]]:
    stretches: list[tuple[float, float]] = []
    for since_s, until_s, _ in _steps(curve, begin_s, end_s):
        follows = bool(stretches) and stretches[-1][1] == since_s
        stretches.append((stretches.pop()[0] if follows else since_s, until_s))
    for since_s, until_s in stretches:
        if until_s - since_s >= SHORTEST_S:
            last_s = max(until_s - BUCKET_S, since_s)
            for at_s in (*np.arange(since_s, last_s, BUCKET_S).tolist(), last_s):
                yield at_s, min(at_s + BUCKET_S, until_s)


def _steps(curve: Curve, begin_s: float, end_s: float) -> Iterator[tuple[float, float, float]]:
    """Yield the parts of a time in which a curve has a limit: from, until, watts."""
    for at, (at_s, watts) in enumerate(curve):
        since_s, until_s = max(at_s, begin_s), min(curve[at + 1][0] if at + 1 < len(curve) else np.inf, end_s)
        if since_s < until_s and np.isfinite(watts):
            yield since_s, until_s, watts
