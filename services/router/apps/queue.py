"""One application's requests before its instances: first come, first served. No clock, no input or output.

A request takes a free instance, the one that has been free the longest if there are several; otherwise it waits, and an
instance that becomes free takes the head of the queue. This is the queue by which configurations are evaluated
(``services/core/policies/clover/evaluation.py``). Where several tenants share an application and some hold more than
an equal part of it, those come after the others; within a tenant the order is that of arrival.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from services.contracts.routing import RoutingTable
from services.core.policies.freesh.laxity import Order, ServiceTimes, ServingRequest
from services.core.policies.freesh.request_queue import RequestQueue
from services.kit.logging import Log
from services.router.breaker import Breaker, BreakerState

log = Log(__name__)


class Outcome(StrEnum):
    """What a request shows of an instance when it leaves it."""

    ANSWERED = "answered"
    BUSY = "busy"
    """It works, and took no more."""
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    NOT_ASKED = "not_asked"  #: Nothing: the client left or read too slowly, or the request was never sent


class NotAssignedError(Exception):
    """A request gets no instance."""

    def __init__(self, reason: str, retry_after_s: float = 5.0) -> None:
        super().__init__(reason)
        self.reason = reason  #: ``unknown_app``, ``no_instance`` or ``queue_full``
        self.retry_after_s = retry_after_s  #: When to try again


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through its application's queue."""

    id: int  #: The id by which the process that it came to knows it
    app: str
    tenant: str
    decided: Callable[[str | NotAssignedError], None]
    """Called with the id of the instance that the request may be sent to, or with why there is none."""
    place: int | None = None
    """Its place in the order of arrival; None until it has one. It is kept when the request waits again."""
    excluded: frozenset[str] = frozenset()  #: Instances that failed to answer it
    least_accuracy_pct: float = 0.0  #: Accuracy that its instance must have
    instance: str | None = None  #: The instance that it was given
    waits_as: ServingRequest | None = None  #: Its entry in the queue while it waits


@dataclass(slots=True, eq=False)
class Seat:
    """An instance as the queue sees it."""

    id: str
    limit: int = 1  #: How many requests it is given at once
    is_ready: bool = False  #: Whether it is given any
    service_s: float = 0.0  #: Mean time of a request there
    accuracy_pct: float = 100.0  #: Of its variant
    held: int = 0  #: How many it has now
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def has_room(self) -> bool:
        return self.is_ready and self.held < self.limit


