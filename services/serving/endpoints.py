"""What serving answers over HTTP: pools, fleets and applications, registered endpoints, and what routers ask."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Response

from services.contracts import apps as app_messages
from services.contracts import serving
from services.contracts.clusters import ClusterOrders, ClusterReport
from services.contracts.queries import PageQuery
from services.contracts.routing import Endpoint, EndpointList, EndpointSpec, HeldRequests, RoutingTable, UpstreamKeys
from services.contracts.schema import Name
from services.db.sealing import Sealer
from services.kit.identity import Caller, Operator
from services.kit.routes import LARGE_BODY, from_state
from services.serving.clusters import Clusters
from services.serving.fleets.observations import observe
from services.serving.fleets.service import Apps, Fleets
from services.serving.repository import ServingRepository
from services.serving.routing import Endpoints, Routing, open_upstream_keys
from services.serving.service import Pools, etag
from services.serving.traffic import TrafficReports

router = APIRouter(prefix="/v1/pools", tags=["pools"])

BEING_DELETED: dict[int | str, dict[str, Any]] = {409: {"description": "The pool is being deleted: `conflict`."}}


Known = Annotated[Pools, from_state("pools")]
Traffic = Annotated[TrafficReports, from_state("traffic")]
InPath = Annotated[Name, Path()]
Paged = Annotated[PageQuery, Query()]
Instances = Annotated[serving.InstanceQuery, Query()]
Repository = Annotated[ServingRepository, from_state("repository")]
IfMatch = Annotated[str | None, Header(max_length=200, description="The `ETag` that the pool must still have.")]


@router.get("")
async def list_pools(query: Paged, caller: Caller, pools: Known) -> serving.PoolList:
    """List pools by name."""
    return await pools.page(query, caller, serving.PoolList)


@router.get("/{pool}")
async def get_pool(pool: InPath, caller: Caller, pools: Known, response: Response) -> serving.Pool:
    """Get a pool."""
    return _tagged(await pools.find(pool, caller), response)


@router.put(
    "/{pool}",
    responses={
        201: {"description": "The pool is new."},
        409: {"description": "The pool is being deleted: `conflict`."},
        412: {"description": "The pool's `ETag` is not the one in `If-Match`: `conflict`."},
    },
    openapi_extra=LARGE_BODY,
)
async def set_pool(
    pool: InPath, spec: serving.PoolSpec, caller: Operator, pools: Known, response: Response, if_match: IfMatch = None
) -> serving.Pool:
    """Create a pool or replace its spec."""
    found, is_new = await pools.put(pool, spec, caller, if_match)
    _say_if_new(response, f"/v1/pools/{pool}" if is_new else None)
    return _tagged(found, response)


@router.patch("/{pool}", responses=BEING_DELETED)
async def change_pool(
    pool: InPath, change: serving.PoolChange, caller: Operator, pools: Known, response: Response
) -> serving.Pool:
    """Choose whether a pool's plans are carried out or only proposed."""
    return _tagged(await pools.set_mode(pool, change.mode, caller), response)


@router.delete("/{pool}", status_code=202)
async def delete_pool(pool: InPath, caller: Operator, pools: Known) -> serving.Pool:
    """Delete a pool.

    Its instances are drained first; the pool is removed when the last one has ended.
    """
    return await pools.delete(pool, caller)


@router.get("/{pool}/plans")
async def list_pool_plans(
    pool: InPath, query: Annotated[serving.PoolPlanQuery, Query()], caller: Caller, pools: Known
) -> serving.PoolPlanList:
    """List a pool's plans, newest first."""
    return await pools.plans(pool, query, caller)


@router.post("/{pool}/plans", status_code=202, responses=BEING_DELETED)
async def plan_pool(pool: InPath, caller: Operator, pools: Known, response: Response) -> serving.PoolPlanSummary:
    """Plan a pool now.

    While a plan is being made, that plan is returned and no other is started.
    """
    plan = await pools.plan_now(pool, caller)
    response.headers["Location"] = f"/v1/pools/{pool}/plans/{plan.id}"
    return plan


@router.get("/{pool}/plans/{plan_id}")
async def get_pool_plan(pool: InPath, plan_id: InPath, caller: Caller, pools: Known) -> serving.PoolPlanDetail:
    """Get a plan."""
    return await pools.plan(pool, plan_id, caller)


