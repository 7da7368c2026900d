"""How much progress a joule buys."""

from __future__ import annotations

import math


def efficiency_per_j(progress_then: float, progress_now: float, energy_then_j: float, energy_now_j: float) -> float:
    """Return progress per joule between two instants, or NaN where no energy was spent in between.

    ``EFFICIENCY(t) = (Progress(t) - Progress(t - dt)) / (W(t) - W(t - dt))``; GREEN takes dt to be the time since the
    last change of the gang's size. The unit of progress is free (share of the job, epochs, samples: the sum of
    throughput over time), as only ratios are compared. Progress that fell (a restart from an older checkpoint) counts
    as none.

    Source: GREEN, equations 2 and 3.
    """
    energy_j = energy_now_j - energy_then_j
    if not energy_j > 0:
        return math.nan
    return max(progress_now - progress_then, 0.0) / energy_j
