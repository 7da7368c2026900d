"""Which pool serves a model for a caller, and by which servers: what routers do, and serving relies on for batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.contracts.identity import Identity
from services.contracts.routing import EVERY_TENANT, RoutedPool, RoutedServer, may_use


@dataclass(slots=True)
class ServedPool:
    """A pool with its servers that may be given requests, or registered ones that serve models alone."""

    spec: RoutedPool  #: Its row of the routing table, or one made for registered servers
    is_planned: bool = True  #: Whether its servers follow a plan; false for models that only registered servers serve
    servers: list[RoutedServer] = field(default_factory=list[RoutedServer])
    is_mixed: bool = False  #: Whether some of them are not for all its models, or not for all who may use it
    joined: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Tenants whose registered servers are among them, each with a model of the server."""


class ServedModels:
    """What a routing table says of models."""

    def __init__(self, pools: Iterable[RoutedPool] = (), servers: Iterable[RoutedServer] = ()) -> None:
        self.pools = {spec.name: ServedPool(spec) for spec in pools}
        ready = [each for each in servers if each.takes_requests]
        for server in ready:
            if server.pool in self.pools:
                self.pools[server.pool].servers.append(server)
        registered = [each for each in ready if each.pool is None]
        for server in registered:
            self._add_pool_of(server)
        for server in registered:
            self._join(server)
        self._by_model: dict[str, list[ServedPool]] = {}
        for pool in self.pools.values():
            for model in pool.spec.models:
                self._by_model.setdefault(model, []).append(pool)

    def pool_of(self, model: str, caller: Identity) -> ServedPool | None:
        """Return the pool that serves a model for a caller: its tenant's, else with a server of it, else shared."""
        shared: ServedPool | None = None
        own = caller.tenant_id, model
        for pool in self._by_model.get(model, ()):
            if pool.spec.tenant_id == caller.tenant_id:
                return pool
            is_better = shared is None or (own in pool.joined and own not in shared.joined)
            if is_better and (caller.is_operator or may_use(caller.tenant_id, pool.spec)):
                shared = pool
        return shared

    def models(self, caller: Identity) -> list[tuple[str, ServedPool]]:
        """Return the models that a caller may ask for, each with the pool that serves it."""
        return [(model, pool) for model in sorted(self._by_model) if (pool := self.pool_of(model, caller)) is not None]

    def _add_pool_of(self, server: RoutedServer) -> None:
        """Have a registered server serve alone what no pool that it joins has for all who may use it."""
        joined = [each.spec for each in self.pools.values() if may_use(each.spec.tenant_id, server)]
        there = {model for spec in joined if _is_for_all_of(spec, server) for model in spec.models}
        if left := [model for model in server.models if model not in there]:
            name = f"endpoint:{':'.join([server.tenant_id, ','.join(sorted(left)), *sorted(server.tenants)])}"
            spec = RoutedPool(name=name, tenant_id=server.tenant_id, tenants=server.tenants, models=left)
            self.pools[name] = ServedPool(spec, is_planned=False)

    def _join(self, server: RoutedServer) -> None:
        """Have a registered server join the pools of its models whose tenants may use it."""
        own = set(server.models)
        for pool in self.pools.values():
            if may_use(pool.spec.tenant_id, server) and not own.isdisjoint(pool.spec.models):
                pool.servers.append(server)
                pool.joined |= {(server.tenant_id, model) for model in own}
                pool.is_mixed |= not (own.issuperset(pool.spec.models) and _is_for_all_of(server, pool.spec))


def answers(server: RoutedServer, model: str, caller: Identity) -> bool:
    """Return whether a server is for who may use its pool; a registered one has models and users of its own."""
    if server.pool is not None:
        return True
    return model in server.models and (caller.is_operator or may_use(caller.tenant_id, server))


def servers_of(served: ServedModels, caller: Identity) -> dict[str, list[RoutedServer]]:
    """Return the servers of each model that a caller may ask for; there may be none now."""
    return {
        model: [each for each in pool.servers if answers(each, model, caller)] for model, pool in served.models(caller)
    }


def _is_for_all_of(owned: RoutedPool | RoutedServer, other: RoutedPool | RoutedServer) -> bool:
    """Return whether all who may use ``other`` may use ``owned``."""
    may = {owned.tenant_id, *owned.tenants}
    return EVERY_TENANT in may or {other.tenant_id, *other.tenants} <= may
