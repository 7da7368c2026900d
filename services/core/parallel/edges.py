"""The edges of a job's graph, and what a cut through them weighs.

Between consecutive stages every pair of replicas is joined by an edge of the same weight, so these are kept as one
number per pair of stages. The others are few and listed: all-reduce rings or trees, and the pairs in expert groups.

Source: A-SRPT section IV-B; the trees are Sanders, Speck and Träff's two-tree (Parallel Computing 35(12), 2009).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from services.core.domain.arrays import Floats, Ints
from services.core.parallel.graph import AllReduce, JobGraph, Stage


@dataclass(frozen=True)
class Edges:
    """The weighted edges of a job's graph."""

    between: Floats  #: (n_stages - 1,) bytes per iteration between each replica of a stage and each of the next
    ends: Ints  #: (n, 2) vertices of the listed edges, the smaller first; ascending, each pair once
    weights: Floats  #: (n,) their bytes per iteration


def edges_of(graph: JobGraph) -> Edges:
    stages = graph.stages
    between = [
        2.0 * stage.output_bytes / (stage.replicas * following.replicas) for stage, following in pairwise(stages)
    ]
    pairs: dict[tuple[int, int], float] = {}
    for stage, first in zip(stages, graph.first.tolist(), strict=False):
        for (a, b), weight in _within(stage, graph.all_reduce):
            if weight > 0:
                pair = (first + min(a, b), first + max(a, b))
                pairs[pair] = pairs.get(pair, 0.0) + weight
    ends = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
    weights = np.array([pairs[pair] for pair in sorted(pairs)], dtype=np.float64)
    return Edges(np.array(between, dtype=np.float64), ends, weights)


def _within(stage: Stage, kind: AllReduce) -> list[tuple[tuple[int, int], float]]:
    """Return the edges among a stage's replicas 0, 1, ...; a pair may occur twice."""
    k, group = stage.replicas, stage.expert_parallel
    found: list[tuple[tuple[int, int], float]] = []
    if k > 1:
        summed = 2.0 * (k - 1) / k * stage.parameter_bytes
        if kind is AllReduce.RING:
            found += [((a, (a + 1) % k), summed) for a in range(k if k > 2 else 1)]
        else:
            found += [(edge, summed / 2) for tree in double_binary_trees(k) for edge in tree]
    if group > 1 and stage.expert_bytes:
        exchanged = 4.0 * stage.expert_bytes / (k * group)  # there and back, forward and backward
        for start in range(0, k, group):
            members = range(start, start + group)
            found += [((a, b), exchanged) for a in members for b in members if a < b]
    return found


def double_binary_trees(n: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the (child, parent) edges of two binary trees over ``n`` vertices.

    The first is the in-order tree: a vertex's height is the number of its trailing zero bits. The second is its mirror
    image for even ``n``, else the first shifted by one, so that (except for the roots) a vertex with children in one
    tree has none in the other: each carries half of the data, and every vertex sends about as much as it receives.
    """
    first = [(vertex, _parent(vertex, n)) for vertex in range(1, n)]
    turned = [n - 1 - vertex if n % 2 == 0 else (vertex + 1) % n for vertex in range(n)]
    return first, [(turned[child], turned[parent]) for child, parent in first]


def _parent(vertex: int, n: int) -> int:
    low = vertex & -vertex
    above = (vertex ^ low) | (low << 1)
    return above if above < n else vertex ^ low
