"""How a router process asks another one for instances: lines of JSON over one connection that stays open.

Requests: ``["hello", token, name of the asking process, name of the process that is meant]``, then any of
``["take", id, app, tenant, place or null, [excluded instances], least accuracy]`` (that only where one is asked for),
``["hold", id, app, tenant, instance]`` (a request that is at an instance already) and ``["leave", id, outcome]``.
Answers: ``["welcome"]``, then
``["given", id, instance, place, its row of the routing table or null]`` and ``["refused", id, reason, retry_after_s]``.
When a connection ends, what its process waits for or holds is taken back.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from typing import Any, cast

import orjson
from pydantic import ValidationError

from services.contracts.routing import RoutedAppServer
from services.kit.crowd import CROWD
from services.kit.logging import Log
from services.router.apps.queue import Assigner, NotAssignedError, Outcome, Ticket
from services.router.fleet import Fleet

log = Log(__name__)

LONGEST_LINE = 64 * 1024
HELLO_S = 5.0  #: How long a connection may take to say who it is
CONNECT_S = 2.0


class LineProtocol(asyncio.Protocol):
    """A connection that carries lists as lines of JSON; one that carries anything else is closed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Handle each complete line."""
        searched = len(self._buffer)
        self._buffer += data
        while (end := self._buffer.find(b"\n", searched)) >= 0:
            line, searched = bytes(self._buffer[:end]), 0
            del self._buffer[: end + 1]
            try:
                self.message(orjson.loads(line))
            except (orjson.JSONDecodeError, ValidationError, ValueError) as error:
                log.warning("router_peer.malformed", error=str(error)[:200])
                self.close()
                return
        if len(self._buffer) > LONGEST_LINE:
            self.close()

    def message(self, parts: Any) -> None:
        """Handle a message; ``ValueError`` if it is not a valid message."""
        raise NotImplementedError

    def send(self, *parts: object) -> None:
        """Send a message; do nothing once the connection has ended."""
        if self._transport is not None:
            self._transport.write(orjson.dumps(parts) + b"\n")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class AskingPeer(LineProtocol):
    """The connection of another process, to whose requests this one assigns instances.

    Attributes:
        held_bytes: Always 0, not counted: it holds at most a line, and not for long.
        is_unread: Never true: other processes do not come in crowds.
        is_unused: Never true: once it is known, dropping it would take back what it holds.
    """

    held_bytes = 0
    is_unread = is_unused = False
    end_now = LineProtocol.close

    def __init__(self, name: str, token: str, assigner: Assigner, fleet: Fleet, peers: set[AskingPeer]) -> None:
        """Take this process's name, queues and instances, and where open connections are kept."""
        super().__init__()
        self._peers, self._name, self._token = peers, name, token
        self._assigner, self._fleet = assigner, fleet
        self._is_known = False
        self._tickets: dict[int, Ticket] = {}
        self._sent_rows: set[str] = set()
        self._waiting_for_hello: asyncio.TimerHandle | None = None
        self._number: int | None = None

    @property
    def waits_for_client(self) -> bool:
        """Whether a hello is due."""
        return not self._is_known

    def become_known(self) -> None:
        """Do nothing: a hello is enough."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a hello."""
        super().connection_made(transport)
        self._number = CROWD.enter(self, transport)
        if self._number is None:
            self.close()
            return
        self._peers.add(self)
        self._waiting_for_hello = asyncio.get_running_loop().call_later(HELLO_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Take back what the process waits for, and then what it holds."""
        super().connection_lost(exc)
        self._peers.discard(self)
        if self._number is not None:
            CROWD.leave(self._number)
        if self._waiting_for_hello is not None:
            self._waiting_for_hello.cancel()
        tickets, self._tickets = self._tickets, {}
        for ticket in sorted(tickets.values(), key=lambda each: each.instance is not None):
            self._assigner.leave(ticket, Outcome.NOT_ASKED)

    def message(self, parts: Any) -> None:
        match parts:
            case ["hello", str(token), str(), str(meant)]:
                if not hmac.compare_digest(token.encode(), self._token.encode()) or meant != self._name:
                    raise ValueError("the token is wrong, or another process is meant")
                self._is_known = True
                CROWD.know(self._number)
                if self._waiting_for_hello is not None:
                    self._waiting_for_hello.cancel()
                self.send("welcome")
            case _ if not self._is_known:
                raise ValueError("a hello is due first")
            case ["take", int(number), str(app), str(tenant), (int() | None) as place, [*excluded], *least]:
                ticket = self._tickets.get(number) or self._ticket(number, app, tenant)
                ticket.place, ticket.excluded = place, frozenset(str(each) for each in excluded)
                ticket.least_accuracy_pct = float(*least)
                self._assigner.take(ticket)
            case ["hold", int(number), str(app), str(tenant), str(instance)]:
                self._assigner.hold(self._ticket(number, app, tenant), instance)
            case ["leave", int(number), str(outcome)]:
                ticket = self._tickets.pop(number, None)
                if ticket is not None:
                    self._assigner.leave(ticket, Outcome(outcome))
            case _:
                raise ValueError("unknown message")

    def _ticket(self, number: int, app: str, tenant: str) -> Ticket:
        def decided(result: str | NotAssignedError) -> None:
            if isinstance(result, str):
                self.send("given", number, result, ticket.place, self._row(result))
            else:
                self._tickets.pop(number, None)
                self.send("refused", number, result.reason, result.retry_after_s)

        ticket = self._tickets[number] = Ticket(number, app, tenant, decided)
        return ticket

    def _row(self, name: str) -> dict[str, Any] | None:
        """Return an instance's row the first time, because the other process may not have read it yet."""
        instance = self._fleet.instance(name)
        if name in self._sent_rows or instance is None or instance.instance is None:
            return None
        self._sent_rows.add(name)
        return instance.instance.model_dump(mode="json")


class AssignerLink(LineProtocol):
    """This process's connection to the one that assigns instances for all."""

    def __init__(
        self,
        peer: str,
        token: str,
        name: str,
        fleet: Fleet,
        tickets: dict[int, Ticket],
        lost: Callable[[AssignerLink], None],
    ) -> None:
        """Take this process's tickets by id, and what to call when a connection that worked ends."""
        super().__init__()
        self.peer = peer  #: Its name
        self._hello = ("hello", token, name, peer)
        self._fleet, self._tickets, self._lost = fleet, tickets, lost
        self.welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def connect(self, address: str) -> None:
        """Connect to the process at ``HOST:PORT``; ``OSError`` if it does not answer, or not as that process."""
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(CONNECT_S):  # a TimeoutError is an OSError
            await asyncio.get_running_loop().create_connection(lambda: self, host, int(port))
            try:
                self.send(*self._hello)
                await self.welcome
            except BaseException:
                self.close()
                raise

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits for the welcome, or uses the connection."""
        super().connection_lost(exc)
        if not self.welcome.done():
            self.welcome.set_exception(ConnectionRefusedError("the process did not accept the connection"))
        elif not self.welcome.cancelled() and self.welcome.exception() is None:
            self._lost(self)

    @property
    def is_open(self) -> bool:
        """Whether anything can be asked."""
        return self._transport is not None

    def message(self, parts: Any) -> None:
        match parts:
            case ["welcome"]:
                if not self.welcome.done():
                    self.welcome.set_result(None)
            case ["given", int(number), str(instance), int(place), row]:
                if row is not None:
                    self._fleet.add(RoutedAppServer.model_validate(row))
                ticket = self._tickets.get(number)
                if ticket is not None:  # else its client left, and the other process has been told
                    ticket.instance, ticket.place = instance, place
                    ticket.decided(instance)
            case ["refused", int(number), str(reason), (int() | float()) as retry_after_s]:
                ticket = self._tickets.get(number)
                if ticket is not None:
                    ticket.decided(NotAssignedError(reason, retry_after_s))
            case _:
                raise ValueError("unknown message")

    def take(self, ticket: Ticket) -> None:
        least = [ticket.least_accuracy_pct] if ticket.least_accuracy_pct else []
        self.send("take", ticket.id, ticket.app, ticket.tenant, ticket.place, sorted(ticket.excluded), *least)

    def hold(self, ticket: Ticket, instance: str) -> None:
        """Report that a request is at an instance already."""
        ticket.instance = instance
        self.send("hold", ticket.id, ticket.app, ticket.tenant, instance)

    def leave(self, ticket: Ticket, outcome: Outcome) -> None:
        """Report that a request no longer waits, or that its instance has finished it."""
        ticket.instance = None
        self.send("leave", ticket.id, outcome.value)
