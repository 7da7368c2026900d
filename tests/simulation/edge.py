"""Requests at the edges of several gateways, which share their tenants' limits through Valkey and ask for keys."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch
from urllib.parse import unquote

from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit.edge import limits
from services.kit.edge.edge import LONGEST_URL_BYTES, Edge, EdgeMiddleware, OpenedEdge, OpenRoutes
from services.kit.edge.exchange import ClientGoneError, Exchange, while_connected
from services.kit.edge.keys import ASK_AGAIN_S, KeyCache, resolve_at
from services.kit.edge.limits import AddressLimiter, ConcurrencyLimiter, RateLimiter
from services.kit.edge.shared_limits import ALIVE_S, FORGOTTEN_S, LIMITS_S, QUIET_S, SharedLimits
from services.kit.ids import utc_now
from services.kit.problems import ProblemError, unavailable
from tests.simulation.loop import EPOCH_S, Simulation
from tests.simulation.valkey import Client, Store

RATE, BURST, AT_ONCE = 2.0, 3, 2
OTHER_RATE, OTHER_BURST = 1.0, 2
"""What the tenant may send after a change: less."""
ADDRESSES, ADDRESSES_KEPT = 3, 2
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


_PATHS = ("/v1/elsewhere", "x/v1/jobs", "/v1/jobs/a.1", "/v1/jobs/a%2F1", "/v1/%6aobs", "/v1/jobs/", "/v1/jobs/a b")
_OPEN = _Route(path="/v1/open", answers_head=False)
_NAMED = _Route(path="/v1/jobs/{job_id}")
_ROUTES = (
    _Route(),
    _NAMED,
    _Route("POST", "/v1/pools", Role.OPERATOR, for_projects=False),
    _OPEN,
)
_CALLERS: dict[str | None, tuple[Role, str | None]] = {
    "user": (Role.USER, None),
    "operator": (Role.OPERATOR, None),
    "of a project": (Role.OPERATOR, "p"),
    None: (Role.USER, None),
}
"""Of the routes of ``_knock``: by the words of an authorization, their role and project."""


class _World:
    """What clients get to see, and what is true of their key.

    Attributes:
        let_in_s: When requests were let in, by their process.
        taken: How many had what their tenant may send, some of which left before they were let in.
        revoked_s: When the key was revoked.
        receiving: How many clients are listened to.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.let_in_s: list[float] = []
        self.taken = 0
        self.working = 0
        self.revoked_s: float | None = None
        self.is_away = False
        self.has_changed = False
        self.has_failed = False
        self.receiving = 0
        self.expires_at = utc_now() + timedelta(days=1)

    async def resolve(self, gateway: _Gateway) -> ResolvedKey:
        """Answer as admission does."""
        identity = Identity(tenant_id="acme", role=Role.USER, key_id="key")
        rate, burst = (OTHER_RATE, OTHER_BURST) if self.has_changed else (RATE, BURST)
        own = TenantLimits(requests_per_s=rate, burst=burst)
        key = ResolvedKey(identity=identity, limits=own, expires_at=self.expires_at)
        asked_s = self.simulation.loop.time()
        is_old = asked_s >= gateway.confirmed_s + MAX_AGE_S - 1e-6
        self.simulation.check("a key that was confirmed just now is not asked for", is_old, str(asked_s))
        try:
            is_known = await self.simulation.boundary(self._is_known, unavailable("Admission"), may_repeat=True)
        except ProblemError:
            self.has_failed = True
            raise
        if not is_known:
            raise ProblemError(404, ProblemCode.NOT_FOUND, "There is no such key.")
        gateway.confirmed_s = max(gateway.confirmed_s, asked_s)
        return key

    def _is_known(self) -> bool:
        if self.is_away:
            raise unavailable("Admission")
        return self.revoked_s is None


