"""``/v1/fleets``, ``/v1/apps``, and what routers report about applications: HTTP only."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from services.contracts import apps as contracts
from services.contracts.queries import PageQuery
from services.contracts.schema import Name
from services.contracts.serving import InstanceQuery
from services.kit.identity import Caller, Operator
from services.kit.routes import from_state
from services.serving.fleets.observations import Observations
from services.serving.fleets.service import Apps, Fleets

router = APIRouter(tags=["apps"])


KnownFleets = Annotated[Fleets, from_state("fleets")]
KnownApps = Annotated[Apps, from_state("apps")]
Taking = Annotated[Observations, from_state("observations")]
FleetName = Annotated[Name, Path()]
AppName = Annotated[Name, Path()]
PlanId = Annotated[Name, Path()]


@router.get("/v1/fleets")
async def list_fleets(query: Annotated[PageQuery, Query()], caller: Caller, fleets: KnownFleets) -> contracts.FleetList:
    """List fleets by name."""
    return await fleets.page(query, caller)


@router.get("/v1/fleets/{fleet}")
async def get_fleet(fleet: FleetName, caller: Caller, fleets: KnownFleets) -> contracts.Fleet:
    """Get a fleet, its GPUs and its newest plan."""
    return await fleets.find(fleet, caller)


@router.put(
    "/v1/fleets/{fleet}",
    responses={
        201: {"description": "The fleet is new."},
        409: {"description": "The fleet is being deleted: `conflict`."},
    },
)
async def put_fleet(
    fleet: FleetName, spec: contracts.FleetSpec, caller: Operator, fleets: KnownFleets, response: Response
) -> contracts.Fleet:
    """Set GPUs aside for applications, or change how many."""
    found, is_new = await fleets.put(fleet, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/fleets/{fleet}"
    return found


@router.delete(
    "/v1/fleets/{fleet}", status_code=202, responses={409: {"description": "Applications use the fleet: `conflict`."}}
)
async def delete_fleet(fleet: FleetName, caller: Operator, fleets: KnownFleets) -> contracts.Fleet:
    """Delete a fleet.

    Its GPUs are made whole and given back.
    """
    return await fleets.delete(fleet, caller)


@router.get("/v1/fleets/{fleet}/plans")
async def list_fleet_plans(
    fleet: FleetName, query: Annotated[PageQuery, Query()], caller: Caller, fleets: KnownFleets
) -> contracts.FleetPlanList:
    """List a fleet's plans, newest first."""
    return await fleets.plans(fleet, query, caller)


@router.post(
    "/v1/fleets/{fleet}/plans/{plan_id}/apply",
    responses={
        409: {
            "description": "The plan is no proposal: `invalid_transition`; or outdated, "
            "or cannot be applied: `conflict`."
        }
    },
)
async def apply_fleet_plan(
    fleet: FleetName, plan_id: PlanId, caller: Operator, fleets: KnownFleets
) -> contracts.FleetPlan:
    """Carry out a proposed plan."""
    return await fleets.apply(fleet, plan_id, caller)


@router.get("/v1/apps")
async def list_apps(query: Annotated[PageQuery, Query()], caller: Caller, apps: KnownApps) -> contracts.AppList:
    """List applications by name."""
    return await apps.page(query, caller)


@router.get("/v1/apps/{app}")
async def get_app(app: AppName, caller: Caller, apps: KnownApps) -> contracts.App:
    """Get an application, its running instances and its newest plan."""
    return await apps.find(app, caller)


@router.put(
    "/v1/apps/{app}",
    responses={
        201: {"description": "The application is new."},
        409: {
            "description": "It is being deleted, is on another fleet, or the fleet has no GPU left for it: `conflict`."
        },
    },
)
async def put_app(
    app: AppName, spec: contracts.AppSpec, caller: Caller, apps: KnownApps, response: Response
) -> contracts.App:
    """Create an application or replace its spec."""
    found, is_new = await apps.put(app, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/apps/{app}"
    return found


@router.delete("/v1/apps/{app}", status_code=202)
async def delete_app(app: AppName, caller: Caller, apps: KnownApps) -> contracts.App:
    """Delete an application.

    Its instances are drained first; the application is removed when the last one has ended.
    """
    return await apps.delete(app, caller)


@router.get("/v1/apps/{app}/instances")
async def list_app_instances(
    app: AppName, query: Annotated[InstanceQuery, Query()], caller: Caller, apps: KnownApps
) -> contracts.AppInstanceList:
    """List an application's instances, newest first."""
    return await apps.instances(app, query, caller)


@router.get("/v1/apps/{app}/report")
async def get_app_report(
    app: AppName, query: Annotated[contracts.AppReportQuery, Query()], caller: Caller, apps: KnownApps
) -> contracts.AppReport:
    """Report an application's variants, accuracy, latency and emissions.

    For comparison it includes BASE: the most accurate variant on whole GPUs, modelled from its profile.
    """
    return await apps.report(app, query, caller)


@router.post("/internal/apps/observations", status_code=204)
async def take_observations(report: contracts.AppObservations, observations: Taking) -> None:
    """Record what a router saw of applications' requests in one window."""
    await observations.report(report)
