"""The servers that the router knows, of pools and of applications, and what it has seen of each.

An instance of an application is a server too: its pool is ``app:`` and the application's name, its class the variant.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from services.contracts.identity import Identity
from services.contracts.routing import RoutedApp, RoutedAppServer, RoutedPool, RoutedServer, RoutingTable, may_use
from services.contracts.served_models import ServedModels
from services.core.domain.units import J_PER_KWH
from services.core.policies.freesh.server_choice import ServerCosts, energy_profile
from services.kit.edge.exchange import Header
from services.kit.networks import Network
from services.router.breaker import Breaker
from services.router.streams import Footprint
from services.router.upstream import Origin

Extra = Literal["id", "usage"]
"""What some servers refuse: an id of a request that is no UUID, and the wish for the usage of streams."""
AGAIN_S = 3_600.0
"""After this, a server is sent what it refused once more: it may be a newer one."""


class Server:
    """A model server, or an instance of an application.

    Attributes:
        held: Requests that this process holds there.
        held_elsewhere: Requests that other router processes said they hold.
        share_s: Its seconds per request so far: grows by 1 / n in each second in which it holds n requests.
        spec: Its row of the routing table.
        energy: What each request adds to its energy, by its profile; None if that does not say.
        gco2_per_kwh: Intensity of its grid now, PUE included; None if unknown.
        accuracy_pct: Accuracy of its variant of the model; None where all servers are alike.
        stated: Headers by which its answers say where it is, and how accurate.
    """

    __slots__ = (
        *("_refused", "_share_at_s", "accuracy_pct", "breaker", "costs", "energy", "gco2_per_kwh", "held"),
        *("held_elsewhere", "id", "instance", "lanes", "limit", "location", "origin", "share_s", "spare", "spec"),
        *("stated", "tells_load", "was_key_asked_for"),
    )

    def __init__(
        self, spec: RoutedServer, networks: tuple[Network, ...], instance: RoutedAppServer | None = None
    ) -> None:
        self.held = self.held_elsewhere = 0
        self.share_s, self._share_at_s = 0.0, time.monotonic()
        self.id = spec.id
        self.origin = Origin(spec.url, None if spec.pool is not None else networks)
        self.breaker = Breaker()
        self.costs = ServerCosts()  #: How fast it is and what it has to do, as far as is known here
        self._refused: dict[Extra, float] = {}
        self.lanes: list[str] = []
        self.spare: dict[Any, int] = {}
        """Tokens of each request that it holds because others left room; those yield to others (``lanes``)."""
        self.limit = spec.capacity
        self.instance = instance  #: Its row as an instance of an application; None for a model server
        self.tells_load = False  #: Whether it reported its load when it was last asked
        self.was_key_asked_for = False
        """Whether the key of an instance, if it has one, was fetched since it entered the table."""
        self._take(spec)

    def update(self, spec: RoutedServer, processes: int = 1) -> None:
        """Take in a newer row, and how many router processes share the server."""
        if spec.url != self.spec.url:
            self.origin.close()
            self.origin = Origin(spec.url, self.origin.networks)
            self.breaker = Breaker()
            self._refused.clear()
        self._take(spec)
        self.limit = max(1, -(-spec.capacity // processes))

    def _take(self, spec: RoutedServer) -> None:
        self.spec: RoutedServer = spec
        self.location = spec.location
        self.accuracy_pct = spec.accuracy_pct
        self.stated: tuple[Header, ...] = ((b"x-wattshift-location", spec.location.encode()),)
        if spec.accuracy_pct is not None:
            self.stated += ((b"x-wattshift-accuracy", b"%g" % spec.accuracy_pct),)
        self.gco2_per_kwh = None if spec.gco2_per_kwh is None else spec.pue * spec.gco2_per_kwh
        times_s = _profile_s(spec)
        self.energy = energy_profile(spec.full_power_w, spec.idle_w, spec.max_qps, spec.latency_s, *times_s)
        self.costs.expect(*times_s, (spec.max_qps or 0.0) * (spec.latency_s or 0.0))

    @property
    def is_ready(self) -> bool:
        """Whether it may be given requests at all."""
        return self.spec.takes_requests

    def begin(self) -> float:
        """Count a request that it is given; return the share clock, with which it is to be ended."""
        self._tick()
        self.held += 1
        return self.share_s

    def end(self, began_share_s: float) -> float:
        """Count a request that it no longer holds; return its seconds that were the request's."""
        self._tick()
        self.held -= 1
        return self.share_s - began_share_s

    def so_far(self, began_share_s: float) -> float:
        """Return its seconds that have been a request's until now."""
        self._tick()
        return self.share_s - began_share_s

    def others_hold(self, count: int) -> None:
        """Take in how many requests other processes hold there from now on."""
        self._tick()
        self.held_elsewhere = count

    def _tick(self) -> None:
        now_s = time.monotonic()
        holds = self.held + self.held_elsewhere
        if holds:
            self.share_s += (now_s - self._share_at_s) / holds
        self._share_at_s = now_s

    def may_have(self, extra: Extra, now_s: float) -> bool:
        """Whether it is sent something that some servers refuse: it has not refused that recently."""
        return not self._refused or now_s >= self._refused.get(extra, 0.0)

    def refused(self, extra: Extra, now_s: float) -> None:
        """Note that it refuses requests with something."""
        self._refused[extra] = now_s + AGAIN_S

    def takes(self, extra: Extra) -> None:
        """Note that something was not why it refused a request."""
        self._refused.pop(extra, None)

    def footprint(self, share_s: float) -> Footprint:
        """Return the energy and emissions of a request that had ``share_s`` seconds of the server.

        Idle time between requests is charged to none.
        """
        spec = self.spec
        energy_j = None if spec.power_w is None else share_s * spec.power_w
        carbon_gco2 = None
        if energy_j is not None and spec.gco2_per_kwh is not None:
            carbon_gco2 = energy_j / J_PER_KWH * spec.pue * spec.gco2_per_kwh
        return Footprint(energy_j, carbon_gco2, spec.location)