@router.post(
    "/{pool}/plans/{plan_id}/apply",
    responses={
        409: {"description": "The plan is not a proposal: `invalid_transition`; or it is outdated: `conflict`."}
    },
)
async def apply_pool_plan(pool: InPath, plan_id: InPath, caller: Operator, pools: Known) -> serving.PoolPlanSummary:
    """Apply a proposed plan."""
    return await pools.accept(pool, plan_id, caller)


@router.get("/{pool}/instances")
async def list_pool_instances(pool: InPath, query: Instances, caller: Caller, pools: Known) -> serving.InstanceList:
    """List a pool's instances, newest first."""
    return await pools.instances(pool, query, caller)


@router.get("/{pool}/clocks")
async def list_pool_clocks(
    pool: InPath, query: Annotated[serving.ClockHistoryQuery, Query()], caller: Caller, pools: Known
) -> serving.ClockHistory:
    """List the clocks of a pool's instances, minute by minute, newest first."""
    return await pools.clocks(pool, query, caller)


@router.post("/{pool}/traffic", openapi_extra=LARGE_BODY)
async def report_pool_traffic(
    pool: InPath, report: serving.TrafficReport, caller: Caller, traffic: Traffic
) -> serving.TrafficReceipt:
    """Report the requests that arrived.

    A window that was reported before is replaced.
    """
    return await traffic.report(pool, report, caller)


def _tagged(pool: serving.Pool, response: Response) -> serving.Pool:
    response.headers["ETag"] = etag(pool)
    return pool


apps_router = APIRouter(tags=["apps"])


KnownFleets = Annotated[Fleets, from_state("fleets")]
KnownApps = Annotated[Apps, from_state("apps")]


@apps_router.get("/v1/fleets")
async def list_fleets(query: Paged, caller: Caller, fleets: KnownFleets) -> app_messages.FleetList:
    """List fleets by name."""
    return await fleets.page(query, caller, app_messages.FleetList)


@apps_router.get("/v1/fleets/{fleet}")
async def get_fleet(fleet: InPath, caller: Caller, fleets: KnownFleets) -> app_messages.Fleet:
    """Get a fleet, its GPUs and its newest plan."""
    return await fleets.find(fleet, caller)


@apps_router.put(
    "/v1/fleets/{fleet}",
    responses={
        201: {"description": "The fleet is new."},
        409: {"description": "The fleet is being deleted: `conflict`."},
    },
)
async def put_fleet(
    fleet: InPath, spec: app_messages.FleetSpec, caller: Operator, fleets: KnownFleets, response: Response
) -> app_messages.Fleet:
    """Set GPUs aside for applications, or change how many."""
    found, is_new = await fleets.put(fleet, spec, caller)
    _say_if_new(response, f"/v1/fleets/{fleet}" if is_new else None)
    return found


@apps_router.delete(
    "/v1/fleets/{fleet}", status_code=202, responses={409: {"description": "Applications use the fleet: `conflict`."}}
)
async def delete_fleet(fleet: InPath, caller: Operator, fleets: KnownFleets) -> app_messages.Fleet:
    """Delete a fleet.

    Its GPUs are made whole and given back.
    """
    return await fleets.delete(fleet, caller)


@apps_router.get("/v1/fleets/{fleet}/plans")
async def list_fleet_plans(
    fleet: InPath, query: Paged, caller: Caller, fleets: KnownFleets
) -> app_messages.FleetPlanList:
    """List a fleet's plans, newest first."""
    return await fleets.plans(fleet, query, caller)


@apps_router.post(
    "/v1/fleets/{fleet}/plans/{plan_id}/apply",
    responses={
        409: {
            "description": "The plan is no proposal: `invalid_transition`; or outdated, "
            "or cannot be applied: `conflict`."
        }
    },
)
async def apply_fleet_plan(
    fleet: InPath, plan_id: InPath, caller: Operator, fleets: KnownFleets
) -> app_messages.FleetPlan:
    """Carry out a proposed plan."""
    return await fleets.apply(fleet, plan_id, caller)


@apps_router.get("/v1/apps")
async def list_apps(query: Paged, caller: Caller, apps: KnownApps) -> app_messages.AppList:
    """List applications by name."""
    return await apps.page(query, caller, app_messages.AppList)


@apps_router.get("/v1/apps/{app}")
async def get_app(app: InPath, caller: Caller, apps: KnownApps) -> app_messages.App:
    """Get an application, its running instances and its newest plan."""
    return await apps.find(app, caller)


