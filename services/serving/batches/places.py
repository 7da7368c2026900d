"""Where the models of batches are served, by the routing table."""

from collections.abc import Awaitable, Callable, Collection, Iterable

from services.contracts.identity import NO_KEY_LIMITS, Identity, KeyLimits
from services.contracts.routing import EVERY_TENANT, RoutedPool, RoutedServer, RoutingTable
from services.kit.edge.keys import Resolve


def serves(table: RoutingTable, caller: Identity) -> dict[str, list[RoutedServer]]:
    """Return the ready servers of each model that a caller may use; a pool may have none now."""
    pools = {pool.name: pool for pool in table.pools if _may_use(pool, caller)}
    found: dict[str, list[RoutedServer]] = {model: [] for pool in pools.values() for model in pool.models}
    for server in table.servers:
        if server.pool is None:
            models: Collection[str] = server.models if _may_use(server, caller) else ()
        else:
            models = pools[server.pool].models if server.pool in pools else ()
        for model in models:
            found.setdefault(model, [])
            if server.state == "ready" and not server.keeps_no_class:
                found[model].append(server)
    return found


def limits_at(resolve: Resolve) -> Callable[[str], Awaitable[KeyLimits]]:
    """Return a function that asks what the key with an id may do; one that no longer works has no limits."""

    async def limits_of(key_id: str) -> KeyLimits:
        key = await resolve(key_id)
        return NO_KEY_LIMITS if key is None else key.key_limits

    return limits_of


def mean_intensity(servers: Iterable[RoutedServer]) -> float | None:
    """Return the mean of the places' intensities now, gCO2/kWh at the meter, PUE included; None if none is known."""
    known = {each.location: each.gco2_per_kwh * each.pue for each in servers if each.gco2_per_kwh is not None}
    return sum(known.values()) / len(known) if known else None


def _may_use(owned: RoutedPool | RoutedServer, caller: Identity) -> bool:
    return (
        caller.is_operator
        or owned.tenant_id == caller.tenant_id
        or caller.tenant_id in owned.tenants
        or EVERY_TENANT in owned.tenants
    )
