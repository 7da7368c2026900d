"""Model servers of others, which the router sends requests to."""

from __future__ import annotations

from gateway.routes.route import Route, Status, Upstream
from services.contracts import queries, routing
from services.contracts.identity import Role

ENDPOINTS = (
    Route(
        "GET",
        "/v1/endpoints",
        Role.USER,
        Upstream.SERVING,
        "endpoints",
        "List registered model servers by name",
        operation="list_endpoints",
        query=queries.PageQuery,
        answer=routing.EndpointList,
    ),
    Route(
        "GET",
        "/v1/endpoints/{endpoint}",
        Role.USER,
        Upstream.SERVING,
        "endpoints",
        "Get a registered model server",
        operation="get_endpoint",
        answer=routing.Endpoint,
    ),
    Route(
        "PUT",
        "/v1/endpoints/{endpoint}",
        Role.OPERATOR,
        Upstream.SERVING,
        "endpoints",
        "Register a model server, or replace its spec",
        "Its address must lie within the networks of `WATTSHIFT_ENDPOINT_NETWORKS`.",
        operation="put_endpoint",
        body=routing.EndpointSpec,
        answer=routing.Endpoint,
        statuses=(Status(201, "The endpoint is new."),),
    ),
    Route(
        "DELETE",
        "/v1/endpoints/{endpoint}",
        Role.OPERATOR,
        Upstream.SERVING,
        "endpoints",
        "Deregister a model server",
        "Requests that it holds are finished.",
        operation="delete_endpoint",
        answer=routing.Endpoint,
    ),
)
