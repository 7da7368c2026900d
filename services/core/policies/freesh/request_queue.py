"""The requests that wait at a dispatcher, in the order of ``laxity``: bounded, and fair between tenants if requested.

Requests that can no longer be in time (``due_s``) wait behind those that can, in order of arrival. This goes beyond the
paper, whose equation 6 would serve them first: under overload each of them would then make another one late.

Requests of one tenant that the same servers may serve have a line of their own, which is a heap. When a request is
removed, its entry stays there as a marker until it reaches the front, and lines that are mostly markers are rebuilt.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping

from services.core.domain.errors import DomainError
from services.core.policies.freesh.laxity import Order, ServiceTimes, ServingRequest, is_too_late, order_key_s

_Entry = tuple[float, float, str, int, ServingRequest]
"""Key, arrival, id, serial number, request: serial numbers are unique, so that requests are never compared."""
SPARSE = 64  #: A line is rebuilt when it has more than this many markers, and more of them than requests


class _Line:
    """A heap of the waiting requests of one tenant that exclude the same servers; late ones have a line of their own.

    ``markers`` of its entries are of requests that were removed; the first never is.
    """

    __slots__ = ("heap", "markers")

    def __init__(self, heap: list[_Entry]) -> None:
        heapq.heapify(heap)
        self.heap, self.markers = heap, 0

    def live(self) -> list[_Entry]:
        """Return the entries of waiting requests, in no particular order."""
        return [entry for entry in self.heap if entry[3] == entry[4].serial] if self.markers else self.heap

    def take(self) -> None:
        heapq.heappop(self.heap)[4].serial = -1
        self._tidy()

    def mark(self, request: ServingRequest) -> None:
        """Remove any request; its entry stays as a marker."""
        request.serial = -1
        self.markers += 1
        self._tidy()

    def _tidy(self) -> None:
        """Remove markers from the front; rebuild the line if it is mostly markers."""
        heap = self.heap
        if self.markers > SPARSE and 2 * self.markers > len(heap):
            heap[:] = self.live()
            heapq.heapify(heap)
            self.markers = 0
        while self.markers and heap[0][3] != heap[0][4].serial:
            heapq.heappop(heap)
            self.markers -= 1


class RequestQueue:
    """The waiting requests of one class.

    Args:
        order: The order in which they are served.
        times: How fast the class's instances are now; call ``retime`` when that changes.
        capacity: How many may wait; None for any number.
    """

    def __init__(self, order: Order, times: ServiceTimes, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise DomainError(f"a queue holds at least 0 requests, not {capacity}")
        self.order, self.times, self.capacity = order, times, capacity
        self._lines: dict[tuple[str, frozenset[str], bool], _Line] = {}
        self._waiting: dict[str, ServingRequest] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[ServingRequest]:
        """Yield the waiting requests in the order in which they will be served."""
        entries = [entry for line in self._lines.values() for entry in line.live()]
        return (entry[4] for entry in sorted(entries, key=lambda entry: (entry[4].is_late, entry)))

    @property
    def tenants(self) -> list[str]:
        return list(dict.fromkeys(tenant for tenant, _, _ in self._lines))

    @property
    def late(self) -> int:
        """How many waiting requests could no longer be in time when they were last checked."""
        return sum(len(line.heap) - line.markers for (_, _, is_late), line in self._lines.items() if is_late)

    def push(self, request: ServingRequest) -> bool:
        """Add a request; return False if the queue is full; ``DomainError`` if one with this id is waiting already."""
        if self.capacity is not None and len(self._waiting) >= self.capacity:
            return False
        self.requeue(request)
        return True

    def requeue(self, request: ServingRequest) -> None:
        """Add a request that was preempted or lost by its instance; already accepted, it is exempt from the bound.

        Its ``tokens_done`` need not be produced again.

        Raises:
            DomainError: a request with this id is already waiting.
        """
        if request.id in self._waiting:
            raise DomainError(f"request {request.id} waits already")
        self._enter(request)
        self._waiting[request.id] = request

    def peek(
        self, *, behind: Collection[str] = (), without: Collection[frozenset[str]] = (), now_s: float = -math.inf
    ) -> ServingRequest | None:
        """Return the next request, or None.

        Args:
            behind: Tenants whose turn comes only when no other tenant waits, as ``over_share`` says.
            without: Sets of servers; requests that exclude exactly such a set are passed over.
            now_s: The present time; requests that can no longer be in time go behind the others.
        """
        self._put_late_last(now_s)
        heads = [
            (tenant in behind, is_late, line.heap[0])
            for (tenant, excluded, is_late), line in self._lines.items()
            if excluded not in without
        ]
        return min(heads)[2][4] if heads else None

    def serve(
        self, in_service: Mapping[str, float], give: Callable[[ServingRequest], bool], now_s: float = -math.inf
    ) -> set[frozenset[str]]:
        """Serve waiting requests in order, tenants over their share last; one that cannot be served holds up no other.

        ``give`` removes a request and returns true, or returns false if no server can take it now. Requests with the
        same excluded servers can either all be served or none, so at most one of each kind is tried in vain; these sets
        are returned.
        """
        stuck: set[frozenset[str]] = set()
        while self._waiting:
            tenants = self.tenants
            behind = over_share(in_service, tenants) if len(tenants) > 1 else ()
            head = self.peek(behind=behind, without=stuck, now_s=now_s)
            if head is None:
                break
            if not give(head):
                stuck.add(head.excluded)
        return stuck

    def remove(self, request_id: str) -> ServingRequest | None:
        """Remove and return a request whose client left; None if it is not waiting."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            line = self._lines[_line_of(request)]
            line.mark(request)
            if not line.heap:
                del self._lines[_line_of(request)]
        return request

    def retime(self, times: ServiceTimes) -> None:
        """Reorder all waiting requests for instances of a different speed; under FCFS nothing changes."""
        self.times = times
        if self.order is Order.FCFS:
            return
        lines: dict[tuple[str, frozenset[str], bool], list[_Entry]] = {}
        for (tenant, excluded, is_late), line in self._lines.items():
            entries = line.live()
            if is_late:  # they may be in time now
                for entry in entries:
                    entry[4].is_late = False
            again = [(order_key_s(entry[4], self.order, times), *entry[1:]) for entry in entries]
            lines.setdefault((tenant, excluded, False), []).extend(again)
        self._lines = {name: _Line(heap) for name, heap in lines.items()}

    def _enter(self, request: ServingRequest, *, is_late: bool = False) -> None:
        request.serial, request.is_late = next(self._serials), is_late
        key = request.arrival_s if is_late else order_key_s(request, self.order, self.times)
        entry = (key, request.arrival_s, request.id, request.serial, request)
        line = self._lines.get(_line_of(request))
        if line is None:
            line = self._lines[_line_of(request)] = _Line([])
        heapq.heappush(line.heap, entry)

    def _put_late_last(self, now_s: float) -> None:
        """Move requests that can no longer be in time from the front of their lines to those of late requests."""
        for name, line in list(self._lines.items()):
            while not name[2] and line.heap and is_too_late(request := line.heap[0][4], self.times, now_s):
                line.take()
                self._enter(request, is_late=True)
            if not line.heap:
                del self._lines[name]


def _line_of(request: ServingRequest) -> tuple[str, frozenset[str], bool]:
    return request.tenant, request.excluded, request.is_late


def over_share(in_service: Mapping[str, float], waiting: Collection[str]) -> set[str]:
    """Return the tenants that hold more than an equal share while others wait, and so go behind.

    What is in service (requests, tokens, any measure of them, >= 0) is shared by the tenants that wait or are served.
    If every tenant that waits is over its share, nobody goes behind.
    """
    active = {*waiting, *(tenant for tenant, held in in_service.items() if held > 0)}
    held = sum(in_service.values())
    over = {tenant for tenant in waiting if in_service.get(tenant, 0.0) * len(active) > held}
    return set() if over == set(waiting) else over
