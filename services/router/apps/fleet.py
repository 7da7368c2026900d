"""The applications and instances that the router knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.contracts.identity import Identity
from services.contracts.routing import EVERY_TENANT, RoutedApp, RoutedAppServer, RoutingTable
from services.core.domain.units import J_PER_KWH
from services.kit.edge.exchange import Header
from services.router.shares import SharedTime
from services.router.streams import Footprint
from services.router.upstream import Origin


class Instance(SharedTime):
    """An instance of an application: one variant on one GPU or slice.

    Attributes:
        spec: Its row of the routing table.
        headers: What every answer says of it.
        was_key_asked_for: Whether its key, if it has one, was fetched since it came into the table.
    """

    __slots__ = ("headers", "id", "origin", "spec", "was_key_asked_for")

    def __init__(self, spec: RoutedAppServer) -> None:
        super().__init__()
        self.id = spec.id
        self.origin = Origin(spec.url, None)
        self.was_key_asked_for = False
        self.update(spec)

    def update(self, spec: RoutedAppServer) -> None:
        """Take a newer row."""
        if spec.url != self.origin.url:
            self.origin.close()
            self.origin = Origin(spec.url, None)
        self.spec = spec
        self.headers: list[Header] = [
            (b"x-wattshift-variant", spec.variant.encode()),
            (b"x-wattshift-accuracy", b"%g" % spec.accuracy_pct),
            (b"x-wattshift-location", spec.location.encode()),
        ]

    def footprint(self, share_s: float) -> Footprint:
        """Return the energy and emissions of a request that had so many seconds of the instance.

        Its energy is that of the instance at work in that time: what its GPU draws above idle while the instance works,
        by the profile, and the instance's share of the GPU's idle power. Idle time between requests is no request's.
        """
        spec = self.spec
        energy_j = None if spec.busy_w is None or spec.idle_w is None else (spec.busy_w + spec.idle_w) * share_s
        carbon_gco2 = None
        if energy_j is not None and spec.gco2_per_kwh is not None:
            carbon_gco2 = energy_j / J_PER_KWH * spec.pue * spec.gco2_per_kwh
        return Footprint(energy_j, carbon_gco2, spec.location)


class AppFleet:
    """The newest table's applications, and their instances, whose state survives newer tables.

    Attributes:
        apps: By name.
        instances: By id.
        is_known: Whether a table was read.
    """

    def __init__(self) -> None:
        self.apps: dict[str, RoutedApp] = {}
        self.instances: dict[str, Instance] = {}
        self.is_known = False
        self._leaving: dict[str, Instance] = {}

    def adopt(self, table: RoutingTable) -> None:
        """Take a table; instances that are gone from it finish the requests that they hold."""
        self.is_known = True
        self.apps = {app.name: app for app in table.apps}
        found: dict[str, Instance] = {}
        for spec in table.app_servers:
            instance = self.instances.pop(spec.id, None) or self._leaving.pop(spec.id, None)
            if instance is None:
                instance = Instance(spec)
            else:
                instance.update(spec)
            found[spec.id] = instance
        self._leaving |= self.instances
        for instance in self._leaving.values():
            instance.origin.close()
        self._leaving = {name: each for name, each in self._leaving.items() if each.held}
        self.instances = found

    def app_of(self, name: str, caller: Identity) -> RoutedApp | None:
        """Return an application that a caller may use; None where there is none."""
        app = self.apps.get(name)
        if app is None or not (caller.is_operator or app.tenant_id == caller.tenant_id or _is_shared(app, caller)):
            return None
        return app

    def instance(self, name: str) -> Instance | None:
        """Return an instance by its id; None where this process does not know it."""
        return self.instances.get(name) or self._leaving.get(name)

    def add(self, spec: RoutedAppServer) -> None:
        """Take an instance that another process found in a newer table."""
        if self.instance(spec.id) is None:
            self._leaving[spec.id] = Instance(spec)

    def share(self, held_elsewhere: Mapping[str, int]) -> None:
        """Take in what other router processes hold at instances that work on several requests at once."""
        for instance in self.instances.values():
            app = self.apps.get(instance.spec.app)
            if app is not None and app.concurrency > 1:
                instance.held_elsewhere = held_elsewhere.get(instance.id, 0)

    def draining(self) -> dict[str, int]:
        """Return how many requests this process holds at instances that drain, or that left the table."""
        held = {name: each.held for name, each in self.instances.items() if each.spec.state == "draining"}
        return held | {name: each.held for name, each in self._leaving.items()}

    def every_instance(self) -> Iterable[Instance]:
        """Return all instances, those included that are gone from the table and still hold requests."""
        return [*self.instances.values(), *self._leaving.values()]

    def ready(self, app: str) -> list[Instance]:
        """Return the instances of an application that are ready."""
        return [each for each in self.instances.values() if each.spec.app == app and each.spec.state == "ready"]

    def ready_by_variant(self) -> dict[tuple[str, ...], float]:
        """Return how many instances of each application and variant are ready."""
        found: dict[tuple[str, ...], float] = {}
        for each in self.instances.values():
            if each.spec.state == "ready":
                key = (each.spec.app, each.spec.variant)
                found[key] = found.get(key, 0.0) + 1
        return found


def _is_shared(app: RoutedApp, caller: Identity) -> bool:
    return EVERY_TENANT in app.tenants or caller.tenant_id in app.tenants
