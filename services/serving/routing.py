"""What routers need to know: the pools that serve models, their servers, and registered endpoints."""

import asyncio
import ipaddress
import time
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from services.contracts import routing
from services.contracts.apps import FleetSpec
from services.contracts.carbon import CurrentIntensity
from services.contracts.clocks import ClockPolicy, ServerClocks
from services.contracts.codes import ProblemCode
from services.contracts.identity import Identity
from services.contracts.pools import ClassTerms
from services.contracts.routing import UpstreamKey, UpstreamKeys
from services.contracts.serving import InstanceState, PoolSpec, ServerMode
from services.core.domain.serving import LatencyLimits
from services.db.sealing import Sealer, SealError, open_instance_key
from services.kit.logging import Log
from services.kit.networks import is_within, read_networks
from services.kit.problems import ProblemError, conflict, invalid
from services.kit.readable import readable
from services.serving.carbon import CarbonZones, Intensities
from services.serving.fleets.problem import idle_w_of
from services.serving.instances import read_terms
from services.serving.named import Listed
from services.serving.repository import Queries, ServingRepository
from services.serving.repository.apps import AppRecord
from services.serving.repository.fleets import variant_and_slice
from services.serving.repository.routing import PoolRow, ServerRow
from services.serving.repository.specs import SpecRows
from services.serving.settings import ServingSettings

log = Log(__name__)

TABLE_AGE_S = 0.2  #: Routers that ask at the same moment get the same table
HELD_AGE_S = 5.0  #: How long a router's word counts about what it holds

_id, _name = attrgetter("id"), attrgetter("name")


class Routing:
    """Makes the routers' table, and remembers how many requests they hold at draining servers."""

    def __init__(self, repository: ServingRepository, intensities: Intensities, settings: ServingSettings) -> None:
        self._repository, self._intensities, self._settings = repository, intensities, settings
        self._made: tuple[float, routing.RoutingTable] | None = None
        self._making = asyncio.Lock()
        self.zones: dict[str, tuple[str, str | None]] = {}
        """Zone and signal of each model server of the last table, by its id; those without a zone are left out."""
        self._held: dict[tuple[str, str], tuple[int, float]] = {}

    async def table(self) -> routing.RoutingTable:
        """Return the table as it is now."""
        async with self._making:
            if self._made is None or time.monotonic() > self._made[0] + TABLE_AGE_S:
                self._made = (time.monotonic(), await self._make())
            return self._made[1]

    def forget(self) -> None:
        """Have the next table made afresh, however recent the last one is."""
        self._made = None

    def hold(self, report: routing.HeldRequests) -> None:
        """Remember how many requests a router holds."""
        now_s = time.monotonic()
        self._held = {key: each for key, each in self._held.items() if each[1] > now_s - HELD_AGE_S}
        for server, count in report.held.items():
            self._held[report.router, server] = (count, now_s)

    def held(self, server: str) -> int:
        """Return how many requests routers recently said they hold at a server."""
        oldest_s = time.monotonic() - HELD_AGE_S
        return sum(count for (_, each), (count, at_s) in self._held.items() if each == server and at_s > oldest_s)

    async def _make(self) -> routing.RoutingTable:
        async with self._repository.reading() as queries:
            now = await queries.now()
            pools = await queries.routing.pools()
            rows = await queries.routing.servers(self._settings.routing_power_s)
            endpoints = await queries.endpoints.all()
            has_secrets = any(each.spec.upstream_secret for each in endpoints)
            keys = {row.of: row.set_at for row in await queries.routing.keys()} if has_secrets else {}
            apps = {app.key: app for app in await queries.apps.routed()}
            fleets = {fleet.name: fleet.spec for fleet in await queries.fleets.all()} if apps else {}
        specs = dict(readable(pools, lambda row: (row.name, PoolSpec.as_stored(row.spec)), "pool", _name))
        of_apps = [row for row in rows if row.pool in apps and apps[row.pool].fleet in fleets]
        rows = [row for row in rows if row.pool in specs]
        places = {(name, place.name): place for name, spec in specs.items() for place in spec.places}
        signals = {at: place.grid[1] for at, place in places.items()}
        zones = {row.id: (row.zone, signals.get((row.pool, row.place))) for row in rows if row.zone}
        pods = ((row.id, places.get((row.pool, row.place))) for row in rows)  # of which no node tells the zone
        zones |= {pod: place.grid for pod, place in pods if place is not None and place.cluster}
        zones |= {server_id(each.name): (each.spec.zone, None) for each in endpoints if each.spec.zone}
        known = await self._intensities.of({*zones.values(), *(fleet.grid for fleet in fleets.values())})
        self.zones = zones
        pue = self._settings.pue  # the ledger's, and what it has of an instance may be of before a change

        def intensity(server: str) -> CurrentIntensity | None:
            return known.get(zones[server]) if server in zones else None

        def server(row: ServerRow) -> routing.RoutedServer:
            return _server(row, specs[row.pool], intensity(row.id), pue)

        def foreign(each: routing.Endpoint) -> routing.RoutedServer:
            return _foreign(each, keys.get(each.name), intensity(server_id(each.name)), pue)

        def app_server(row: ServerRow) -> routing.RoutedAppServer:
            fleet = fleets[apps[row.pool].fleet]
            return _app_server(row, apps[row.pool], fleet, known.get(fleet.grid), pue)

        return routing.RoutingTable(
            made_at=now,
            pools=[_pool(row, specs[row.name]) for row in pools if row.name in specs],
            servers=[*readable(rows, server, "instance", _id), *readable(endpoints, foreign, "endpoint", _name)],
            apps=[_app(app) for app in apps.values()],
            app_servers=readable(of_apps, app_server, "instance", _id),
        )


