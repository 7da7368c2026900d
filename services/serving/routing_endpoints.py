"""``/v1/endpoints``, and what routers ask: HTTP only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from services.contracts.queries import PageQuery
from services.contracts.routing import Endpoint, EndpointList, EndpointSpec, HeldRequests, RoutingTable, UpstreamKeys
from services.contracts.schema import Name
from services.kit.background.http import NOT_FOUND, PROBLEMS
from services.kit.identity import Caller, Operator
from services.serving.routing import Endpoints, Routing
from services.serving.upstream_keys import open_upstream_keys

router = APIRouter(responses=PROBLEMS)


async def _endpoints(request: Request) -> Endpoints:
    return request.app.state.endpoints


async def _routing(request: Request) -> Routing:
    return request.app.state.routing


Registered = Annotated[Endpoints, Depends(_endpoints)]
Known = Annotated[Routing, Depends(_routing)]
EndpointName = Annotated[Name, Path()]


@router.get("/v1/endpoints", tags=["endpoints"])
async def list_endpoints(query: Annotated[PageQuery, Query()], caller: Caller, endpoints: Registered) -> EndpointList:
    """List the endpoints of the caller's tenant by name; operators see all."""
    return await endpoints.page(query, caller)


@router.get("/v1/endpoints/{endpoint}", tags=["endpoints"], responses=NOT_FOUND)
async def read_endpoint(endpoint: EndpointName, caller: Caller, endpoints: Registered) -> Endpoint:
    """Read an endpoint."""
    return await endpoints.find(endpoint, caller)


@router.put(
    "/v1/endpoints/{endpoint}",
    tags=["endpoints"],
    responses={201: {"model": Endpoint, "description": "It is new."}},
)
async def put_endpoint(
    endpoint: EndpointName, spec: EndpointSpec, caller: Operator, endpoints: Registered, response: Response
) -> Endpoint:
    """Register an endpoint, or replace its spec; the same spec again changes nothing."""
    found, is_new = await endpoints.put(endpoint, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/endpoints/{endpoint}"
    return found


@router.delete("/v1/endpoints/{endpoint}", tags=["endpoints"], responses=NOT_FOUND)
async def delete_endpoint(endpoint: EndpointName, caller: Operator, endpoints: Registered) -> Endpoint:
    """Deregister an endpoint. Requests that it holds are finished."""
    return await endpoints.remove(endpoint, caller)


@router.get("/internal/routing", response_model_exclude_defaults=True)  # so that older routers can read it
async def read_table(routing: Known) -> RoutingTable:
    """Read the pools that serve models, and all servers."""
    return await routing.table()


@router.get("/internal/routing/keys")
async def read_keys(request: Request) -> UpstreamKeys:
    """Read the API keys of endpoints whose keys are secrets."""
    return await open_upstream_keys(request.app.state.repository, request.app.state.sealer)


@router.post("/internal/routing/held", status_code=204)
async def report_held(report: HeldRequests, routing: Known) -> None:
    """Take in how many requests a router holds at servers that drain."""
    routing.hold(report)
