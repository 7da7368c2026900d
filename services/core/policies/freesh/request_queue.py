"""The requests that wait at a dispatcher, in the order of ``laxity``: bounded, and fair between tenants if asked.

Each tenant has a heap of its own. The entry of a request that is removed stays in its heap as a marker until it comes
up, and heaps that are mostly markers are rebuilt.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter

import numpy as np

from services.core.accounting.serving import WINDOW_LATENCIES
from services.core.domain.errors import DomainError
from services.core.policies.freesh.laxity import Order, ServiceTimes, ServingRequest, order_key_s

_Entry = tuple[float, float, str, int, ServingRequest]
"""Key, arrival, id, serial number, request: serial numbers are unique, so that requests are never compared."""
_ARRIVAL, _TOKENS, _DONE, _ID, _SERIAL = map(attrgetter, ("arrival_s", "output_tokens", "tokens_done", "id", "serial"))
SPARSE = 64
"""A heap is rebuilt when it has more than so many markers, and more of them than requests."""


class RequestQueue:
    """The waiting requests of one class.

    Args:
        order: In which they are served.
        times: How fast the class's instances are now; ``retime`` when that changes.
        capacity: How many may wait; None for any number.
    """

    def __init__(self, order: Order, times: ServiceTimes, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise DomainError(f"a queue holds at least 0 requests, not {capacity}")
        self.order, self._times, self.capacity = order, times, capacity
        self._heaps: dict[str, list[_Entry]] = {}
        self._waiting: dict[str, ServingRequest] = {}
        self._serials = itertools.count()
        self._markers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[ServingRequest]:
        """Yield the waiting requests, the first to be served first."""
        entries = [entry for heap in self._heaps.values() for entry in heap if _is_live(entry)]
        return (entry[4] for entry in sorted(entries))

    @property
    def times(self) -> ServiceTimes:
        """How fast the class's instances are, as the order assumes."""
        return self._times

    @property
    def tenants(self) -> list[str]:
        """The tenants with waiting requests."""
        return list(self._heaps)

    def push(self, request: ServingRequest) -> bool:
        """Add a request; False if the queue is full, which changes nothing.

        Raises:
            DomainError: A request of this id waits already.
        """
        if self.capacity is not None and len(self._waiting) >= self.capacity:
            return False
        self._add(request)
        return True

    def requeue(self, request: ServingRequest) -> None:
        """Add a request that was preempted, or that its instance lost; it was accepted, so the bound does not hold.

        Its ``tokens_done`` are what it need not produce again.

        Raises:
            DomainError: A request of this id waits already.
        """
        self._add(request)

    def peek(self, *, behind: Collection[str] = ()) -> ServingRequest | None:
        """Return the next request, or None.

        Args:
            behind: Tenants whose turn comes only when no other tenant waits, as ``over_share`` says.
        """
        found = self._first(behind)
        return None if found is None else found[4]

    def pop(self, *, behind: Collection[str] = ()) -> ServingRequest | None:
        """Return the next request and take it out; None if nothing waits. ``behind`` as for ``peek``."""
        found = self._first(behind)
        if found is None:
            return None
        request = found[4]
        heap = self._heaps[request.tenant]
        heapq.heappop(heap)
        del self._waiting[request.id]
        request.serial = -1
        self._tidy(request.tenant)
        return request

    def remove(self, request_id: str) -> ServingRequest | None:
        """Take out a request whose client left, and return it; None if it does not wait."""
        request = self._waiting.pop(request_id, None)
        if request is not None:
            request.serial = -1
            self._markers[request.tenant] = self._markers.get(request.tenant, 0) + 1
            self._tidy(request.tenant)
        return request

    def retime(self, times: ServiceTimes) -> None:
        """Order all waiting requests anew for instances of another speed.

        Keys are computed as arrays: 10,000 requests take a few milliseconds (``./test --bench laxity``).
        """
        self._times = times
        for tenant, heap in self._heaps.items():
            if self._markers.pop(tenant, 0):
                heap[:] = filter(_is_live, heap)
            self._heaps[tenant] = self._sorted([entry[4] for entry in heap])

    def _add(self, request: ServingRequest) -> None:
        if request.id in self._waiting:
            raise DomainError(f"request {request.id} waits already")
        request.serial = next(self._serials)
        key = order_key_s(request, self.order, self._times)
        entry = (key, request.arrival_s, request.id, request.serial, request)
        heapq.heappush(self._heaps.setdefault(request.tenant, []), entry)
        self._waiting[request.id] = request

    def _first(self, behind: Collection[str]) -> _Entry | None:
        """Return the first entry of the tenants that are not behind, else of all."""
        heads = [(tenant in behind, heap[0]) for tenant, heap in self._heaps.items()]
        return min(heads)[1] if heads else None

    def _tidy(self, tenant: str) -> None:
        """Take markers off the top of a tenant's heap, so that its first entry is live; drop an empty heap."""
        heap, markers = self._heaps[tenant], self._markers.get(tenant, 0)
        if markers > SPARSE and 2 * markers > len(heap):
            heap[:] = filter(_is_live, heap)
            heapq.heapify(heap)
            markers = 0
        while heap and markers and not _is_live(heap[0]):
            heapq.heappop(heap)
            markers -= 1
        if heap:
            self._markers[tenant] = markers
        else:
            del self._heaps[tenant]
            self._markers.pop(tenant, None)

    def _sorted(self, requests: list[ServingRequest]) -> list[_Entry]:
        """Return the entries of waiting requests in order, which is a heap: ``order_key_s`` for arrays."""
        n, times = len(requests), self._times
        arrival_s = np.fromiter(map(_ARRIVAL, requests), np.float64, n)
        if self.order is Order.FCFS:
            keys = arrival_s
        else:
            tokens = np.fromiter(map(_TOKENS, requests), np.float64, n)
            done = np.fromiter(map(_DONE, requests), np.float64, n)
            end_s = arrival_s + WINDOW_LATENCIES * (tokens * times.tbt_s + times.ttft_s)
            left_s = np.maximum(tokens - done, np.minimum(tokens, 1.0)) * times.tbt_s + times.ttft_s
            keys = {Order.EDF: end_s, Order.SRTF: left_s, Order.LLF: end_s - left_s}[self.order]
        order: list[int] = np.argsort(keys).tolist()
        inside = [requests[at] for at in order]
        columns = (keys[order].tolist(), arrival_s[order].tolist(), map(_ID, inside), map(_SERIAL, inside), inside)
        entries: list[_Entry] = list(zip(*columns, strict=True))
        entries.sort()  # nearly done: only equal keys are left, to be ordered by arrival and id
        return entries


def _is_live(entry: _Entry) -> bool:
    return entry[3] == entry[4].serial


def over_share(
    in_service: Mapping[str, float], waiting: Collection[str], weights: Mapping[str, float] | None = None
) -> set[str]:
    """Return the tenants that hold more than their share while others wait: those who go behind.

    A tenant's share of what is in service is its weight among the tenants that wait or are served. If every tenant that
    waits is over its share, nobody is behind.

    Args:
        in_service: What each tenant holds: requests, tokens, or any measure of them, >= 0.
        waiting: Tenants with waiting requests.
        weights: Their weights, > 0; 1 where none is given.

    Raises:
        DomainError: A weight is not above 0.
    """
    weights = weights or {}
    active = {*waiting, *(tenant for tenant, held in in_service.items() if held > 0)}
    if not all(math.isfinite(weights.get(tenant, 1.0)) and weights.get(tenant, 1.0) > 0 for tenant in active):
        raise DomainError("the weights of tenants are finite and above 0")
    total = sum(weights.get(tenant, 1.0) for tenant in active)
    held = sum(in_service.values())
    over = {tenant for tenant in waiting if in_service.get(tenant, 0.0) * total > held * weights.get(tenant, 1.0)}
    return set() if over == set(waiting) else over