class _Limiter(RateLimiter):
    """The limits of one process, and beside them a second count by which it is judged."""

    def __init__(self, world: _World, gateway: _Gateway) -> None:
        super().__init__(world.simulation.loop.time)
        self._world, self._gateway = world, gateway
        self._left, self._at_s = math.nan, 0.0
        self.charged = 0

    def take(self, tenant_id: str, limits: TenantLimits) -> Any:
        """As of its base."""
        rate, burst = limits.requests_per_s, limits.burst
        now_s = self._world.simulation.loop.time()
        left = burst if math.isnan(self._left) else min(burst, self._left + (now_s - self._at_s) * self._rate)
        self._left, self._at_s, self._rate, self._burst = left, now_s, rate, burst
        may = left >= 1 - 1e-9
        self._left -= may
        try:
            told = super().take(tenant_id, limits)
        except ProblemError:
            self._world.simulation.check("nobody is refused for nothing", not may or left < 1 + 1e-9, f"{left} left")
            self._left = left
            raise
        self._world.simulation.check("no tenant is let in oftener than it may be", may, f"{left} left")
        self._world.taken += 1
        self._gateway.taken += 1
        return told

    def charge(self, tenant_id: str, requests: int) -> None:
        """As of its base."""
        self.charged += requests
        is_true = requests > 0 and self.charged <= self._world.taken - self._gateway.taken
        self._world.simulation.check("what others let in is charged once", is_true, f"{requests}, {self.charged}")
        if not math.isnan(self._left):
            now_s = self._world.simulation.loop.time()
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._rate) - requests
            self._at_s = now_s
        super().charge(tenant_id, requests)


class _Gateway:
    """One process."""

    def __init__(self, world: _World, name: str, valkey: Client) -> None:
        clock_s = world.simulation.loop.time
        self._world = world
        self.name = name
        self.taken = 0
        self.confirmed_s = float("-inf")
        self.keys = KeyCache(resolve_at(cast(Any, self)), max_age_s=MAX_AGE_S, grace_s=GRACE_S, size=8, clock_s=clock_s)
        self.limiter = _Limiter(world, self)
        self.at_once = ConcurrencyLimiter(AT_ONCE, "streams")
        self.edge = Edge([_Route()], self.keys, self.limiter, self._answer)
        self.shared = SharedLimits(
            cast(Any, valkey), "limits", self.limiter, self.at_once, name, EPOCH_S, lambda: EPOCH_S + clock_s()
        )

    async def call(self, *_: Any, **__: Any) -> ResolvedKey:
        """Ask admission, as ``ServiceClient.call``."""
        return await self._world.resolve(self)

    async def _answer(self, exchange: Exchange, route: _Route, path: str, key: ResolvedKey) -> None:
        world = self._world
        now_s = world.simulation.loop.time()
        world.let_in_s.append(now_s)
        may_until_s = self.confirmed_s + max(MAX_AGE_S, GRACE_S) + ASK_AGAIN_S + LATE_S
        world.simulation.check("who is let in was confirmed not long ago", now_s <= may_until_s)
        world.simulation.check("an expired key lets nobody in", utc_now() < world.expires_at)
        with self.at_once.one_more(key.identity.tenant_id):
            await while_connected(exchange, self._work(exchange))

    async def _work(self, exchange: Exchange) -> None:
        self._world.working += 1
        try:
            await asyncio.sleep(0.1 * self._world.simulation.choices.below(12))
            if self._world.simulation.choices.below(3) == 1:  # an app that reads no request ids
                await exchange.send_named({"type": "http.response.start", "status": 200, "headers": []})
                await exchange.send_named({"type": "http.response.body", "body": b""})
            else:
                await exchange.answer(200, [], b"")
        finally:
            self._world.working -= 1


async def play(simulation: Simulation) -> None:
    """Clients come with one key to any of the processes; at most so many are let in as the tenant may send."""
    draw = simulation.choices.below
    world = _World(simulation)
    fails = draw(2) == 1
    store = Store()
    valkey = Client(simulation, store, fails=fails)
    gateways = [_Gateway(world, f"g{number}", valkey) for number in range(1 + draw(3))]
    looked, look = Counter[Any](), SharedLimits._look

    async def count(shared: SharedLimits, own: Any) -> None:
        await look(shared, own)
        looked[simulation.loop.process_now()] += 1

    simulation.instead(SharedLimits, _look=count)
    simulation.says_once("limits.not_shared", lambda _: looked[simulation.loop.process_now()])
    simulation.holds("what is open has somebody at work", lambda: _open(gateways, world))
    sharing = [simulation.process().start(_share(each)) for each in gateways]
    clients = [
        simulation.start(_client(world, gateways[draw(len(gateways))]), may_be_cancelled=True)
        for _ in range(4 + draw(30) + 50 * draw(2, often=0.3))
    ]
    simulation.start(_strangers(simulation))
    simulation.start(_knock(simulation))
    match draw(6):
        case 1 | 2:
            simulation.loop.call_later(0.25 * draw(16), _revoke, world)
        case 3:
            simulation.loop.call_later(0.25 * draw(16), setattr, world, "is_away", True)
        case 4:
            simulation.loop.call_later(0.25 * draw(16), setattr, world, "has_changed", True)
        case 5:
            world.expires_at = utc_now() + timedelta(seconds=0.5 * draw(16))
        case _:
            pass
    await asyncio.wait(clients)
    simulation.check("whoever shares limits knows who answers", fails or not any(x.shared._is_away for x in gateways))
    if draw(6) == 1:  # the first ends, without a word
        sharing.pop(0).cancel()
        await asyncio.sleep(ALIVE_S + QUIET_S + 4 * LIMITS_S + (FORGOTTEN_S if draw(2) else 0.0))
        _check_gone(simulation, gateways, store, fails)
    for each in sharing:
        each.cancel()
    await simulation.quiet()
    _check_limits(simulation, world, len(gateways), fails)
    simulation.check("nothing is open for nobody", not any(each.at_once.open for each in gateways))
    simulation.check("nothing is asked for nobody", not any(each.keys._asking for each in gateways))
    simulation.check("nobody is listened to for nobody", not world.receiving, str(world.receiving))


