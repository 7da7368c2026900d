"""An immutable priority queue: adding an item or removing the first makes a new one, in O(log n).

A leftist heap: of two children the left one is at least as deep along its right edge, so that merging, which walks down
right edges only, is short. Two heaps are equal if they hold the same items, whatever their history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=tuple[object, ...])
Tree = tuple[int, Item, "Tree[Item] | None", "Tree[Item] | None"]
"""How deep it is along its right edge, its first item, and two children."""


class Heap(Generic[Item]):
    """Items in order; they compare as tuples."""

    __slots__ = ("_size", "_tree")

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._tree: Tree[Item] | None = None
        self._size = 0
        for item in items:
            self._tree = _merged(self._tree, (1, item, None, None))
            self._size += 1

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Heap) and sorted(self) == sorted(other)  # pyright: ignore[reportUnknownArgumentType]

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Item]:
        """Yield every item, in no particular order."""
        left = [self._tree]
        while left:
            tree = left.pop()
            if tree is not None:
                yield tree[1]
                left += tree[2:]

    @property
    def first(self) -> Item:
        """The smallest item; the heap must not be empty."""
        assert self._tree is not None
        return self._tree[1]

    def with_item(self, item: Item) -> Heap[Item]:
        return self._of(_merged(self._tree, (1, item, None, None)), self._size + 1)

    def without_first(self) -> Heap[Item]:
        """Return the heap without its smallest item; it must not be empty."""
        assert self._tree is not None
        return self._of(_merged(self._tree[2], self._tree[3]), self._size - 1)

    @staticmethod
    def _of(tree: Tree[Item] | None, size: int) -> Heap[Item]:
        made: Heap[Item] = Heap.__new__(Heap)  # pyright: ignore[reportUnknownVariableType]
        made._tree, made._size = tree, size
        return made


def _merged(one: Tree[Item] | None, other: Tree[Item] | None) -> Tree[Item] | None:
    if one is None:
        return other
    if other is None:
        return one
    if other[1] < one[1]:
        one, other = other, one
    left, right = one[2], _merged(one[3], other)
    if right is not None and (left is None or left[0] < right[0]):
        left, right = right, left
    return (1 if right is None else right[0] + 1, one[1], left, right)