@apps_router.put(
    "/v1/apps/{app}",
    responses={
        201: {"description": "The application is new."},
        409: {
            "description": "It is being deleted, is on another fleet, or the fleet has no GPU left for it: `conflict`."
        },
    },
)
async def put_app(
    app: InPath, spec: app_messages.AppSpec, caller: Caller, apps: KnownApps, response: Response
) -> app_messages.App:
    """Create an application or replace its spec."""
    found, is_new = await apps.put(app, spec, caller)
    _say_if_new(response, f"/v1/apps/{app}" if is_new else None)
    return found


@apps_router.delete("/v1/apps/{app}", status_code=202)
async def delete_app(app: InPath, caller: Caller, apps: KnownApps) -> app_messages.App:
    """Delete an application.

    Its instances are drained first; the application is removed when the last one has ended.
    """
    return await apps.delete(app, caller)


@apps_router.get("/v1/apps/{app}/instances")
async def list_app_instances(
    app: InPath, query: Instances, caller: Caller, apps: KnownApps
) -> app_messages.AppInstanceList:
    """List an application's instances, newest first."""
    return await apps.instances(app, query, caller)


@apps_router.get("/v1/apps/{app}/report")
async def get_app_report(
    app: InPath, query: Annotated[app_messages.AppReportQuery, Query()], caller: Caller, apps: KnownApps
) -> app_messages.AppReport:
    """Report an application's variants, accuracy, latency and emissions.

    For comparison it includes BASE: the most accurate variant on whole GPUs, modelled from its profile.
    """
    return await apps.report(app, query, caller)


@apps_router.post("/internal/apps/observations", status_code=204)
async def take_observations(report: app_messages.AppObservations, repository: Repository) -> None:
    """Record what a router saw of applications' requests in one window."""
    await observe(repository, report)


endpoints_router = APIRouter(tags=["endpoints"])


Registered = Annotated[Endpoints, from_state("endpoints")]
Table = Annotated[Routing, from_state("routing")]


@endpoints_router.get("/v1/endpoints")
async def list_endpoints(query: Paged, caller: Caller, endpoints: Registered) -> EndpointList:
    """List registered model servers by name."""
    return await endpoints.page(query, caller, EndpointList)


@endpoints_router.get("/v1/endpoints/{endpoint}")
async def get_endpoint(endpoint: InPath, caller: Caller, endpoints: Registered) -> Endpoint:
    """Get a registered model server."""
    return await endpoints.find(endpoint, caller)


@endpoints_router.put("/v1/endpoints/{endpoint}", responses={201: {"description": "The endpoint is new."}})
async def put_endpoint(
    endpoint: InPath, spec: EndpointSpec, caller: Operator, endpoints: Registered, response: Response
) -> Endpoint:
    """Register a model server, or replace its spec.

    Its address must lie within the networks of `WATTSHIFT_ENDPOINT_NETWORKS`.
    """
    found, is_new = await endpoints.put(endpoint, spec, caller)
    _say_if_new(response, f"/v1/endpoints/{endpoint}" if is_new else None)
    return found


@endpoints_router.delete("/v1/endpoints/{endpoint}")
async def delete_endpoint(endpoint: InPath, caller: Operator, endpoints: Registered) -> Endpoint:
    """Deregister a model server.

    Requests that it holds are finished.
    """
    return await endpoints.remove(endpoint, caller)


@endpoints_router.post("/v1/clusters/{cluster}/workloads", openapi_extra=LARGE_BODY)
async def report_workloads(
    cluster: InPath, report: ClusterReport, caller: Operator, clusters: Annotated[Clusters, from_state("clusters")]
) -> ClusterOrders:
    """Report the workloads of a Kubernetes cluster that pools may scale, and read what they are to be.

    The cluster's own process does so, again and again.
    """
    return await clusters.report(cluster, report, caller)


@endpoints_router.get("/internal/routing", response_model_exclude_defaults=True)  # so that older routers can read it
async def read_table(routing: Table) -> RoutingTable:
    """Read the pools that serve models, and all servers."""
    return await routing.table()


@endpoints_router.get("/internal/routing/keys")
async def read_keys(repository: Repository, sealer: Annotated[Sealer, from_state("sealer")]) -> UpstreamKeys:
    """Read the API keys of endpoints whose keys are secrets."""
    return await open_upstream_keys(repository, sealer)


@endpoints_router.post("/internal/routing/held", status_code=204)
async def report_held(report: HeldRequests, routing: Table) -> None:
    """Record how many requests a router holds at draining servers."""
    routing.hold(report)


def _say_if_new(response: Response, location: str | None) -> None:
    """State where something that was put can be found, if it is new."""
    if location is not None:
        response.status_code = 201
        response.headers["Location"] = location
