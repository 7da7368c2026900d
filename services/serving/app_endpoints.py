"""``/v1/fleets``, ``/v1/apps``, and what routers report of applications: HTTP only."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from services.contracts.apps import (
    App,
    AppInstanceList,
    AppInstanceQuery,
    AppList,
    AppObservations,
    AppReport,
    AppReportQuery,
    AppSpec,
    Fleet,
    FleetList,
    FleetPlan,
    FleetPlanList,
    FleetSpec,
)
from services.contracts.problems import Problem
from services.contracts.queries import PageQuery
from services.contracts.schema import Name
from services.kit.background.http import NOT_FOUND, PROBLEMS
from services.kit.identity import Caller, Operator
from services.serving.fleets.observations import Observations
from services.serving.fleets.service import Apps, Fleets

router = APIRouter(responses=PROBLEMS)

IN_USE: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    409: {"model": Problem, "description": "`conflict`: applications use it, or it is being deleted."},
}
TAKEN: dict[int | str, dict[str, Any]] = {
    **NOT_FOUND,
    409: {"model": Problem, "description": "`conflict`: it is being deleted, or the fleet has no GPU left for it."},
}


async def _fleets(request: Request) -> Fleets:
    return request.app.state.fleets


async def _apps(request: Request) -> Apps:
    return request.app.state.apps


async def _observations(request: Request) -> Observations:
    return request.app.state.observations


KnownFleets = Annotated[Fleets, Depends(_fleets)]
KnownApps = Annotated[Apps, Depends(_apps)]
Taking = Annotated[Observations, Depends(_observations)]
FleetName = Annotated[Name, Path()]
AppName = Annotated[Name, Path()]
PlanId = Annotated[Name, Path()]


@router.get("/v1/fleets", tags=["apps"])
async def list_fleets(query: Annotated[PageQuery, Query()], caller: Caller, fleets: KnownFleets) -> FleetList:
    """List the fleets that the caller's applications may use, by name."""
    return await fleets.page(query, caller)


@router.get("/v1/fleets/{fleet}", tags=["apps"], responses=NOT_FOUND)
async def read_fleet(fleet: FleetName, caller: Caller, fleets: KnownFleets) -> Fleet:
    """Read a fleet: its spec, its GPUs as they are cut, and its newest plan."""
    return await fleets.find(fleet, caller)


@router.put(
    "/v1/fleets/{fleet}", tags=["apps"], responses={201: {"model": Fleet, "description": "It is new."}, **IN_USE}
)
async def put_fleet(
    fleet: FleetName, spec: FleetSpec, caller: Operator, fleets: KnownFleets, response: Response
) -> Fleet:
    """Set GPUs aside for applications, or change that; the same spec again changes nothing."""
    found, is_new = await fleets.put(fleet, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/fleets/{fleet}"
    return found


@router.delete("/v1/fleets/{fleet}", tags=["apps"], status_code=202, responses=IN_USE)
async def delete_fleet(fleet: FleetName, caller: Operator, fleets: KnownFleets) -> Fleet:
    """Make a fleet's GPUs whole and give them back. Its applications must be deleted first."""
    return await fleets.delete(fleet, caller)


@router.get("/v1/fleets/{fleet}/plans", tags=["apps"], responses=NOT_FOUND)
async def list_fleet_plans(
    fleet: FleetName, query: Annotated[PageQuery, Query()], caller: Caller, fleets: KnownFleets
) -> FleetPlanList:
    """List a fleet's plans, newest first."""
    return await fleets.plans(fleet, query, caller)


@router.post(
    "/v1/fleets/{fleet}/plans/{plan_id}/apply",
    tags=["apps"],
    responses={
        **NOT_FOUND,
        409: {
            "model": Problem,
            "description": "`invalid_transition`: it is no proposal; `conflict`: it is outdated, or cannot be applied.",
        },
    },
)
async def apply_fleet_plan(fleet: FleetName, plan_id: PlanId, caller: Operator, fleets: KnownFleets) -> FleetPlan:
    """Carry a proposed plan out."""
    return await fleets.apply(fleet, plan_id, caller)


@router.get("/v1/apps", tags=["apps"])
async def list_apps(query: Annotated[PageQuery, Query()], caller: Caller, apps: KnownApps) -> AppList:
    """List the applications of the caller's tenant by name; operators see all."""
    return await apps.page(query, caller)


@router.get("/v1/apps/{app}", tags=["apps"], responses=NOT_FOUND)
async def read_app(app: AppName, caller: Caller, apps: KnownApps) -> App:
    """Read an application: its spec, what runs, the fleet's newest plan, and the requests of the last minute."""
    return await apps.find(app, caller)


@router.put("/v1/apps/{app}", tags=["apps"], responses={201: {"model": App, "description": "It is new."}, **TAKEN})
async def put_app(app: AppName, spec: AppSpec, caller: Caller, apps: KnownApps, response: Response) -> App:
    """Create an application, or replace its spec; the same spec again changes nothing."""
    found, is_new = await apps.put(app, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/apps/{app}"
    return found


@router.delete("/v1/apps/{app}", tags=["apps"], status_code=202, responses=NOT_FOUND)
async def delete_app(app: AppName, caller: Caller, apps: KnownApps) -> App:
    """Drain an application's instances. When the last has ended, it is deleted with what was seen of its requests."""
    return await apps.delete(app, caller)


@router.get("/v1/apps/{app}/instances", tags=["apps"], responses=NOT_FOUND)
async def list_app_instances(
    app: AppName, query: Annotated[AppInstanceQuery, Query()], caller: Caller, apps: KnownApps
) -> AppInstanceList:
    """List an application's instances, newest first; ended ones only on request."""
    return await apps.instances(app, query, caller)


@router.get("/v1/apps/{app}/report", tags=["apps"], responses=NOT_FOUND)
async def report_app(
    app: AppName, query: Annotated[AppReportQuery, Query()], caller: Caller, apps: KnownApps
) -> AppReport:
    """Report an application's mix of variants, accuracy, latency and emissions, beside BASE."""
    return await apps.report(app, query, caller)


@router.post("/internal/apps/observations", status_code=204)
async def take_observations(report: AppObservations, observations: Taking) -> None:
    """Take in what a router saw of applications' requests in one window."""
    await observations.report(report)
