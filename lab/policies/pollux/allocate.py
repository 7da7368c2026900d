"""Sizes of the least total cost within a number of GPUs.

Pollux searches with a genetic algorithm; the objective is a sum over jobs, so that a table over GPUs finds the exact
optimum instead, job by job:

    best(j, t) = min over sizes g of best(j - 1, t - g) + cost_j(g).

``tests/lab/policies/test_pollux_allocation.py`` holds it against trying everything. Beyond ``EXACT_CELLS`` that table
takes too long, and GPUs go one step after another where the cost falls most per GPU, which is exact wherever costs are
convex.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from services.core.domain.arrays import Floats, Ints

EXACT_CELLS = 30_000_000
"""Jobs x GPUs x sizes that are tried in about a third of a second."""


def least_cost_sizes(cost: Floats, gpus: int) -> Ints:
    """Return the sizes with the least total cost: (n_jobs,), all together at most ``gpus``.

    Of equal totals the one that gives earlier jobs more.

    Args:
        cost: (n_jobs, n_sizes + 1) cost of each job at 0, 1, ... GPUs, infinite where it cannot have that size. Some
            allocation is finite.
        gpus: Devices to share out.
    """
    n_jobs, columns = cost.shape
    if n_jobs * (gpus + 1) * columns > EXACT_CELLS:
        return _steepest(cost, gpus)
    columns = min(columns, gpus + 1)
    reversed_cost = cost[:, columns - 1 :: -1] if columns < cost.shape[1] else cost[:, ::-1]
    padded = np.full(gpus + columns, np.inf)
    windows = sliding_window_view(padded, columns)
    padded[columns - 1 :] = 0.0
    chosen = np.empty((n_jobs, gpus + 1), dtype=np.int64)
    rows = np.arange(gpus + 1)
    for job in range(n_jobs - 1, -1, -1):
        total = windows + reversed_cost[job]
        at = total.argmin(axis=1)
        chosen[job] = columns - 1 - at
        padded[columns - 1 :] = total[rows, at]
    sizes = np.empty(n_jobs, dtype=np.int64)
    left = gpus
    for job in range(n_jobs):
        sizes[job] = chosen[job, left]
        left -= sizes[job]
    return sizes


def _steepest(cost: Floats, gpus: int) -> Ints:
    """Return sizes found by giving GPUs where the cost falls most per GPU; see the module."""
    sizes = np.isfinite(cost).argmax(axis=1)
    left = gpus - int(sizes.sum())
    heap: list[tuple[float, int, int]] = []

    def offer(job: int) -> None:
        now = int(sizes[job])
        ahead = cost[job, now + 1 : now + 1 + left]
        if ahead.size:
            fall = (ahead - cost[job, now]) / np.arange(1, ahead.size + 1)
            best = int(fall.argmin())
            if fall[best] < 0:
                heapq.heappush(heap, (float(fall[best]), job, now + 1 + best))

    for job in range(sizes.size):
        offer(job)
    while heap and left > 0:
        _, job, size = heapq.heappop(heap)
        if size - sizes[job] <= left:
            left -= size - int(sizes[job])
            sizes[job] = size
        offer(job)
    return sizes