def _pool(row: PoolRow, spec: PoolSpec) -> routing.RoutedPool:
    part = next((part for part in spec.partitions if part.name == row.partition), None)
    return routing.RoutedPool.of(
        spec,
        name=row.name,
        tenant_id=row.tenant_id,
        partition=part and part.name,
        starting=row.starting,
        input_tokens=part.thresholds.input_tokens if part and part.thresholds else None,
        output_tokens=part.thresholds.output_tokens if part and part.thresholds else None,
        classes=[routing.RoutedClass.of(each) for each in (part.classes if part else ())],
    )


def _app(app: AppRecord) -> routing.RoutedApp:
    best = app.spec.most_accurate.name
    return routing.RoutedApp.of(app.spec, name=app.name, tenant_id=app.tenant_id, most_accurate=best)


def _app_server(
    row: ServerRow, app: AppRecord, fleet: FleetSpec, intensity: CurrentIntensity | None, pue: float
) -> routing.RoutedAppServer:
    """Return an instance; less is known of one whose variant or profile is gone from the spec."""
    name, size = variant_and_slice(row.mode)
    variant = next((each for each in app.spec.variants if each.name == name), None)
    profile = next((each for each in variant.profiles if each.slice == size), None) if variant else None
    idle_w = idle_w_of(fleet)
    return routing.RoutedAppServer(
        app=app.name,
        variant=name,
        accuracy_pct=variant.accuracy_pct if variant else 0.0,
        slice=size,
        service_ms=profile and profile.service_ms,
        busy_w=profile and profile.busy_w,
        idle_w=None if idle_w is None else idle_w * int(size[0]) / 7,
        **_of_any(row, intensity, pue),
    )


def _of_any(row: ServerRow, intensity: CurrentIntensity | None, pue: float) -> dict[str, Any]:
    """Return what routers need to know of any instance."""
    return {
        "id": row.id,
        "url": row.url,
        "location": row.place,
        "state": "ready" if row.state == InstanceState.READY else "draining",
        "job_id": row.job_id,
        "node_id": row.node_id,
        "gco2_per_kwh": intensity.point.gco2_per_kwh if intensity else row.intensity_gco2_per_kwh,
        "is_intensity_estimated": intensity.point.is_estimated if intensity else row.intensity_estimated is not False,
        "pue": row.pue or pue,
    }


