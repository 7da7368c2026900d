"""Packing instances of several sizes onto nodes, each whole on one node.

Where sizes divide each other, as 1, 2, 4 and 8 do, placing the largest first, each on the fullest node that holds it,
finds a packing whenever there is one. Other sizes need a search: on two nodes of 8, that order puts 4 and 3 together,
and of 4, 3, 3, 2, 2 and 2 the last finds no room, though 4, 2 and 2 fill one node and 3, 3 and 2 the other.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from services.core.domain.arrays import Bools

MOST_STEPS = 20_000  #: A search is given up after placing this many instances on the way, the same on every machine


def divide_each_other(sizes: Sequence[int]) -> bool:
    """Return whether the larger of any two sizes is a multiple of the smaller."""
    return all(larger % smaller == 0 for smaller, larger in pairwise(sorted(set(sizes))))


def patterns(sizes: Sequence[int], room: int) -> list[tuple[int, ...]]:
    """Return the ways to fill a node so that no further instance fits: the number of each size.

    >>> patterns([2, 3], 8)
    [(4, 0), (2, 1), (1, 2)]

    Args:
        sizes: Distinct, each > 0.
    """
    if not sizes:
        return [()]
    found: list[tuple[int, ...]] = []
    first, rest = sizes[0], sizes[1:]
    for count in range(room // first, -1, -1):
        for more in patterns(rest, room - count * first):
            left = room - count * first - sum(n * size for n, size in zip(more, rest, strict=True))
            if left < first:
                found.append((count, *more))
    return found


def pack(sizes: Sequence[int], allowed: Bools, free: Sequence[int], most_steps: int = MOST_STEPS) -> list[int] | None:
    """Return a node for each instance, so that all fit; None if there is no way, or none was found in time.

    Args:
        sizes: (n_instances,) number of GPUs of each.
        allowed: (n_instances, n_nodes) where each may run.
        free: (n_nodes,) number of free GPUs; of two equal nodes the first is used.
        most_steps: The number of steps after which to give up.
    """
    if not sizes:
        return []
    order = sorted(range(len(sizes)), key=lambda at: (-sizes[at], int(allowed[at].sum()), at))
    left, kinds = list(free), [allowed[:, node].tobytes() for node in range(len(free))]
    chosen, dead = [-1] * len(sizes), set[tuple[int, tuple[tuple[bytes, int], ...]]]()
    steps = 0

    def state(depth: int) -> tuple[int, tuple[tuple[bytes, int], ...]]:
        return depth, tuple(sorted(zip(kinds, left, strict=True)))

    def tries(depth: int) -> Iterator[int]:
        """Return the nodes to try, of nodes that are alike the first; none where it is known to lead nowhere."""
        if dead and state(depth) in dead:
            return iter(())
        item = order[depth]
        nodes = [node for node in range(len(left)) if allowed[item, node] and left[node] >= sizes[item]]
        alike = {(kinds[node], left[node]): node for node in reversed(nodes)}
        return iter(sorted(alike.values(), key=lambda node: (left[node], node)))

    ways = [tries(0)]  # of each instance that is placed, and the next one
    while ways and steps < most_steps:
        item = order[len(ways) - 1]
        if chosen[item] >= 0:
            left[chosen[item]] += sizes[item]
        chosen[item] = next(ways[-1], -1)
        if chosen[item] < 0:
            ways.pop()
            dead.add(state(len(ways)))
            continue
        steps += 1
        left[chosen[item]] -= sizes[item]
        if len(ways) == len(order):
            return chosen
        ways.append(tries(len(ways)))
    return None
