"""The free blocks of nodes, kept sorted while gangs are placed, so that the next one is found without a search.

A block is aligned: ``2**order`` devices that begin at a multiple of their number. A node is listed under the order of
each of its free blocks that is not part of a larger one.
"""

from collections.abc import Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush

MASK_BITS = 62  #: Devices of a node that a mask shows
ORDERS = MASK_BITS.bit_length()


class FreeBlocks:
    """Free blocks by order; within an order, nodes that are awake come first, then the fullest, then by index."""

    def __init__(self, masks: Mapping[int, int], free_gpus: list[int], asleep: list[bool]) -> None:
        """Take the free devices of the usable nodes, as bit masks, and the number of free devices on all nodes."""
        self._masks = dict(masks)
        self._free_gpus, self._asleep = free_gpus, asleep
        self._queues: list[list[tuple[bool, int, int]]] = [[] for _ in range(ORDERS)]
        for node, mask in self._masks.items():
            entry = (asleep[node], free_gpus[node], node)
            for order in largest_blocks(mask):
                self._queues[order].append(entry)
        for queue in self._queues:
            heapify(queue)

    def smallest(self, order: int) -> tuple[int, int] | None:
        """Return the node and first device of one of the smallest free blocks of at least ``2**order`` devices."""
        for each in range(order, ORDERS):
            queue = self._queues[each]
            while queue:
                _, free_gpus, node = queue[0]
                first = largest_blocks(self._masks[node]).get(each)
                if first is not None and free_gpus == self._free_gpus[node]:
                    return node, first
                heappop(queue)  # of before the node's last gang
        return None

    def take(self, node: int, mask: int, gpus: int) -> None:
        if node not in self._masks or not gpus:
            return
        left = self._masks[node] = self._masks[node] & ~mask
        self._free_gpus[node] -= gpus
        for order in largest_blocks(left):
            heappush(self._queues[order], (self._asleep[node], self._free_gpus[node], node))


def aligned(order: int) -> int:
    """Return the mask of the devices at which blocks of ``2**order`` begin."""
    return _ALIGNED[order]


_ALIGNED = [sum(1 << at for at in range(0, MASK_BITS, 1 << order)) for order in range(ORDERS + 1)]


@lru_cache(maxsize=1 << 14)
def largest_blocks(mask: int) -> Mapping[int, int]:
    """Return where the first free block of each order begins that is in no larger one; some orders have none."""
    found: dict[int, int] = {}
    starts = mask
    for order in range(ORDERS):
        wider = starts & (starts >> (1 << order)) & aligned(order + 1)
        largest = starts & ~wider & ~(wider << (1 << order))
        if largest:
            found[order] = (largest & -largest).bit_length() - 1
        starts = wider
    return found
