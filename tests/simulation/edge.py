"""Requests at the edges of several gateways, which share their tenants' limits through Valkey and ask for keys."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, cast

from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit.edge.edge import Edge
from services.kit.edge.exchange import ClientGoneError, Exchange, while_connected
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import ConcurrencyLimiter, RateLimiter
from services.kit.edge.shared_limits import LIMITS_S, SharedLimits
from services.kit.problems import ProblemError, unavailable
from tests.simulation.loop import EPOCH_S, Simulation
from tests.simulation.valkey import Client, Store

RATE, BURST, AT_ONCE = 2.0, 3, 2
MAX_AGE_S, GRACE_S = 1.0, 3.0
LATE_S = 1.0
"""What an exchange of counts, or an answer about a key, may be late."""


@dataclass(frozen=True)
class _Route:
    method: str = "GET"
    path: str = "/v1/jobs"
    role: Role = Role.USER
    for_projects: bool = True
    answers_head: bool = True


class _World:
    """What clients get to see, and what is true of their key.

    Attributes:
        let_in_s: When requests were let in, by their process.
        revoked_s: When the key was revoked.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.let_in_s: list[float] = []
        self.working = 0
        self.revoked_s: float | None = None

    async def resolve(self, digest: str) -> ResolvedKey | None:
        """Answer as admission does."""
        identity = Identity(tenant_id="acme", role=Role.USER, key_id=digest[:8])
        key = ResolvedKey(identity=identity, limits=TenantLimits(requests_per_s=RATE, burst=BURST))
        return await self.simulation.boundary(
            lambda: key if self.revoked_s is None else None, unavailable("Admission"), may_repeat=True
        )


class _Gateway:
    """One process."""

    def __init__(self, world: _World, name: str, valkey: Client) -> None:
        clock_s = world.simulation.loop.time
        self._world = world
        self.keys = KeyCache(world.resolve, max_age_s=MAX_AGE_S, grace_s=GRACE_S, size=8, clock_s=clock_s)
        self.limiter = RateLimiter(clock_s)
        self.at_once = ConcurrencyLimiter(AT_ONCE, "streams")
        self.edge = Edge([_Route()], self.keys, self.limiter, self._answer)
        self.shared = SharedLimits(
            cast(Any, valkey), "limits", self.limiter, self.at_once, name, EPOCH_S, lambda: EPOCH_S + clock_s()
        )

    async def _answer(self, exchange: Exchange, route: _Route, path: str, key: ResolvedKey) -> None:
        world = self._world
        world.let_in_s.append(world.simulation.loop.time())
        with self.at_once.one_more(key.identity.tenant_id):
            await while_connected(exchange, self._work(exchange))

    async def _work(self, exchange: Exchange) -> None:
        self._world.working += 1
        try:
            await asyncio.sleep(0.1 * self._world.simulation.choices.below(12))
            await exchange.answer(200, [], b"")
        finally:
            self._world.working -= 1


async def play(simulation: Simulation) -> None:
    """Clients come with one key to any of the processes; at most so many are let in as the tenant may send."""
    draw = simulation.choices.below
    world = _World(simulation)
    fails = draw(2) == 1
    valkey = Client(simulation, Store(), fails=fails)
    gateways = [_Gateway(world, f"g{number}", valkey) for number in range(1 + draw(3))]
    simulation.holds("what is open has somebody at work", lambda: _open(gateways, world))
    sharing = [simulation.loop.create_task(_share(each)) for each in gateways]
    clients = [
        simulation.start(_client(world, gateways[draw(len(gateways))]), may_be_cancelled=True)
        for _ in range(4 + draw(30))
    ]
    if draw(2):
        simulation.loop.call_later(0.25 * draw(16), _revoke, world)
    await asyncio.wait(clients)
    for each in sharing:
        each.cancel()
    await simulation.quiet()
    _check_limits(simulation, world, len(gateways), fails)
    simulation.check("nothing is open for nobody", not any(each.at_once.open for each in gateways))
    simulation.check("nothing is asked for nobody", not any(each.keys._asking for each in gateways))


def _check_limits(simulation: Simulation, world: _World, processes: int, fails: bool) -> None:
    times = world.let_in_s
    own, exchange_s = BURST + 1e-6, 2 * LIMITS_S + LATE_S
    for begin, first_s in enumerate(times):
        for end in range(begin, len(times)):
            span_s = times[end] - first_s
            may = own + RATE * span_s + (processes - 1) * (own + RATE * (span_s if fails else min(span_s, exchange_s)))
            count = 1 + end - begin
            simulation.check("no tenant is let in oftener than it may be", count <= may, f"{count} in {span_s:.2f} s")
    if world.revoked_s is not None:
        late = [at_s for at_s in times if at_s > world.revoked_s + MAX_AGE_S + GRACE_S + LATE_S]
        simulation.check("a revoked key lets nobody in", not late, f"{late} after {world.revoked_s}")


def _revoke(world: _World) -> None:
    world.revoked_s = world.simulation.loop.time()


async def _share(gateway: _Gateway) -> None:
    while True:
        await gateway.shared.look()
        await asyncio.sleep(LIMITS_S)


async def _client(world: _World, gateway: _Gateway) -> None:
    draw = world.simulation.choices.below
    await asyncio.sleep(0.1 * draw(60))
    answers: list[int] = []

    async def receive() -> Any:
        if draw(3) != 1:
            await asyncio.Event().wait()
        await asyncio.sleep(0.1 * draw(10))
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            answers.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/jobs",
        "query_string": b"",
        "headers": [(b"authorization", b"Bearer ws_" + b"x" * 43)],
    }
    exchange = Exchange.open(scope, receive, send)
    try:
        await gateway.edge.handle(exchange)
    except ClientGoneError:
        return
    except ProblemError as problem:
        world.simulation.check("whoever is refused is told why", problem.status in (401, 429, 503), str(problem))
        await exchange.refuse(problem)
    world.simulation.check("a request has one answer", len(answers) == 1, str(answers))


def _open(gateways: list[_Gateway], world: _World) -> str | None:
    held = sum(sum(each.at_once._open.values()) for each in gateways)
    if any(count > AT_ONCE for each in gateways for count in each.at_once._open.values()):
        return f"{held} are open"
    living = world.simulation.living
    return f"{held} are open, and {living} clients live" if held > living else None
