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

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Floats, Ints

LEAST = 1e-3
"""Added to every speedup, so that a job without GPUs has a finite cost."""


def goodput_of(snapshot: Snapshot, jobs: Ints, sizes: int, node_gpus: int) -> tuple[Floats, Floats]:
    """Return the predicted goodput of jobs at 1, 2, ... GPUs on the fewest nodes, and over several: (n, sizes) each.

    In any unit per job. A job without a curve of its own is taken to keep its batch and to scale by its speed curve, or
    without that perfectly, which is what Pollux assumes until it has seen more.

    Args:
        snapshot: The cluster.
        jobs: (n,) indices into its job table.
        sizes: How many sizes.
        node_gpus: Devices of the largest node.
    """
    table = snapshot.jobs
    one = np.tile(np.arange(1, sizes + 1, dtype=np.float64), (jobs.size, 1))
    spread = one.copy()
    speed_row, goodput_row = table.speed_curve[jobs], table.goodput_curve[jobs]
    tuned, fixed = goodput_row >= 0, (goodput_row < 0) & (speed_row >= 0)
    if fixed.any():
        one[fixed] = spread[fixed] = _first(snapshot.speed_curves, sizes)[speed_row[fixed]]
    if tuned.any():
        curves = _first(snapshot.goodput_curves, sizes)[goodput_row[tuned]]
        one[tuned], spread[tuned] = curves[:, 0], curves[:, 1]
    one[:, node_gpus:] = spread[:, node_gpus:]
    return one, spread


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


def _first(curves: Floats, sizes: int) -> Floats:
    """Return curves over exactly so many sizes; beyond those predicted nothing is gained."""
    missing = sizes - curves.shape[-1]
    if missing <= 0:
        return curves[..., :sizes]
    return np.concatenate((curves, np.repeat(curves[..., -1:], missing, axis=-1)), axis=-1)
