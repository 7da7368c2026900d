"""What each size is worth to each job: SPEEDUP over the fair share, and its part in the cluster's power mean.

    SPEEDUP_j(g) = GOODPUT_j(g) / GOODPUT_j(fair share) * (1 if g is what j has, else (T_j - R_j d) / (T_j + d))

with T_j the job's age, R_j its restarts so far and d what one costs. The fair share is an equal part of the GPUs,
rounded up. ``FITNESS = (mean over j of SPEEDUP_j ** p) ** (1 / p)`` is a rising function of a sum over jobs: its
maximum is the least sum of costs.

The 0.001 added to speedups is that of the authors' code.

Source: Pollux section 4.2 (FITNESS, SPEEDUP, REALLOC_FACTOR).
"""

from __future__ import annotations

import numpy as np

from services.core.domain.arrays import Bools, Floats, Ints

LEAST = 1e-3
"""Added to every speedup, so that a job without GPUs has a finite cost."""


def speedups(goodput: Floats, fair: Ints, present: Ints, factor: Floats) -> Floats:
    """Return the speedup of each job at each size, restart penalty included: (n, sizes).

    Args:
        goodput: (n, sizes) at 1, 2, ... GPUs.
        fair: (n,) the fair share, a size the job may have.
        present: (n,) devices held, 0 for none.
        factor: (n,) what a change leaves of a speedup.
    """
    sizes = np.arange(1, int(goodput.shape[1]) + 1, dtype=np.int64)
    relative = goodput / goodput[np.arange(fair.size), fair - 1][:, None]
    changed: Bools = sizes[None, :] != present[:, None]
    return np.where(changed, relative * factor[:, None], relative)


def restart_factor(age_s: Floats, restarts: Ints, restart_s: float) -> Floats:
    """Return REALLOC_FACTOR of each job, 0..1: what one more restart leaves of its speedup."""
    return np.maximum(age_s - restarts * restart_s, 0.0) / np.maximum(age_s + restart_s, 1e-9)


def costs(speedup: Floats, fairness: float) -> Floats:
    """Return what each speedup adds to the sum that is least where FITNESS is greatest; same shape.

    Args:
        speedup: Any shape, >= 0.
        fairness: p.
    """
    if fairness == 0.0:
        return -np.log(np.maximum(speedup, LEAST))
    return -np.sign(fairness) * (speedup + LEAST) ** fairness
