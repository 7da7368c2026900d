"""One router process assigns instances for all, so that an application has one queue and no instance has too many.

A model server's capacity is divided among the processes. An instance often takes one request, which cannot be divided,
and there may be fewer instances than processes; and plans rely on a single queue before all instances to keep an SLA.

The process that has run the longest assigns; the others keep a connection to it (``remote``), and send requests to the
instances that it names. Processes find each other through Redis (``peers``). When the connection to it ends, each
process assigns instances by itself until it has connected to the next, which takes milliseconds if the process died:
all others choose the one among them that has run the longest. A process that has not reached another one yet, or
cannot, assigns by itself too; in that time an instance may be sent as many requests at once as there are processes.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping

from services.contracts.routing import RouterState
from services.kit.logging import Log
from services.kit.tasks import end_tasks
from services.router.apps.queue import Assigner, NotAssignedError, Outcome, Ticket
from services.router.apps.remote import AskingPeer, AssignerLink
from services.router.fleet import Fleet

log = Log(__name__)


class Coordinator:
    """Assigns the requests that came to this process to instances, by its own queues or another process's."""

    def __init__(self, name: str, token: str, assigner: Assigner, fleet: Fleet) -> None:
        self.name, self._token, self._assigner, self._fleet = name, token, assigner, fleet
        self.started_at_s = time.time()  #: UTC seconds
        self.address: str | None = None  #: ``HOST:PORT`` at which other processes reach this one; None until it listens
        self._link: AssignerLink | None = None
        self._tickets: dict[int, Ticket] = {}
        self._ids = itertools.count()
        self._others: Mapping[str, RouterState] = {}
        self._lost_at_s: dict[str, float] = {}
        self._not_reached: set[str] = set()
        self._connecting: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None
        self._asking: set[AskingPeer] = set()

    @property
    def assigned_by(self) -> str:
        """The name of the process that assigns instances to this one's requests."""
        return self.name if self._link is None else self._link.peer

    async def listen(self, host: str) -> None:
        """Accept connections of other processes at the address by which they reach this machine."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: AskingPeer(self.name, self._token, self._assigner, self._fleet, self._asking), host, 0
        )
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close all connections; the others assign without this process from then on."""
        if self._connecting is not None:
            await end_tasks([self._connecting])
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if self._server is not None:
            self._server.close()
        for peer in list(self._asking):
            peer.close()

    def ticket(self, app: str, tenant: str, least_accuracy_pct: float = 0.0) -> Ticket:
        return Ticket(next(self._ids), app, tenant, lambda _: None, least_accuracy_pct=least_accuracy_pct)

    async def take(self, ticket: Ticket, timeout_s: float) -> str:
        """Wait for a request's turn, and return the id of the instance that it may be sent to.

        Raises:
            NotAssignedError: There is none for it.
            TimeoutError: Its turn did not come in time.
        """
        given: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def decided(result: str | NotAssignedError) -> None:
            if given.done():
                return
            if isinstance(result, str):
                given.set_result(result)
            else:
                given.set_exception(result)

        ticket.decided = decided
        self._tickets[ticket.id] = ticket
        try:
            (self._link or self._assigner).take(ticket)
            if given.done():
                return given.result()
            async with asyncio.timeout(timeout_s):
                return await given
        except BaseException:
            self.leave(ticket, Outcome.NOT_ASKED)
            raise

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        """Give back the instance of a request, or end its wait."""
        if self._tickets.pop(ticket.id, None) is not None:
            (self._link or self._assigner).leave(ticket, outcome)

    def choose(self, others: Mapping[str, RouterState]) -> None:
        """Take note of the other processes that are alive, and let the one that has run the longest assign."""
        self._others = others
        known = [
            (state.started_at_s, name, state.address)
            for name, state in others.items()
            if state.address is not None
            and state.started_at_s is not None
            and state.at_s > self._lost_at_s.get(name, 0.0)
        ]
        self._lost_at_s = {name: at_s for name, at_s in self._lost_at_s.items() if name in others}
        first = min(known, default=None)
        if first is None or first[:2] > (self.started_at_s, self.name):
            if self._link is not None:
                self._switch(None)
        elif (self._link is None or self._link.peer != first[1]) and (
            self._connecting is None or self._connecting.done()
        ):
            self._connecting = asyncio.create_task(self._connect(first[1], first[2]))

    async def _connect(self, peer: str, address: str) -> None:
        try:
            link = AssignerLink(peer, self._token, self.name, self._fleet, self._tickets, self._on_lost)
            await link.connect(address)
            if not link.is_open:
                raise ConnectionResetError("the connection ended at once")
        except OSError as error:
            if peer not in self._not_reached:
                log.warning("router_peer.not_reached", peer=peer, address=address, error=str(error))
            self._not_reached = {each for each in self._not_reached if each in self._others} | {peer}
            self._without(peer)
            return
        self._not_reached.discard(peer)
        self._switch(link)

    def _on_lost(self, link: AssignerLink) -> None:
        if self._link is link:
            log.warning("router_peer.lost", peer=link.peer)
            self._switch(None)
            self._without(link.peer)

    def _without(self, peer: str) -> None:
        """Choose among the others until that process has shown again that it is alive."""
        self._lost_at_s[peer] = self._others[peer].at_s if peer in self._others else 0.0
        asyncio.get_running_loop().call_soon(lambda: self.choose(self._others))

    def _switch(self, link: AssignerLink | None) -> None:
        """Have another process assign, or this one if None. Waiting requests go on waiting there, in their order."""
        old, self._link = self._link, link
        tickets = sorted(self._tickets.values(), key=lambda each: (each.place is None, each.place or 0, each.id))
        waiting = [each for each in tickets if each.instance is None]
        held = [(each, each.instance) for each in tickets if each.instance is not None]
        if old is not None:
            old.close()
        else:
            for ticket in (*waiting, *(each for each, _ in held)):  # those that wait first: none is given an instance
                self._assigner.leave(ticket, Outcome.NOT_ASKED)
        assigns = link or self._assigner
        for ticket, instance in held:
            ticket.place = None
            ticket.instance = None
            assigns.hold(ticket, instance)
        for ticket in waiting:
            ticket.place = None
            assigns.take(ticket)
        log.info("router_peer.assigns", peer=self.assigned_by, waiting=len(waiting), held=len(held))