def _server(row: ServerRow, spec: PoolSpec, intensity: CurrentIntensity | None, pue: float) -> routing.RoutedServer:
    terms, _ = read_terms(row.terms)
    mode = next((mode for mode in spec.modes if mode.name == row.mode), terms.mode)
    terms_of_class = _class(spec, row)
    profiles = terms_of_class.profiles if terms_of_class else ()
    profile = next((each for each in profiles if each.mode == row.mode), None)
    return routing.RoutedServer.of(
        profile,
        **_of_any(row, intensity, pue),
        pool=row.pool,
        tenant_id=row.tenant_id,
        request_class=row.request_class,
        keeps_no_class=row.partition is not None and row.request_class is None,
        weight=profile.max_qps if profile and profile.max_qps else 1,
        capacity=mode.max_requests,
        upstream_secret_set_at=row.key_set_at,
        gpus=mode.gpus,
        power_w=row.power_w if row.power_w is not None else profile and profile.power_w,
        idle_w=mode.idle_w,
        accuracy_pct=mode.accuracy_pct,
        is_power_measured=row.power_w is not None,
        full_power_w=profile and profile.power_w,
        clocks=_clocks(spec, terms_of_class, mode),
        load_path=terms.probes.load_path,
    )


def _clocks(spec: PoolSpec, terms: ClassTerms | None, mode: ServerMode) -> ServerClocks | None:
    """Return how a server's clocks follow latency; one without a class has no limits to keep."""
    if spec.clocks.policy is ClockPolicy.DEFAULT:
        return None
    limits = terms.latency_limits() if terms else LatencyLimits()
    return ServerClocks(
        **spec.clocks.model_dump(),
        max_ttft_ms=None if limits.ttft_s is None else 1e3 * limits.ttft_s,
        max_tbt_ms=None if limits.tbt_s is None else 1e3 * limits.tbt_s,
        max_e2e_s=limits.e2e_s,
        capacity=mode.max_requests,
        idle_w=mode.idle_w or 0.0,
    )


def _class(spec: PoolSpec, row: ServerRow) -> ClassTerms | None:
    """Return the class that an instance serves; None if it serves none, or one that is gone from the spec."""
    classes = (each for part in spec.partitions if part.name == row.partition for each in part.classes)
    return next((each for each in classes if each.name == row.request_class), None)


def server_id(endpoint: str) -> str:
    """Return a registered endpoint's id in the routers' table."""
    return f"endpoint:{endpoint}"


def _foreign(
    each: routing.Endpoint, secret_set_at: datetime | None, intensity: CurrentIntensity | None, pue: float
) -> routing.RoutedServer:
    return routing.RoutedServer.of(
        each.spec,
        id=server_id(each.name),
        tenant_id=each.tenant_id,
        state="draining" if each.spec.draining else "ready",
        upstream_secret_set_at=secret_set_at,
        load_path="/metrics",
        gco2_per_kwh=intensity.point.gco2_per_kwh if intensity else None,
        is_intensity_estimated=intensity is None or intensity.point.is_estimated,
        pue=pue,
    )


