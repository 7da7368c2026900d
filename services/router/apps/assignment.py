"""All queues of one router process."""

import time
from collections.abc import Callable

from services.contracts.routing import RoutingTable
from services.kit.logging import Log
from services.router.apps.queue import AppQueue, NotAssignedError, Outcome, Ticket

log = Log(__name__)


class Assigner:
    """Assigns requests to instances of their applications.

    Attributes:
        queues: Queues by application; one that is gone stays until its instances hold nothing.
    """

    def __init__(self, most_waiting: int, patience_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take how many requests of an application may wait, and how long they wait for a first instance."""
        self._most_waiting = most_waiting
        self._patience_s = patience_s
        self._clock_s = clock_s
        self.queues: dict[str, AppQueue] = {}

    def adopt(self, table: RoutingTable) -> None:
        """Take the applications and instances of the newest table."""
        now_s = self._clock_s()
        limits = {app.name: app.concurrency for app in table.apps}
        seats: dict[str, list[tuple[str, int, bool, float]]] = {name: [] for name in limits}
        for each in table.app_servers:
            if each.app in limits:
                service_s = (each.service_ms or 0.0) / 1e3
                seats[each.app].append((each.id, limits[each.app], each.state == "ready", service_s))
        for name in limits:
            self._queue(name).adopt(seats[name], now_s)
        for name in set(self.queues) - set(limits):
            queue = self.queues[name]
            queue.refuse_all("unknown_app")
            queue.adopt([], now_s)
            if not queue.held:
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
        """Return how many requests wait in an application's queue here."""
        queue = self.queues.get(name)
        return 0 if queue is None else queue.waiting

    def _queue(self, name: str) -> AppQueue:
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = AppQueue(self._most_waiting, self._patience_s)
        return queue