def _check_gone(simulation: Simulation, gateways: list[_Gateway], store: Store, fails: bool) -> None:
    elsewhere = [dict(each.at_once.elsewhere) for each in gateways[1:]]
    simulation.check("who is gone has nothing open", fails or not any(elsewhere), str(elsewhere))
    is_known = gateways[0].name in store.hgetall("limits")
    is_over = simulation.loop.time() > FORGOTTEN_S + 10 and len(gateways) > 1 and not fails
    simulation.check("who is gone is forgotten", not (is_known and is_over))


async def _strangers(simulation: Simulation) -> None:
    """Clients without keys come from some addresses, more of them than are kept in mind."""
    draw, now_s = simulation.choices.below, simulation.loop.time
    limiter = AddressLimiter(RATE, BURST, now_s)
    known: OrderedDict[str, tuple[float, float]] = OrderedDict()
    with patch.object(limits, "MOST_ADDRESSES", ADDRESSES_KEPT):
        for _ in range(draw(20)):
            await asyncio.sleep(0.1 * draw(4))
            who = f"10.0.0.{draw(ADDRESSES)}"
            left, at_s = known.pop(who, (BURST, now_s()))
            left = min(BURST, left + (now_s() - at_s) * RATE)
            known[who] = (left - (left >= 1), now_s())
            while len(known) > ADDRESSES_KEPT:
                known.popitem(last=False)
            try:
                limiter.take(who)
                is_let_in = True
            except ProblemError:
                is_let_in = False
            is_right = is_let_in is (left >= 1) or abs(left - 1) < 1e-9
            simulation.check("an address is let in as often as it may be", is_right, f"{who}: {left}")
            simulation.check("no more addresses are kept than may be", len(limiter._buckets) <= ADDRESSES_KEPT)


async def _knock(simulation: Simulation) -> None:
    """Ask for all kinds of routes, in all kinds of ways; each is answered as the table of routes has it."""
    draw, check = simulation.choices.below, simulation.check
    reached: list[str] = []

    async def caller(authorization: bytes | None, _: Any) -> ResolvedKey:
        await asyncio.sleep(0)
        if authorization is None:
            raise ProblemError(401, ProblemCode.UNAUTHENTICATED, "There is no key.")
        role, project = _CALLERS[authorization.decode()]
        identity = Identity(tenant_id="acme", role=role, key_id="key", project=project)
        return ResolvedKey(identity=identity, limits=TenantLimits(requests_per_s=1e3, burst=1_000))

    async def answer(exchange: Exchange, route: _Route, *_: Any) -> None:
        reached.append(route.path)
        how = draw(6)
        if how == 1:
            raise RuntimeError("a fault of ours")
        await exchange.answer(200, [], b"")
        if how == 2:
            raise RuntimeError("a fault of ours, after the answer")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append("app")
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    now_s = simulation.loop.time
    opened = OpenedEdge[_Route]()
    open_routes = OpenRoutes[_Route](lambda route: route is _OPEN, AddressLimiter(RATE, BURST, now_s))
    keys = cast(Any, SimpleNamespace(caller=caller))
    opened.edge = Edge(_ROUTES, keys, RateLimiter(now_s), answer, open_routes)
    door = EdgeMiddleware(cast(Any, app), opened)
    for _ in range(draw(12)):
        method, who = ("GET", "POST", "HEAD")[draw(3)], (*_CALLERS,)[draw(4)]
        path = (*(each.path for each in _ROUTES), *_PATHS)[draw(4 + len(_PATHS))]
        is_long, is_http = draw(8) == 1, draw(8) != 1
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            await asyncio.sleep(0)
            sent.append(message)

        scope = {
            "type": "http" if is_http else "websocket",
            "method": method,
            "path": path,
            "query_string": b"x" * LONGEST_URL_BYTES if is_long else b"",
            "headers": [(b"authorization", who.encode())] if who is not None else [],
            "client": ("10.0.0.1", 1),
        }
        reached.clear()
        await door(scope, cast(Any, asyncio.Event().wait), send)
        what = f"{method} {path} by {who}"
        if not is_http:
            check("what is no request goes to the app", reached == ["app"] and not sent, what)
            continue
        heads = [each for each in sent if each["type"] == "http.response.start"]
        check("a request has one answer", len(heads) == 1 and len(sent) == 2, f"{what}: {sent}")
        status, names = heads[0]["status"], {name for name, _ in heads[0]["headers"]}
        expected = 414 if is_long else _expected(method, path, who)
        is_let_in = expected == 200
        told = {200, 500, 429} if is_let_in and who is None else {200, 500} if is_let_in else {expected}
        check("an answer is as the table of routes has it", status in told, f"{what}: {status}, not {expected}")
        check("who is let in is told its limits", not is_let_in or b"ratelimit" in names, f"{what}: {names}")
        route = next(iter(_routes_of(path)), None)
        goes = [] if status not in (200, 404, 500) else ["app"] if route is None else [route.path]
        check("who is refused is not answered", reached == goes, f"{what}: {status}, {reached}")
        check("who may send nothing is told what may be", (status == 405) is (b"allow" in names), what)