@dataclass(slots=True)
class Pool:
    """A pool with the servers of each of its lanes: by class, or one lane ``""`` without a plan."""

    spec: RoutedPool  #: Its row of the routing table
    is_planned: bool = True  #: Whether its servers follow a plan; false for models that only registered endpoints serve
    is_mixed: bool = False  #: Whether some of its servers are not for all its models, or not for all who may use it
    servers: list[Server] = field(default_factory=list[Server])  #: All that are ready
    by_class: dict[str, list[Server]] = field(default_factory=dict[str, list[Server]])
    """The servers of each class; a class without any has all servers of the pool."""
    promised_s: dict[str, float] = field(init=False)  #: How long an answer may take, for each class that states it

    def __post_init__(self) -> None:
        self.promised_s = {
            each.name: each.max_latency_s for each in self.spec.classes if each.max_latency_s is not None
        }

    def class_of(self, input_tokens: float, is_long_output: bool) -> str:
        """Return a request's class by the thresholds in force."""
        spec = self.spec
        if spec.input_tokens is None:
            return spec.classes[0].name if spec.classes else ""
        return ("L" if input_tokens >= spec.input_tokens else "S") + ("L" if is_long_output else "S")


class Fleet:
    """The newest routing table, and the state of its servers, which survives newer tables."""

    def __init__(self, networks: tuple[Network, ...] = ()) -> None:
        self._networks = networks
        self.servers: dict[str, Server] = {}  #: Model servers by id
        self.instances: dict[str, Server] = {}  #: Those of applications, by id
        self.pools: dict[str, Pool] = {}
        self.apps: dict[str, RoutedApp] = {}  #: Applications by name
        self.made_at_s = 0.0  #: When the table was made, UTC seconds; 0 before the first
        self._served = ServedModels()
        self._leaving: dict[str, Server] = {}

    def adopt(self, table: RoutingTable, processes: int = 1) -> None:
        """Take in a table: servers that are gone from it get no more requests, and finish those they hold."""
        self.made_at_s = table.made_at.timestamp()
        known = {each.id: each for each in self.everyone()}

        def kept(spec: RoutedServer, processes: int, instance: RoutedAppServer | None = None) -> Server:
            server = known.pop(spec.id, None) or Server(spec, self._networks)
            server.update(spec, processes)
            server.instance = instance
            return server

        apps, before = {app.name: app for app in table.apps}, self.apps

        def spec_of(row: RoutedAppServer) -> RoutedServer:
            server, app = self.instances.get(row.id), apps.get(row.app)
            if server is not None and server.instance == row and before.get(row.app) == app:
                return server.spec
            return _of_app(row, app)

        self.servers = {spec.id: kept(spec, processes) for spec in table.servers}
        self.instances = {each.id: kept(spec_of(each), 1, each) for each in table.app_servers}
        self.apps = apps
        for server in known.values():
            server.origin.close()
        self._leaving = {name: each for name, each in known.items() if each.held}
        for server in self.servers.values():
            server.lanes = []
        self._served = ServedModels(table.pools, table.servers)
        self.pools = {
            name: Pool(each.spec, each.is_planned, each.is_mixed, [self.servers[spec.id] for spec in each.servers])
            for name, each in self._served.pools.items()
        }
        for pool in self.pools.values():
            _arrange(pool)

    def share(self, processes: int, held_elsewhere: Mapping[str, int]) -> None:
        """Take in how many router processes there are, and how many requests the others hold at each server."""
        for server in self.servers.values():
            server.update(server.spec, processes)
            server.others_hold(held_elsewhere.get(server.id, 0))
            if not server.tells_load:
                server.costs.tell(0, server.held_elsewhere, 0, 0)
        for instance in self.instances.values():
            if instance.spec.capacity > 1:  # where one request fits, no other process holds any meanwhile
                instance.others_hold(held_elsewhere.get(instance.id, 0))

    def pool_of(self, model: str, caller: Identity) -> Pool | None:
        """Return the pool that serves a model for a caller, as ``ServedModels.pool_of`` does."""
        found = self._served.pool_of(model, caller)
        return None if found is None else self.pools[found.spec.name]

    def models(self, caller: Identity) -> list[tuple[str, Pool]]:
        return [(model, self.pools[found.spec.name]) for model, found in self._served.models(caller)]

    def app_of(self, name: str, caller: Identity) -> RoutedApp | None:
        """Return an application that a caller may use; None if there is none."""
        app = self.apps.get(name)
        return app if app is not None and (caller.is_operator or may_use(caller.tenant_id, app)) else None

    def instance(self, name: str) -> Server | None:
        """Return an instance of an application by its id; None if this process does not know it."""
        return self.instances.get(name) or self._leaving.get(name)

    def add(self, instance: RoutedAppServer) -> None:
        """Add an instance that another process found in a newer table."""
        if self.instance(instance.id) is None:
            spec = _of_app(instance, self.apps.get(instance.app))
            self._leaving[instance.id] = Server(spec, self._networks, instance)

    def ready(self, app: str) -> list[Server]:
        return [each for each in self.instances.values() if each.is_ready and each.spec.pool == f"app:{app}"]

    def draining(self) -> dict[str, int]:
        """Return how many requests this process holds at servers that are draining or have left the table."""
        there = (*self.servers.values(), *self.instances.values())
        held = {each.id: each.held for each in there if each.spec.state == "draining"}
        return held | {name: each.held for name, each in self._leaving.items()}

    def everyone(self) -> list[Server]:
        """Return all servers and instances, including those that have left the table and still hold requests."""
        return [*self.servers.values(), *self.instances.values(), *self._leaving.values()]

    def every_server(self) -> list[Server]:
        """Return only the model servers of ``everyone``."""
        return [each for each in self.everyone() if each.instance is None]


