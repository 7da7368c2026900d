"""Goodput by gang size, for policies that choose it, and the batches of gangs that start, where users permit it."""

from dataclasses import replace

import numpy as np

from services.core.cycle.plan import Plan, Start
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Floats, Ints


def with_batches(snapshot: Snapshot, plan: Plan) -> Plan:
    """Return the plan with a batch for each gang that starts: the one for which its goodput is predicted.

    A job whose user does not permit it, or for which nothing is predicted, keeps the user's batch. A gang keeps its
    batch until it starts again.
    """
    batches = snapshot.goodput_batches
    if not batches.size or not plan.actions:
        return plan
    jobs, largest = snapshot.jobs, int(batches.shape[-1])

    def chosen(start: Start) -> Start:
        job = jobs.index[start.job_id]
        curve, low, high = jobs.goodput_curve.item(job), jobs.batch_min.item(job), jobs.batch_max.item(job)
        if curve < 0 or low < 0:
            return start
        over_nodes = int(len(start.placement.shares) > 1)
        batch_size = batches.item(curve, over_nodes, min(start.gpus, largest) - 1)
        return replace(start, batch_size=min(max(batch_size, low), high)) if batch_size > 0 else start

    actions = tuple(chosen(each) if isinstance(each, Start) else each for each in plan.actions)
    return replace(plan, actions=actions)


def goodput_of(snapshot: Snapshot, jobs: Ints, sizes: int, node_gpus: int) -> tuple[Floats, Floats]:
    """Return the predicted goodput of jobs at 1, 2, ... GPUs on the fewest nodes, and over several: (n, sizes) each.

    The unit may differ between jobs. A job without a curve of its own is assumed to keep its batch and to scale by its
    speed curve, or, without one, perfectly, which is what Pollux assumes until it has seen more.

    Args:
        jobs: (n,) indices into the job table.
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
