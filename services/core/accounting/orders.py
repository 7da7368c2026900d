"""What came of a grid's order, by the lines of the ledger.

A line's energy counts evenly over its interval. What is drawn in a time is the energy of all lines in it, divided by
its length; five minutes are compared with the mean limit in them.
"""

from dataclasses import dataclass

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.domain.orders import Curve

BUCKET_S = 300.0


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
    for at, (since_s, watts) in enumerate(curve):
        until_s = curve[at + 1][0] if at + 1 < len(curve) else end_s
        energy_j += watts * max(min(until_s, end_s) - max(since_s, begin_s), 0.0) if np.isfinite(watts) else 0.0
    return energy_j / (end_s - begin_s)


def excess(lines: EnergyLines, curve: Curve, begin_s: float, end_s: float, baseline_w: float) -> float:
    """Return by how much the draw of the worst whole five minutes exceeds their limit; 0 if it does not.

    It is a share of the limit, and where that is 0 W, of the baseline.
    """
    worst, n_owners = 0.0, int(lines.owner.max(initial=-1)) + 1
    for since_s in np.arange(begin_s, end_s - BUCKET_S + 1e-6, BUCKET_S).tolist():
        drawn_w = float(lines.within(since_s, since_s + BUCKET_S, n_owners).sum()) / BUCKET_S
        limit_w = mean_limit_w(curve, since_s, since_s + BUCKET_S)
        of_w = limit_w or baseline_w
        worst = max(worst, (drawn_w - limit_w) / of_w if of_w > 0 else 0.0)
    return worst