def _of_app(row: RoutedAppServer, app: RoutedApp | None) -> RoutedServer:
    """Return an instance's row in the form of any server's.

    Its power is that at work: what its GPU draws above idle, by the profile, and its share of the GPU's idle power.
    """
    return RoutedServer.of(
        row,
        pool=f"app:{row.app}",
        tenant_id=app.tenant_id if app else "",
        request_class=row.variant,
        capacity=app.concurrency if app else 1,
        power_w=None if row.busy_w is None or row.idle_w is None else row.busy_w + row.idle_w,
        idle_w=None,
        accuracy_pct=None,
    )


def _profile_s(spec: RoutedServer) -> tuple[float | None, float | None]:
    """Return the times to the first token and between tokens, by a server's profile; None if that does not say."""
    return spec.ttft_ms and spec.ttft_ms / 1e3, spec.tbt_ms and spec.tbt_ms / 1e3


def _arrange(pool: Pool) -> None:
    """Give each class its servers: those planned for it and for any class; all of the pool if it has none."""
    names = [each.name for each in pool.spec.classes] or [""]
    for name in names:
        own = [each for each in pool.servers if each.spec.request_class in (name, None)]
        pool.by_class[name] = own or pool.servers
        for server in pool.servers:  # also those of other classes: for some requests no other may do
            server.lanes.append(f"{pool.spec.name}\n{name}")
