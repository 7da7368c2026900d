"""The queues in front of the servers: one for each class of each pool, in the order that the operator chose.

A request that finds a server with room is sent at once. Others wait in their lane, and whenever a server has room
again, the most urgent of its lanes' heads is sent. Order holds per router process: several processes divide the
servers' capacity equally (``peers``), and each orders the requests that came to it.

Preemption is the dispatcher's: a waiting request takes the place of one that was sent to a server and has not been
answered yet. That one's connection is closed, which makes a model server give it up, and it waits again. What a client
has begun to receive is never taken back; inside a server, vLLM's own `priority` continues the order (``door``).

Lines of batches and requests of the tier ``flex`` never queue. They are given a server only where nobody waits, some
places stay free, and the others' tokens stay within their limit; and while somebody waits, they give up their places.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from services.contracts.identity import Identity
from services.contracts.served_models import answers
from services.core.domain.serving import SLO_LATENCIES
from services.core.policies.freesh import laxity
from services.core.policies.freesh.dispatch import InstanceLoad, WeightedRoundRobin
from services.core.policies.freesh.request_queue import RequestQueue
from services.core.policies.freesh.server_choice import SLOWDOWN_PER_TOKEN, Given, Work, choose_server
from services.router.breaker import BreakerState
from services.router.fleet import Fleet, Pool, Server
from services.router.upstream import Connection, UpstreamError

WANTED_WITHIN_S = 45.0
"""A pool without instances wants one so soon after a request came (``serving``); else that waits for none."""
RETIME_SHARE = 0.1  #: The queue is ordered anew when its servers' times have changed by so much
SPARE_SHARE = 0.9  #: Of a server's places, what requests that only get what others leave may take
SPARE_OF_LIMIT = 0.8  #: Of the time that a class allows between tokens, up to which they may slow others down
SPARE_SLOWDOWN = 0.1  #: By how much they may slow others down where the class has no such limit
SPARE_LOOK_S = 0.25


class QueueFullError(Exception):
    """The lane holds as many waiting requests as it may."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("The queue is full.")
        self.retry_after_s = retry_after_s  #: When there may be room


class NoServerError(Exception):
    """No server of the lane may be given requests."""

    def __init__(self, starting: int | None = None) -> None:
        super().__init__("There is no server.")
        self.starting = starting  #: How many instances are wanted or starting; None if none is awaited


class NoSpareError(Exception):
    """Others leave no room that the request may have."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through its lane."""

    request: laxity.ServingRequest  #: The request as the queue orders it
    limit_s: float  #: How long its answer may take
    network_s: Mapping[str, float]  #: Time to each place from its client's region
    work: Work  #: The request as servers are compared for it
    asks: tuple[str, Identity] | None = None  #: For which model, and who
    is_mixed: bool = False  #: Whether some servers of its pool are not for all that ask the pool
    may_repeat: bool = True  #: Whether it may be sent a second time; if not, it keeps the server that it was given
    preemptions: int = 0  #: How often it was preempted
    given: asyncio.Future[Server] | None = None  #: Resolved once it may be sent to a server
    waits_since_s: float | None = None  #: When it began to wait for a pool's first server; None unless it does
    server: Server | None = None
    share_began_s: float = 0.0
    place: Given | None = None  #: Its entry in the server's costs
    connection: Connection | None = None
    is_preempted: bool = False
    is_spare: bool = False  #: Whether it only gets what others leave free
    least_accuracy_pct: float = 0.0  #: Accuracy that its server must have, if that states one
    only_at: str | None = None  #: The only server that may answer it, as that has what it continues; None for any
    among: frozenset[bytes] | None = None  #: Addresses of the servers that it can be sent to; None for any

    def __post_init__(self) -> None:  # who has a limit waits beside those that any server may answer, not before them
        if self.is_mixed and self.asks is not None:
            model, caller = self.asks
            self.request.excluded |= {f"not for {model} {caller.only_tenant}"}
        if self.least_accuracy_pct:
            self.request.excluded |= {f"below {self.least_accuracy_pct:g} %"}
        if self.only_at is not None:
            self.request.excluded |= {f"not {self.only_at}"}
        if self.among is not None:
            self.request.excluded |= {f"not among {sorted(self.among)}"}

    @property
    def failures(self) -> int:
        """The number of servers that failed to answer it."""
        is_limited = self.is_mixed and self.asks is not None
        limits = is_limited, self.least_accuracy_pct > 0, self.only_at is not None, self.among is not None
        return len(self.request.excluded) - sum(limits)

    def is_met_by(self, server: Server) -> bool:
        """Whether a server is for who asks and for the model."""
        return self.asks is None or answers(server.spec, *self.asks)

    def may_have(self, server: Server) -> bool:
        """Whether it may be given to a server: one that is for it, did not fail it, and is accurate enough."""
        if not self.is_met_by(server):
            return False
        accuracy_pct = server.accuracy_pct
        if accuracy_pct is not None and accuracy_pct < self.least_accuracy_pct:
            return False
        if self.among is not None and server.origin.authority not in self.among:
            return False
        return server.id not in self.request.excluded and self.only_at in (None, server.id)