class Endpoints(Listed[routing.Endpoint, routing.Endpoint]):
    """What operators may do with registered endpoints; users see their tenant's."""

    def __init__(self, repository: ServingRepository, settings: ServingSettings, zones: CarbonZones) -> None:
        super().__init__(repository)
        self._networks = read_networks(settings.endpoint_networks)
        self._zones = zones

    def _rows(self, queries: Queries) -> SpecRows[routing.Endpoint]:
        return queries.endpoints

    async def _show(
        self, queries: Queries, records: Sequence[routing.Endpoint], caller: Identity
    ) -> list[routing.Endpoint]:
        return [*records]

    async def put(self, name: str, spec: routing.EndpointSpec, caller: Identity) -> tuple[routing.Endpoint, bool]:
        """Register an endpoint or replace its spec; return it, and whether it is new.

        Raises:
            ProblemError: 422 for an address that is not allowed, an unknown zone or a secret that does not exist;
                403 if another tenant's endpoint would be sent a secret of that tenant.
        """
        self._check_address(spec)
        await self._zones.check({} if spec.zone is None else {"": (spec.zone, None)})
        async with self._repository.writing() as queries:
            is_new = await queries.endpoints.add(name, spec, caller)
            before = await queries.endpoints.known(name, lock="update")
            if before is None:
                raise conflict(f"Endpoint {name} was removed meanwhile; try again.")
            if spec.upstream_secret is not None and (is_new or before.spec != spec):
                if before.tenant_id != caller.tenant_id:  # a changed address must not be sent what the tenant keeps
                    detail = f"Only an operator of the tenant {before.tenant_id} may have its secrets sent."
                    raise ProblemError(403, ProblemCode.FORBIDDEN, detail)
                if not await queries.routing.has_secret(before.tenant_id, spec.upstream_secret):
                    missing = f"Tenant {before.tenant_id} has no secret {spec.upstream_secret} for all its projects"
                    detail = f"{missing}; set it with `wattshift secrets set {spec.upstream_secret}`."
                    raise invalid("/upstream_secret", detail)
            if is_new:
                await queries.audit(caller, "endpoint.registered", name, url=spec.url)
                return before, True
            if before.spec != spec:
                await queries.endpoints.set_spec(name, spec)
                await queries.audit(caller, "endpoint.changed", name, url=spec.url)
            return await queries.endpoints.find(name), False

    async def remove(self, name: str, caller: Identity) -> routing.Endpoint:
        """Deregister an endpoint; requests that it holds are finished; ``ProblemError``: 404 if there is none."""
        async with self._repository.writing() as queries:
            found = await queries.endpoints.find(name, lock="update")
            await queries.endpoints.remove(name)
            await queries.audit(caller, "endpoint.removed", name)
            return found

    def _check_address(self, spec: routing.EndpointSpec) -> None:
        """Refuse early what the router would refuse to connect to; it checks again after resolving a name."""
        try:
            parts = urlsplit(spec.url)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise invalid("/url", "Its port must be a number up to 65535.") from None
        if port == 0:
            raise invalid("/url", "Its port must not be 0.")
        if not self._networks:
            detail = "WATTSHIFT_ENDPOINT_NETWORKS names no network, so that no endpoint can be registered."
            raise invalid("/url", detail)
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return  # a name: what it resolves to is checked at each connection
        if not is_within(host, self._networks):
            raise invalid("/url", f"{host} lies in none of the networks of WATTSHIFT_ENDPOINT_NETWORKS.")


async def open_upstream_keys(repository: ServingRepository, sealer: Sealer) -> UpstreamKeys:
    """Return the keys that can be opened, and why the others cannot be had."""
    async with repository.reading() as queries:
        rows = [*await queries.routing.keys(), *await queries.routing.instance_keys()]
    opened: list[UpstreamKey] = []
    missing: dict[str, str] = {}
    for row in rows:
        server = row.of if row.secret is None else server_id(row.of)
        try:
            if row.secret is None:
                value = open_instance_key(sealer, row.sealed, row.tenant_id, row.of)
            else:
                value = sealer.open(row.sealed, row.tenant_id, "", row.secret)
            opened.append(UpstreamKey(server=server, set_at=row.set_at, value=value))
        except SealError:
            log.error("upstream_key.not_opened", server=server, secret=row.secret, tenant=row.tenant_id)
            if row.secret is not None:
                why = f"The secret {row.secret} was sealed with a key that serving does not have; set it again."
                missing[server] = why
    return UpstreamKeys(keys=opened, missing=missing)