def _routes_of(path: str) -> list[_Route]:
    """Return the routes of a path, by its decoded parts; that of names only for what may be one."""
    parts = [unquote(each) for each in path.split("/")]
    fixed = [each for each in _ROUTES if each is not _NAMED and each.path.split("/") == parts]
    is_named = (
        parts[:3] == ["", "v1", "jobs"] and len(parts) == 4 and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._~:-]*", parts[3])
    )
    return fixed or [_NAMED] * bool(is_named)


def _expected(method: str, path: str, who: str | None) -> int:
    """Return the status of an answer, as the table of routes has it."""
    mine = _routes_of(path)
    if not mine:
        return 404
    route = mine[0]
    if method != route.method and not (method == "HEAD" and route.method == "GET" and route.answers_head):
        return 405
    if who is None:
        return 200 if route is _OPEN else 401
    role, project = _CALLERS[who]
    is_allowed = (route.role is Role.USER or role is Role.OPERATOR) and (project is None or route.for_projects)
    return 200 if is_allowed else 403


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
    draw, check = world.simulation.choices.below, world.simulation.check
    await asyncio.sleep(0.1 * draw(60))
    answers: list[int] = []
    bodies: list[bytes] = []

    async def receive() -> Any:
        world.receiving += 1
        try:
            if draw(3) != 1:
                await asyncio.Event().wait()
            await asyncio.sleep(0.1 * draw(10))
        finally:
            world.receiving -= 1
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            check("an answer names its request", any(name == b"x-request-id" for name, _ in message["headers"]))
            answers.append(message["status"])
        else:
            check("an answer begins with its head", len(answers) == 1)
            bodies.append(message["body"])

    given = (b"Bearer ws_" + b"x" * 43, None, b"Basic abc")[draw(3, often=0.1)]
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/v1/jobs",
        "query_string": b"",
        "headers": [(b"authorization", given)] if given else [],
    }
    exchange = Exchange.open(scope, receive, send)
    try:
        await gateway.edge.handle(exchange)
        check("nobody is let in without a key", given is not None and given.startswith(b"Bearer"))
    except ClientGoneError:
        return
    except ProblemError as problem:
        is_known = world.revoked_s is None and utc_now() < world.expires_at and given and b"ws_" in given
        check("whoever is refused is told why", problem.status in (401, 429, 503), str(problem))
        check("a key that is valid is let in", problem.status != 401 or not is_known, str(problem))
        check("who answers is not away", problem.status != 503 or world.has_failed, str(problem))
        await exchange.refuse(problem)
    check("a request has one answer", len(answers) == len(bodies) == 1, str(answers))


def _open(gateways: list[_Gateway], world: _World) -> str | None:
    held = sum(sum(each.at_once._open.values()) for each in gateways)
    if any(count > AT_ONCE for each in gateways for count in each.at_once._open.values()):
        return f"{held} are open"
    living = world.simulation.living
    return f"{held} are open, and {living} clients live" if held > living else None
