"""One machine as fast as the cluster, which runs the shortest remaining job and may set it aside for a shorter one.

It only decides an order; nothing runs on it. Between two rounds it moves event by event, through arrivals and ends. It
keeps when its running job ends rather than what that job has left, so that its progress does not depend on how
often it is looked at.

Source: A-SRPT section IV-C, instance A~1; SRPT is optimal there for the sum of completion times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from services.core.domain.ids import JobId

Item = TypeVar("Item", bound=tuple[object, ...])
Tree = tuple[int, Item, "Tree[Item] | None", "Tree[Item] | None"]
"""How deep it is along its right edge, its first item, and two children."""


class Heap(Generic[Item]):
    """An immutable priority queue of tuples: adding an item or removing the first makes a new one, in O(log n).

    A leftist heap: of two children the left one is at least as deep along its right edge, so that merging, which walks
    down right edges only, is short. Two heaps are equal if they hold the same items, whatever their history.
    """

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


class VirtualJob(NamedTuple):
    """A job that waits for the machine; the order of the fields is the order in which they are compared."""

    rank: int  #: Minus the user's priority
    remaining_s: float  #: What the machine still has to do for it
    submitted_s: float  #: UTC seconds
    job_id: JobId  #: Breaks all ties
    length_s: float  #: What the machine had to do for it in all, ``g/G n~ alpha~min``


class EndedJob(NamedTuple):
    """A job that has ended on the machine and now waits for GPUs; compares in the order of the queue."""

    rank: int
    ended_s: float
    submitted_s: float
    job_id: JobId
    length_s: float


@dataclass(frozen=True)
class VirtualMachine:
    """The machine at one instant."""

    now_s: float = 0.0  #: That instant, UTC seconds
    running: VirtualJob | None = None
    """The job on it, None while it idles; its ``remaining_s`` is as of when it last began."""
    ends_s: float = 0.0  #: When that job ends if nothing shorter arrives
    waiting: Heap[VirtualJob] = field(default_factory=Heap[VirtualJob])  #: The other jobs

    def run(self, arrivals: Sequence[tuple[float, VirtualJob]], now_s: float) -> tuple[VirtualMachine, list[EndedJob]]:
        """Return the machine at ``now_s``, and the jobs that ended on it by then, in order.

        Args:
            arrivals: When each new job arrives, UTC seconds, ascending. One from before this machine's instant, which
                earlier rounds did not show, arrives at that instant.
        """
        running, ends_s, waiting = self.running, self.ends_s, self.waiting
        ended: list[EndedJob] = []
        for at_s, job in (*arrivals, (now_s, None)):
            time_s = max(at_s, self.now_s)
            while running is not None and ends_s <= time_s:
                ended.append(EndedJob(running.rank, ends_s, running.submitted_s, running.job_id, running.length_s))
                running = None
                if waiting:
                    running, waiting = waiting.first, waiting.without_first()
                    ends_s += running.remaining_s
            if job is None:
                continue
            if running is None:
                running, ends_s = job, time_s + job.remaining_s
            elif (job.rank, job.remaining_s) < (running.rank, ends_s - time_s):
                waiting = waiting.with_item(running._replace(remaining_s=ends_s - time_s))
                running, ends_s = job, time_s + job.remaining_s
            else:
                waiting = waiting.with_item(job)
        return VirtualMachine(max(now_s, self.now_s), running, ends_s if running is not None else 0.0, waiting), ended

    def stood_still(self, now_s: float) -> VirtualMachine:
        """Return the machine at ``now_s`` as if it had paused since its own instant."""
        idle_s = max(now_s - self.now_s, 0.0)
        ends_s = self.ends_s + idle_s if self.running is not None else 0.0
        return replace(self, now_s=self.now_s + idle_s, ends_s=ends_s)

    def without(self, gone: Iterable[JobId]) -> VirtualMachine:
        """Return the machine without these jobs; if it was running one of them, the next begins now."""
        left = set(gone)
        waiting = Heap(job for job in self.waiting if job.job_id not in left)
        if self.running is None or self.running.job_id not in left:
            return VirtualMachine(self.now_s, self.running, self.ends_s, waiting)
        if not waiting:
            return VirtualMachine(self.now_s)
        first = waiting.first
        return VirtualMachine(self.now_s, first, self.now_s + first.remaining_s, waiting.without_first())

    def job_ids(self) -> set[JobId]:
        ids = {job.job_id for job in self.waiting}
        return ids if self.running is None else ids | {self.running.job_id}