class AppQueue:
    """The queue of one application."""

    def __init__(self, most_waiting: int, patience_s: float) -> None:
        """Take how many requests may wait, and how long they wait for an instance when there is none."""
        self._most_waiting, self._patience_s = most_waiting, patience_s
        self.seats: dict[str, Seat] = {}  #: Its instances; those that are gone stay until they hold nothing
        self._free: dict[str, Seat] = {}  # the one that has been free the longest is first
        self._queue = RequestQueue(Order.FCFS, ServiceTimes(1.0, 1.0))
        self._names = itertools.count()
        self.tickets: dict[str, Ticket] = {}  #: Waiting requests, by their names in the queue
        self.in_service: Counter[str] = Counter()  #: Requests at instances, by tenant
        self._places = 0
        self._had_instance_s = -math.inf

    @property
    def waiting(self) -> int:
        return len(self.tickets)

    def adopt(self, seats: Iterable[tuple[str, int, bool, float, float]], now_s: float) -> None:
        """Take the instances of the newest table: id, limit, whether it is ready, service time, accuracy."""
        known, self.seats = self.seats, {}
        for name, limit, is_ready, service_s, accuracy_pct in seats:
            self.seats[name] = seat = known.pop(name, None) or Seat(name)
            seat.limit, seat.is_ready, seat.service_s, seat.accuracy_pct = limit, is_ready, service_s, accuracy_pct
        for name, seat in known.items():
            seat.is_ready = False
            if seat.held:
                self.seats[name] = seat
        free = {name: seat for name, seat in self._free.items() if self.seats.get(name) is seat and seat.has_room}
        free |= {name: seat for name, seat in self.seats.items() if name not in free and seat.has_room}
        self._free = free
        if self.seats:
            self._had_instance_s = now_s
        self.pump(now_s)

    def take(self, ticket: Ticket, now_s: float) -> None:
        """Give a request an instance now, or let it wait.

        Raises:
            NotAssignedError: There is no instance and was none for a while, none is accurate enough, or too many
                requests wait.
        """
        self._take_out(ticket)  # who asks twice waits once
        if not self.waiting and (seat := self._free_for(ticket, now_s)) is not None:
            self._place(ticket)
            self._give(ticket, seat)
            return
        is_any = any(seat.accuracy_pct >= ticket.least_accuracy_pct for seat in self.seats.values())
        if not is_any and (self.seats or now_s - self._had_instance_s > self._patience_s):
            raise NotAssignedError("no_instance")
        if ticket.place is None and self.waiting >= self._most_waiting:
            raise NotAssignedError("queue_full", self.retry_after_s())
        self._place(ticket)
        name = str(next(self._names))
        below = {f"below {ticket.least_accuracy_pct:g} %"} if ticket.least_accuracy_pct else set[str]()
        excluded = ticket.excluded | below  # it waits beside those that any instance may answer, not before them
        waits_as = ServingRequest(name, float(ticket.place or 0), 0.0, tenant=ticket.tenant, excluded=excluded)
        ticket.waits_as, self.tickets[name] = waits_as, ticket
        self._queue.requeue(waits_as)
        self.pump(now_s)

    def hold(self, ticket: Ticket, instance: str) -> None:
        """Count a request that another process's queue gave an instance."""
        self._place(ticket)
        self._give(ticket, self.seats.setdefault(instance, Seat(instance)), is_told=False)

    def leave(self, ticket: Ticket, outcome: Outcome, now_s: float) -> bool:
        """Remove a request that waits, or that its instance has finished; return whether its instance is ejected."""
        if ticket.instance is None:
            self._take_out(ticket)
            return False
        seat = self.seats[ticket.instance]
        ticket.instance = None
        seat.held -= 1
        self.in_service[ticket.tenant] -= 1
        if not self.in_service[ticket.tenant]:
            del self.in_service[ticket.tenant]
        is_ejected = _note(seat.breaker, ticket, outcome, now_s)
        if seat.has_room:
            self._free.setdefault(seat.id, seat)
        self.pump(now_s)
        return is_ejected

    def pump(self, now_s: float) -> None:
        """Give free instances to waiting requests, in order."""

        def give(head: ServingRequest) -> bool:
            ticket = self.tickets[head.id]
            seat = self._free_for(ticket, now_s) if self._free else None
            if seat is not None:
                self._take_out(ticket)
                self._give(ticket, seat)
            return seat is not None

        if self._free:
            self._queue.serve(self.in_service, give)

    def refuse_all(self, reason: str) -> None:
        """Tell all waiting requests that they get no instance."""
        for ticket in [*self.tickets.values()]:
            self._take_out(ticket)
            ticket.decided(NotAssignedError(reason))

    def retry_after_s(self) -> float:
        """Return when there may be room, given what waits and the pace of all instances; at least 1 s."""
        pace = sum(seat.limit / seat.service_s for seat in self.seats.values() if seat.is_ready and seat.service_s > 0)
        return max(1.0, float(math.ceil((1 + self.waiting) / pace))) if pace else 5.0

    def breaker_state(self, instance: str, now_s: float) -> BreakerState | None:
        """Return the state of an instance's breaker; None if the instance is not known."""
        seat = self.seats.get(instance)
        return None if seat is None else seat.breaker.state(now_s)

    def _place(self, ticket: Ticket) -> None:
        if ticket.place is None:
            ticket.place = self._places
        self._places = max(self._places, ticket.place + 1)

    def _take_out(self, ticket: Ticket) -> None:
        waited, ticket.waits_as = ticket.waits_as, None
        if waited is not None:
            self._queue.remove(waited.id)
            del self.tickets[waited.id]

    def _free_for(self, ticket: Ticket, now_s: float) -> Seat | None:
        """Return the instance that has been free the longest; one that failed the request only if all of them did."""

        def may_have(seat: Seat) -> bool:
            is_one = seat.accuracy_pct >= ticket.least_accuracy_pct and seat.id not in ticket.excluded
            return is_one and seat.breaker.passes(now_s)

        if ticket.excluded and not any(seat.is_ready and may_have(seat) for seat in self.seats.values()):
            ticket.excluded = frozenset()
        return next(filter(may_have, self._free.values()), None)

    def _give(self, ticket: Ticket, seat: Seat, *, is_told: bool = True) -> None:
        seat.held += 1
        seat.breaker.sent(ticket)
        self._free.pop(seat.id, None)
        if seat.has_room:
            self._free[seat.id] = seat
        ticket.instance = seat.id
        self.in_service[ticket.tenant] += 1
        if is_told:
            ticket.decided(seat.id)


