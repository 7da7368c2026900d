"""Gangs onto nodes so that no two of those that span nodes share one: such gangs slow each other down.

Source: Pollux section 4.2 (interference avoidance).
"""

from __future__ import annotations

import numpy as np

from services.core.cycle.placing import FreeDevices, fewest_nodes
from services.core.cycle.snapshot import Snapshot
from services.core.domain.arrays import Bools, Floats, Ints
from services.core.domain.placement import Placement


def nodes_for(counts: Ints, spanned: Bools, gpus: int) -> list[tuple[int, int]] | None:
    """Return the (node, how many) for a gang: on one node where one has room, else over nodes without spanning gangs.

    Args:
        counts: (n_nodes,) free devices.
        spanned: (n_nodes,) nodes that a gang over several nodes uses.
        gpus: Size of the gang.
    """
    if gpus <= int(counts.max(initial=0)):
        return fewest_nodes(counts, gpus)
    return fewest_nodes(np.where(spanned, 0, counts), gpus)


def spanned_nodes(snapshot: Snapshot, jobs: Ints | None = None) -> Bools:
    """Return which nodes hold part of a gang that spans nodes, of all jobs or of some: (n_nodes,)."""
    where = {node_id: at for at, node_id in enumerate(snapshot.nodes.ids)}
    spanned = np.zeros(len(snapshot.nodes), dtype=np.bool_)
    placements = snapshot.jobs.placements
    for placement in placements if jobs is None else map(placements.__getitem__, jobs.tolist()):
        if placement is not None and len(placement.shares) > 1:
            spanned[[where[share.node_id] for share in placement.shares if share.node_id in where]] = True
    return spanned


class Apart:
    """Places gangs on the fewest nodes, and never two that span nodes on one; a gang without such a place waits."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._spanned = spanned_nodes(snapshot)

    def __call__(self, snapshot: Snapshot, job: int, gpus: int, gpu_model: int, free: FreeDevices) -> Placement | None:
        """Take devices for a gang; see ``cycle.placing.Placer``."""
        del job
        counts = np.where(snapshot.nodes.gpu_model == gpu_model, free.count, 0)
        shares = nodes_for(counts, self._spanned, gpus)
        if shares is None:
            return None
        if len(shares) > 1:
            self._spanned[[at for at, _ in shares]] = True
        return free.take(shares)


def even_sizes(columns: int, node_gpus: int) -> Bools:
    """Return which of 0, 1, ... GPUs part a node, or are whole nodes: (columns,). Gangs of such sizes always pack."""
    sizes = np.arange(columns, dtype=np.int64)
    parts: Bools = node_gpus % np.maximum(sizes, 1) == 0
    return np.where(sizes <= node_gpus, parts, sizes % node_gpus == 0)


def fit(sizes: Ints, counts: Ints, spanned: Bools, one: Floats, spread: Floats) -> tuple[Ints, float]:
    """Return sizes that have a place, and their total cost.

    The widest gang goes first and gets what was asked for, or else what costs least of what is left.

    Args:
        sizes: (n,) sizes wanted; 0 stays 0.
        counts: (n_nodes,) free devices; used up.
        spanned: (n_nodes,) nodes that gangs over several nodes use already; marked.
        one, spread: (n, n_sizes + 1) cost at 0, 1, ... GPUs of one node and of several, infinite where not possible.
    """
    fitted = np.zeros_like(sizes)
    total = 0.0
    for job in np.argsort(-sizes, kind="stable").tolist():
        best: tuple[float, int, list[tuple[int, int]]] = (float(one[job, 0]), 0, [])
        for size in range(int(sizes[job]), 0, -1):
            if not np.isfinite(one[job, size]):
                continue
            shares = nodes_for(counts, spanned, size)
            if shares is None:
                continue
            alone = len(shares) == 1
            best = min(best, (float((one if alone else spread)[job, size]), size, shares))
            if alone:
                break
        cost, fitted[job], shares = best
        total += cost
        for node, count in shares:
            counts[node] -= count
            spanned[node] |= len(shares) > 1
    return fitted, total
