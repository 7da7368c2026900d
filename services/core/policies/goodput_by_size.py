"""What jobs are predicted to do at each gang size, for policies that choose it."""

import numpy as np

from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints


def goodput_of(snapshot: Snapshot, jobs: Ints, sizes: int, node_gpus: int) -> tuple[Floats, Floats]:
    """Return the predicted goodput of jobs at 1, 2, ... GPUs on the fewest nodes, and over several: (n, sizes) each.

    The unit may differ between jobs. A job without a curve of its own is assumed to keep its batch and to scale by its
    speed curve, or, without one, perfectly, which is what Pollux assumes until it has seen more.

    Args:
        jobs: (n,) indices into the job table.
        sizes: How many sizes to return.
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


def _first(curves: Floats, sizes: int) -> Floats:
    """Return curves over exactly this many sizes; beyond those predicted nothing is gained."""
    missing = sizes - curves.shape[-1]
    if missing <= 0:
        return curves[..., :sizes]
    return np.concatenate((curves, np.repeat(curves[..., -1:], missing, axis=-1)), axis=-1)