def _note(breaker: Breaker, ticket: Ticket, outcome: Outcome, now_s: float) -> bool:
    match outcome:
        case Outcome.ANSWERED:
            breaker.succeeded()
        case Outcome.FAILED | Outcome.UNREACHABLE:
            return breaker.failed(now_s, ticket, is_certain=outcome is Outcome.UNREACHABLE)
        case Outcome.BUSY | Outcome.NOT_ASKED:
            breaker.abandoned(ticket)
    return False


class Assigner:
    """Assigns requests to instances of their applications."""

    def __init__(self, most_waiting: int, patience_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take how many requests of an application may wait, and how long they wait for a first instance."""
        self._most_waiting, self._patience_s, self._clock_s = most_waiting, patience_s, clock_s
        self.queues: dict[str, AppQueue] = {}
        """Queues by application; one that is gone stays until its instances hold nothing."""

    def adopt(self, table: RoutingTable) -> None:
        now_s = self._clock_s()
        limits = {app.name: app.concurrency for app in table.apps}
        seats: dict[str, list[tuple[str, int, bool, float, float]]] = {name: [] for name in limits}
        for each in table.app_servers:
            if each.app in limits:
                service_s = (each.service_ms or 0.0) / 1e3
                about = each.id, limits[each.app], each.state == "ready", service_s, each.accuracy_pct
                seats[each.app].append(about)
        for name in limits:
            self._queue(name).adopt(seats[name], now_s)
        for name in set(self.queues) - set(limits):
            queue = self.queues[name]
            queue.refuse_all("unknown_app")
            queue.adopt([], now_s)
            if not queue.in_service:
                del self.queues[name]

    def take(self, ticket: Ticket) -> None:
        """Give a request an instance, now or when it is its turn; ``ticket.decided`` is called in either case."""
        queue = self.queues.get(ticket.app)
        if queue is None:
            ticket.decided(NotAssignedError("unknown_app"))
            return
        try:
            queue.take(ticket, self._clock_s())
        except NotAssignedError as error:
            ticket.decided(error)

    def hold(self, ticket: Ticket, instance: str) -> None:
        """Count a request that was given its instance by another process."""
        self._queue(ticket.app).hold(ticket, instance)

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        """Remove a request that waits, or that its instance has finished."""
        queue, instance = self.queues.get(ticket.app), ticket.instance
        if queue is not None and queue.leave(ticket, outcome, self._clock_s()):
            log.warning("instance.ejected", app=ticket.app, instance=instance, outcome=outcome.value)

    def check(self) -> None:
        """Have instances that were ejected for a while tried again."""
        for queue in self.queues.values():
            queue.pump(self._clock_s())

    def draining(self) -> dict[str, int]:
        """Return how many requests each draining instance holds, whichever process sent them."""
        return {
            seat.id: seat.held for queue in self.queues.values() for seat in queue.seats.values() if not seat.is_ready
        }

    def waiting(self, name: str) -> int:
        queue = self.queues.get(name)
        return 0 if queue is None else queue.waiting

    def _queue(self, name: str) -> AppQueue:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = AppQueue(self._most_waiting, self._patience_s)
        return queue