@dataclass(frozen=True, slots=True)
class LaneRules:
    """How lanes work."""

    order: laxity.Order = laxity.Order.LLF  #: The order of waiting requests
    placement: str = "carbon"
    """``carbon``: the cleanest server in time; ``weights``: shares by weight, as in the paper."""
    most_waiting: int = 1_000  #: How many requests may wait in a lane
    most_preemptions: int = 1  #: How often one request may be preempted; 0 for never


class Lane:
    """One class of one pool."""

    def __init__(self, name: str, rules: LaneRules, room_at: Callable[[Server], None]) -> None:
        """Take the lane's rules, and what to call when one of its servers has room again."""
        self.name, self._room_at = name, room_at
        self.servers: list[Server] = []
        self.others: list[Server] = []
        self.starting: int | None = None
        self._is_mixed = False
        self._max_tbt_s: float | None = None
        self._point_gco2_per_kwh = 0.0
        self._rules = rules
        self.queue = RequestQueue(rules.order, laxity.ServiceTimes(0.2, 0.03), rules.most_waiting)
        self._tickets: dict[str, Ticket] = {}
        self.unanswered: dict[str, Ticket] = {}
        self.in_service: dict[str, int] = {}
        self._turns = WeightedRoundRobin()
        self.preempted = 0
        self.served_s = 1.0

    @property
    def times(self) -> laxity.ServiceTimes:
        """How fast its servers are."""
        return self.queue.times

    def serve(self, pool: Pool | None, request_class: str) -> None:
        """Take the servers of a class, and the pool's others in case those fail; none without a pool."""
        self.servers = [] if pool is None else pool.by_class.get(request_class, pool.servers)
        own = {each.id for each in self.servers}
        self.others = [] if pool is None else [each for each in pool.servers if each.id not in own]
        self.starting = None if pool is None else pool.spec.starting
        self._is_mixed = pool is not None and pool.is_mixed
        self._point_gco2_per_kwh = (pool and pool.spec.accuracy_gco2_per_kwh) or 0.0
        limits = [each.max_tbt_ms for each in (pool.spec.classes if pool else ()) if each.name == request_class]
        self._max_tbt_s = limits[0] / 1e3 if limits and limits[0] is not None else None
        self.retime()

    def retime(self) -> None:
        """Reorder the queue by its servers' present times."""
        if not self.servers:
            return
        ttft_s = sum(each.costs.ttft_s for each in self.servers) / len(self.servers)
        tbt_s = sum(each.costs.tbt_s for each in self.servers) / len(self.servers)
        now = self.queue.times
        if abs(ttft_s - now.ttft_s) + abs(tbt_s - now.tbt_s) * 100 > RETIME_SHARE * (now.ttft_s + now.tbt_s * 100):
            self.queue.retime(laxity.ServiceTimes(ttft_s, max(tbt_s, 1e-6)))

    def choose(self, ticket: Ticket, now_s: float) -> Server | None:
        """Return the server for a request; None while none has room."""
        free = [each for each in self._passing(ticket, now_s) if each.held < each.limit]
        if not free:
            return None
        if len(free) == 1:
            return free[0]
        if self._rules.placement == "weights":
            loads = [InstanceLoad(each.id, each.limit, each.held, weight=each.spec.weight) for each in free]
            chosen = self._turns.choose(loads)
            return next((each for each in free if chosen and each.id == chosen.id), None)
        left_s = ticket.request.arrival_s + ticket.limit_s - now_s
        return choose_server(free, ticket.work, left_s, now_s, ticket.network_s, self._point_gco2_per_kwh)

    def _passing(self, ticket: Ticket, now_s: float) -> list[Server]:
        """Return the servers that may serve a request: those of its class, or the pool's others if none of those may.

        A server on trial is among them only while all are ejected; otherwise the router tries it (``probes``).
        """
        may_have_all = not (ticket.request.excluded or self._is_mixed)  # which tell every limit of where it may go
        for servers in (self.servers, self.others):
            found = [each for each in servers if each.breaker.opened_s is None]
            if found and not may_have_all:
                found = [each for each in found if ticket.may_have(each)]
            if found:
                return found
        for servers in (self.servers, self.others):
            found = [each for each in servers if each.breaker.passes(now_s) and ticket.may_have(each)]
            if found:
                return found
        return []

    def has_other(self, ticket: Ticket, server: Server) -> bool:
        """Whether the request may be given to another server too."""
        return any(each is not server for each in self._passing(ticket, time.monotonic()))

    async def take(self, ticket: Ticket, timeout_s: float, first_s: float = 0.0) -> Server:
        """Return the server that a request may be sent to, after waiting for one in the lane's order if need be.

        Args:
            timeout_s: How long it waits for room.
            first_s: How long it waits for a first server, if the pool has none and one is or will be wanted.

        Raises:
            NoServerError: None of the servers may be given requests.
            QueueFullError: Too many wait already, or the request waited for too long.
        """
        server = self._take_at_once(ticket)
        if server is not None:
            return server
        if not self._passing(ticket, now_s := time.monotonic()):
            if self.starting is None or not first_s or any(map(ticket.is_met_by, (*self.servers, *self.others))):
                raise NoServerError
            ticket.waits_since_s, timeout_s = now_s, first_s
        if not self.queue.push(ticket.request):
            raise QueueFullError(self.retry_after_s())
        return await self._wait(ticket, timeout_s)

    async def take_spare(self, ticket: Ticket, until_s: float, places: Collection[str]) -> Server:
        """Return a server with room that others leave, the cleanest of ``places``, after waiting for one if need be.

        Raises:
            NoServerError: None of the servers may be given requests.
            NoSpareError: There was no room until ``until_s``, by the monotonic clock.
        """
        ticket.is_spare = True
        while True:
            now_s = time.monotonic()
            passing = [each for each in self._passing(ticket, now_s) if each.breaker.opened_s is None]
            here = [each for each in passing if not places or each.location in places]
            free = [] if len(self.queue) else [each for each in here if self._leaves_room(each, ticket.work)]
            server = choose_server(free, ticket.work, math.inf, now_s, {}, self._point_gco2_per_kwh)
            if server is not None:
                self._begin(ticket, server)
                return server
            if now_s >= until_s:
                raise NoSpareError if passing else NoServerError(self.starting)
            await asyncio.sleep(min(SPARE_LOOK_S, until_s - now_s))

    def _leaves_room(self, server: Server, work: Work) -> bool:
        """Whether a server has room for a request that only gets what others leave."""
        costs, spare_tokens = server.costs, sum(server.spare.values()) + work.tokens
        if server.held >= max(1, math.floor(SPARE_SHARE * server.limit)) or costs.queued:
            return False
        if server.held == len(server.spare) and not server.held_elsewhere:
            return True  # nobody else is there
        alone_s = costs.token_s * (1.0 + SLOWDOWN_PER_TOKEN * max(costs.load_tokens + work.tokens - spare_tokens, 0.0))
        beside_s = alone_s + costs.token_s * SLOWDOWN_PER_TOKEN * spare_tokens
        if self._max_tbt_s is not None:
            return beside_s <= SPARE_OF_LIMIT * self._max_tbt_s
        return beside_s <= (1.0 + SPARE_SLOWDOWN) * alone_s

    def _take_spare_back(self) -> None:
        """Have those that only get what others leave give up as many places as requests wait for."""
        if not len(self.queue):
            return
        spare = {each for server in (*self.servers, *self.others) for each in server.spare if each.may_repeat}
        for request in self.queue:
            if not spare:
                return
            passing = self._passing(self._tickets[request.id], time.monotonic())
            places = [each for server in passing for each in reversed(server.spare) if each in spare]
            if places:
                found = next((each for each in places if each.is_preempted), places[0])
                spare.remove(found)
                _end(found)

    async def take_again(self, ticket: Ticket, timeout_s: float) -> Server:
        """Like ``take``, for a preempted request: it was accepted before, so the queue's bound does not apply."""
        server = self._take_at_once(ticket)
        if server is not None:
            return server
        self.queue.requeue(ticket.request)
        return await self._wait(ticket, timeout_s)

    def _take_at_once(self, ticket: Ticket) -> Server | None:
        stuck = self.pump() if len(self.queue) else ()  # who waits after it cannot be served now: nobody is overtaken
        server = None if ticket.request.excluded in stuck else self.choose(ticket, time.monotonic())
        if server is not None:
            self._begin(ticket, server)
        return server

    async def _wait(self, ticket: Ticket, timeout_s: float) -> Server:
        """Wait for a queued request's turn, and return the server that it is given."""
        self._tickets[ticket.request.id] = ticket
        ticket.given = asyncio.get_running_loop().create_future()
        try:
            self._take_spare_back()
            self._preempt()
            async with asyncio.timeout(timeout_s):
                return await ticket.given
        except TimeoutError:
            self._withdraw(ticket)
            if not any(map(ticket.is_met_by, (*self.servers, *self.others))):
                raise NoServerError(self.starting) from None
            raise QueueFullError(self.retry_after_s()) from None
        except BaseException:
            self._withdraw(ticket)
            raise
        finally:
            self._tickets.pop(ticket.request.id, None)

    def _withdraw(self, ticket: Ticket) -> None:
        """Remove a request whose client left or whose time is over; give back the server if it was given one."""
        self.queue.remove(ticket.request.id)
        server = ticket.server
        if server is not None:
            self.leave(ticket, server)
            server.breaker.abandoned(ticket)
            self._room_at(server)

    def _begin(self, ticket: Ticket, server: Server) -> None:
        ticket.server = server
        ticket.is_preempted = False
        server.breaker.sent(ticket)
        ticket.share_began_s = server.begin()
        ticket.place = server.costs.begin(ticket.work, time.monotonic())
        if ticket.is_spare:  # it is nobody's share of what is in service
            server.spare[ticket] = ticket.work.tokens
            return
        tenant = ticket.request.tenant
        self.in_service[tenant] = self.in_service.get(tenant, 0) + 1
        self.unanswered[ticket.request.id] = ticket

    def answered(self, ticket: Ticket) -> None:
        """Note the first byte of an answer: from here on the request keeps its place."""
        self.unanswered.pop(ticket.request.id, None)
        if ticket.server is not None:
            ticket.server.spare.pop(ticket, None)

    def leave(self, ticket: Ticket, server: Server) -> float:
        """Give back a server to others; return the request's share of its time, in seconds."""
        self.unanswered.pop(ticket.request.id, None)
        server.spare.pop(ticket, None)
        tenant = ticket.request.tenant
        left = self.in_service.get(tenant, 0) - 1
        if ticket.is_spare:
            pass
        elif left > 0:
            self.in_service[tenant] = left
        else:
            self.in_service.pop(tenant, None)
        ticket.server = None
        ticket.connection = None
        if ticket.place is not None:
            server.costs.end(ticket.place)
            ticket.place = None
        return server.end(ticket.share_began_s)

    def pump(self) -> set[frozenset[str]]:
        """Send waiting requests to servers with room; return the sets of excluded servers of those that wait on."""
        stuck = self.queue.serve(self.in_service, self._give, time.monotonic())
        self._take_spare_back()
        return stuck

    def _give(self, head: laxity.ServingRequest) -> bool:
        ticket = self._tickets[head.id]
        if ticket.given is None or ticket.given.done():  # its client left in this turn, or its time was over
            self.queue.remove(head.id)
            return True
        server = self.choose(ticket, time.monotonic())
        if server is None:
            return False
        self.queue.remove(head.id)
        self._begin(ticket, server)
        ticket.given.set_result(server)
        return True

    def fail_waiting(self) -> None:
        """Fail all waiting requests for which there is no server, not counting ejected ones."""
        now_s = time.monotonic()
        known = (*self.servers, *self.others)
        there = [each for each in known if each.breaker.state(now_s) is not BreakerState.OPEN]
        for name, ticket in self._tickets.items():
            given, since_s = ticket.given, ticket.waits_since_s
            if since_s is not None and self._waits_still(since_s, now_s) and not any(map(ticket.is_met_by, known)):
                continue
            if any(map(ticket.may_have, there)):
                continue
            if self.queue.remove(name) and given and not given.done():
                given.set_exception(NoServerError(self.starting))

    def _waits_still(self, since_s: float, now_s: float) -> bool:
        """Whether a first server may still come for a request that has been waiting since ``since_s``."""
        return self.starting is not None and (self.starting > 0 or now_s - since_s < WANTED_WITHIN_S)

    def _preempt(self) -> None:
        """Let a waiting request take the place of a less urgent one that has no answer yet; the first that can does."""
        rules = self._rules
        if not rules.most_preemptions or rules.order is laxity.Order.FCFS:
            return
        may_leave = {
            name: each
            for name, each in self.unanswered.items()
            if each.may_repeat
            and each.preemptions < rules.most_preemptions
            and each.connection
            and not each.is_preempted
        }
        spare = (each for server in (*self.servers, *self.others) for each in server.spare)
        leaving = [each.server for each in (*self.unanswered.values(), *spare) if each.is_preempted and each.server]
        looked_at: set[frozenset[str]] = set()
        now_s = time.monotonic()
        while may_leave and (head := self.queue.peek(without=looked_at, now_s=now_s)) is not None and not head.is_late:
            looked_at.add(head.excluded)
            waiting = self._tickets[head.id]
            if sum(map(waiting.may_have, leaving)) >= len(self.queue):
                continue  # for each who waits somebody leaves already
            running = [each.request for each in may_leave.values() if each.server and waiting.may_have(each.server)]
            margin_s = laxity.PREEMPTION_MARGIN_S
            found = laxity.preempted_by(head, running, rules.order, self.times, margin_s=margin_s)
            if found is not None:
                _end(may_leave[found.id])
                self.preempted += 1
                return

    def priority(self, request: laxity.ServingRequest) -> float:
        """Return the value that requests are ordered by, in seconds on this process's clock; smaller is more urgent."""
        return laxity.order_key_s(request, self._rules.order, self.times)

    def limit_s(self, request: laxity.ServingRequest, promised_s: float | None) -> float:
        """Return how long an answer may take: what the class promises, or else ``5 * Lat``."""
        return promised_s if promised_s is not None else SLO_LATENCIES * self.times.latency_s(request.output_tokens)

    def retry_after_s(self) -> float:
        """Return when the queue may have emptied, if what waits is served at the pace of the latest answers."""
        room = sum(each.limit for each in self.servers) or 1
        return max(1.0, math.ceil((1 + len(self.queue)) * self.served_s / room))


