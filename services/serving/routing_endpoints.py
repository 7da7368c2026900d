"""``/v1/endpoints``, and the routes for routers: HTTP only."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from services.contracts.queries import PageQuery
from services.contracts.routing import Endpoint, EndpointList, EndpointSpec, HeldRequests, RoutingTable, UpstreamKeys
from services.contracts.schema import Name
from services.kit.identity import Caller, Operator
from services.kit.routes import from_state
from services.serving.routing import Endpoints, Routing, open_upstream_keys

router = APIRouter(tags=["endpoints"])


Registered = Annotated[Endpoints, from_state("endpoints")]
Known = Annotated[Routing, from_state("routing")]
EndpointName = Annotated[Name, Path()]


@router.get("/v1/endpoints")
async def list_endpoints(query: Annotated[PageQuery, Query()], caller: Caller, endpoints: Registered) -> EndpointList:
    """List registered model servers by name."""
    return await endpoints.page(query, caller)


@router.get("/v1/endpoints/{endpoint}")
async def get_endpoint(endpoint: EndpointName, caller: Caller, endpoints: Registered) -> Endpoint:
    """Get a registered model server."""
    return await endpoints.find(endpoint, caller)


@router.put("/v1/endpoints/{endpoint}", responses={201: {"description": "The endpoint is new."}})
async def put_endpoint(
    endpoint: EndpointName, spec: EndpointSpec, caller: Operator, endpoints: Registered, response: Response
) -> Endpoint:
    """Register a model server, or replace its spec.

    Its address must lie within the networks of `WATTSHIFT_ENDPOINT_NETWORKS`.
    """
    found, is_new = await endpoints.put(endpoint, spec, caller)
    if is_new:
        response.status_code = 201
        response.headers["Location"] = f"/v1/endpoints/{endpoint}"
    return found


@router.delete("/v1/endpoints/{endpoint}")
async def delete_endpoint(endpoint: EndpointName, caller: Operator, endpoints: Registered) -> Endpoint:
    """Deregister a model server.

    Requests that it holds are finished.
    """
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
    """Record how many requests a router holds at draining servers."""
    routing.hold(report)
