"""Requests on their way through the router's lanes: the real dispatcher, lanes, servers and breakers."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from services.contracts.routing import RoutedServer, RoutingTable
from services.core.policies.freesh.laxity import Order
from services.router.dispatch import Dispatcher
from services.router.fleet import Fleet, Server
from services.router.lanes import Lane, LaneRules, Lanes, NoServerError, QueueFullError
from services.router.metrics import Metrics
from services.router.upstream import UpstreamError
from tests.simulation.loop import EPOCH_S, Simulation
from tests.support.routers import a_routed_pool

PUMPED_EVERY_S = 0.5
"""As the router's own loop does."""


class _Connection:
    """A connection to a model server that answers late, refuses, breaks off, or keeps silent."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._aborted: asyncio.Future[None] = simulation.loop.create_future()
        self.status = 200
        self.headers: dict[bytes, bytes] = {}

    def send(self, _: bytes) -> None:
        """Take the request."""

    async def head(self) -> None:
        """Wait for the answer's head."""
        draw = self._simulation.choices.below
        outcome = draw(5, often=0.4)
        wait_s = 0.1 * draw(40)
        if outcome == 3:
            wait_s = 5.0
        await asyncio.wait([self._aborted], timeout=wait_s)
        if self._aborted.done():
            self._aborted.result()
        if outcome == 1:
            self.status = 503
        elif outcome == 2:
            raise UpstreamError("closed", "it closed the connection", may_repeat=True)
        elif outcome == 3:
            raise UpstreamError("timeout", "no answer")

    def abort(self, error: UpstreamError) -> None:
        if not self._aborted.done():
            self._aborted.set_exception(error)

    def release(self) -> None:
        if self._aborted.done():
            self._aborted.exception()


class _Origin:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def connection(self, _: Any) -> _Connection:
        return await self._simulation.boundary(
            lambda: _Connection(self._simulation), UpstreamError("connect", "refused", may_repeat=True)
        )

    def close(self) -> None: ...


class _Answers:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def whole(self, _turn: Any, _server: Server, _connection: Any, give_back: Any) -> None:
        await asyncio.sleep(0.05 * self._simulation.choices.below(20))
        give_back()


class _Writer:
    def write(self, *_: Any) -> bytes:
        return b""


class _Keys:
    def is_wanted(self, _: Server) -> bool:
        return False


def _table(simulation: Simulation) -> RoutingTable:
    draw = simulation.choices.below
    servers = [
        RoutedServer.model_validate(
            {
                "id": name,
                "pool": "chat",
                "url": "http://127.0.0.1:1",
                "tenant_id": "acme",
                "location": "here",
                "state": "ready",
                "capacity": 1 + draw(3),
                "power_w": 400.0,
                "gco2_per_kwh": 100.0 * (1 + draw(3)),
            }
        )
        for name in ("a", "b", "c")[: 1 + draw(3)]
    ]
    from datetime import UTC, datetime

    return RoutingTable(made_at=datetime.fromtimestamp(EPOCH_S, UTC), pools=[a_routed_pool()], servers=servers)


async def play(simulation: Simulation) -> None:
    """Requests arrive, wait, leave, are refused, preempted and answered; at the end every place is free."""
    draw = simulation.choices.below
    fleet = Fleet(())
    fleet.adopt(_table(simulation))
    for server in fleet.servers.values():
        server.origin = cast(Any, _Origin(simulation))
    rules = LaneRules(order=(Order.LLF, Order.FCFS)[draw(2)], most_waiting=6, most_preemptions=draw(2))
    lanes = Lanes(rules)
    lane = lanes.of(fleet.pools["chat"], "")
    dispatcher = Dispatcher(
        cast(Any, SimpleNamespace(network_ms={}, queue_timeout_s=(0.3, 0.05, 6.0)[draw(3)], attempts=3)),
        fleet,
        lanes,
        cast(Any, None),
        cast(Any, _Keys()),
        cast(Any, _Writer()),
        cast(Any, _Answers(simulation)),
        Metrics(),
        cast(Any, None),
        cast(Any, None),
    )
    requests = 2 + draw(7)
    simulation.holds("no server has more than it may", lambda: _too_many(fleet))
    simulation.holds("every place has a living owner", lambda: _without_owner(fleet, lane, living))
    living: set[int] = set()
    asked = [
        simulation.start(_ask(simulation, dispatcher, fleet, lane, n, living), may_be_cancelled=True)
        for n in range(requests)
    ]
    pumping = simulation.loop.create_task(_pump(simulation, lanes))
    await asyncio.wait(asked)
    pumping.cancel()
    simulation.check("every place is given back", not any(s.held for s in fleet.servers.values()), str(_held(fleet)))
    simulation.check("nothing waits for nobody", not len(lane.queue) and not lane.unanswered, str(lane.unanswered))
    simulation.check("no tenant is in service", not lane.in_service, str(lane.in_service))


async def _pump(simulation: Simulation, lanes: Lanes) -> None:
    while True:
        await asyncio.sleep(PUMPED_EVERY_S)
        for lane in lanes.all():
            lane.fail_waiting()
            lane.pump()
            idle = _stands_idle(lane)
            simulation.check("no server with room stands beside a request that may use it", idle is None, str(idle))


async def _ask(
    simulation: Simulation, dispatcher: Dispatcher, fleet: Fleet, lane: Lane, number: int, living: set[int]
) -> None:
    draw = simulation.choices.below
    await asyncio.sleep(0.05 * draw(12))
    asked = SimpleNamespace(choices=1, may_repeat=draw(4) != 1)
    exchange = SimpleNamespace(headers={}, has_begun=False)
    tenant = ("acme", "beta")[draw(2, often=0.3)]
    identity = SimpleNamespace(tenant_id=tenant)
    received = SimpleNamespace(
        asked=asked, exchange=exchange, key=SimpleNamespace(identity=identity), at_s=time.monotonic()
    )
    expected = SimpleNamespace(
        output_tokens=float(1 + draw(200)), input_tokens=10, request_class="", prefix=tuple(range(draw(4)))
    )
    turn = SimpleNamespace(received=received, lane=lane, expected=expected, pool=fleet.pools["chat"], wait_s=0.0)
    living.add(number)
    try:
        await dispatcher._in_lane(cast(Any, turn))
    except (NoServerError, QueueFullError, UpstreamError):
        pass
    finally:
        living.discard(number)


def _held(fleet: Fleet) -> dict[str, int]:
    return {server.id: server.held for server in fleet.servers.values()}


def _too_many(fleet: Fleet) -> str | None:
    wrong = [server.id for server in fleet.servers.values() if not 0 <= server.held <= server.limit]
    return f"{wrong}: {_held(fleet)}" if wrong else None


def _without_owner(fleet: Fleet, lane: Lane, living: set[int]) -> str | None:
    held = sum(server.held for server in fleet.servers.values())
    if held > len(living):
        return f"{held} places are held, and {len(living)} requests live"
    if held != sum(lane.in_service.values()):
        return f"{held} places are held, and the lane counts {lane.in_service}"
    return None


def _stands_idle(lane: Lane) -> str | None:
    """Say which server has room though a request waits that may be sent to it."""
    now_s = time.monotonic()
    for request in lane.queue:
        for server in lane.servers:
            if server.room > 0 and server.breaker.passes(now_s) and server.id not in request.excluded:
                return f"{request.id} waits, and {server.id} has room for {server.room}"
    return None