class Lanes:
    """All lanes; those of classes that are gone stay until nothing waits in them."""

    def __init__(self, rules: LaneRules) -> None:
        self._rules = rules
        self._lanes: dict[str, Lane] = {}

    def all(self) -> list[Lane]:
        return list(self._lanes.values())

    def of(self, pool: Pool, request_class: str) -> Lane:
        """Return the lane of a class; a class that is not in the plan is served by all servers of the pool."""
        name = f"{pool.spec.name}\n{request_class}"
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(name, self._rules, self.room_at)
            lane.serve(pool, request_class)
        return lane

    def rearrange(self, fleet: Fleet) -> None:
        """Give each lane its servers from the newest table."""
        for name, lane in list(self._lanes.items()):
            pool_name, _, request_class = name.partition("\n")
            pool = fleet.pools.get(pool_name)
            lane.serve(pool, request_class)
            lane.fail_waiting()
            lane.pump()
            if pool is None and not len(lane.queue) and not lane.in_service:
                del self._lanes[name]

    def room_at(self, server: Server) -> None:
        """Send waiting requests to a server that has room again, the most urgent head of its lanes first."""
        if len(server.lanes) == 1:
            lane = self._lanes.get(server.lanes[0])
            if lane is not None and len(lane.queue):
                lane.pump()
            return
        waiting = [lane for name in server.lanes if (lane := self._lanes.get(name)) is not None and len(lane.queue)]
        for lane in sorted(waiting, key=_urgency):
            lane.pump()


def _urgency(lane: Lane) -> float:
    head = lane.queue.peek()
    return math.inf if head is None else lane.priority(head)


def _end(ticket: Ticket) -> None:
    """Have a request leave its server and wait again; one that still connects leaves when it has (``dispatch``)."""
    ticket.is_preempted = True
    ticket.preemptions += 1
    if ticket.connection is not None:
        ticket.connection.abort(UpstreamError("preempted", "A more urgent request took its place.", may_repeat=True))
