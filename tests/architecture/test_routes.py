"""The gateway's table and the services' own routes agree: method, path, role, and the types of what goes in and out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

import carbon_service.carbon_aware
import carbon_service.endpoints
import optimizer_service.endpoints
import services.scheduler.endpoints
import services.scheduler.engine_endpoints
import services.scheduler.explaining_endpoints
import services.serving.app_endpoints
import services.serving.endpoints
import services.serving.routing_endpoints
import services.simulator.comparison_endpoints
import services.simulator.endpoints
import services.simulator.savings_endpoints
import services.telemetry.endpoints
import services.telemetry.request_endpoints
from gateway.routes import METRICS, ROUTES, SUBMIT, SUBMIT_BATCH, Route, Upstream
from services.admission.access_endpoints import access_routes
from services.admission.agent_metrics import agent_metrics_routes
from services.admission.array_endpoints import array_routes
from services.admission.budget_endpoints import budget_routes
from services.admission.endpoints import job_routes
from services.admission.exec_endpoints import exec_routes
from services.admission.secret_endpoints import secret_routes
from services.admission.upload_endpoints import upload_routes
from services.admission.user_endpoints import user_routes
from services.admission.webhooks.endpoints import webhook_routes
from services.contracts.identity import Role
from services.kit.identity import Operator, RequireRole
from tests.architecture.test_imports import ROOT, ROOTS

UNUSED: Any = None
"""In place of what a router's functions call."""

ROUTERS: dict[Upstream, tuple[APIRouter, ...]] = {
    Upstream.ADMISSION: (
        job_routes(UNUSED, UNUSED, UNUSED, UNUSED),
        array_routes(UNUSED),
        access_routes(UNUSED),
        budget_routes(UNUSED),
        user_routes(UNUSED),
        webhook_routes(UNUSED),
        secret_routes(UNUSED),
        exec_routes(UNUSED),
        upload_routes(UNUSED),
        agent_metrics_routes(UNUSED),
    ),
    Upstream.CARBON: (carbon_service.endpoints.router, carbon_service.carbon_aware.router),
    Upstream.OPTIMIZER: (optimizer_service.endpoints.router,),
    Upstream.SERVING: (
        services.serving.endpoints.router,
        services.serving.routing_endpoints.router,
        services.serving.app_endpoints.router,
    ),
    Upstream.SCHEDULER: (
        services.scheduler.endpoints.router,
        services.scheduler.explaining_endpoints.router,
        services.scheduler.engine_endpoints.router,
    ),
    Upstream.SIMULATOR: (
        services.simulator.endpoints.router,
        services.simulator.comparison_endpoints.router,
        services.simulator.savings_endpoints.router,
    ),
    Upstream.TELEMETRY: (services.telemetry.endpoints.router, services.telemetry.request_endpoints.router),
}
NOT_BEHIND_THE_GATEWAY = {
    "gpu_agent/endpoints.py": "an agent is asked by admission and telemetry only",
    "services/kit/metrics.py": "every process shows its figures, which the gateway gathers",
    "gpu_agent/exec_endpoints.py": "an agent is asked by admission and telemetry only",
}

NOT_PUBLIC = {
    ("POST", "/internal/submissions"): "the gateway sends it submissions in groups",
    ("GET", "/internal/agents/metrics"): "the gateway asks for the figures of agents, which answer admission",
    ("POST", "/internal/keys/resolve"): "the gateway and the router ask it whose key a hash is",
    ("POST", "/internal/request-usage"): "routers tell the ledger whose a server's time was",
    ("GET", "/internal/routing"): "routers ask serving where the models are served",
    ("GET", "/internal/routing/keys"): "routers ask serving for the keys of other people's model servers",
    ("POST", "/internal/routing/held"): "routers say what they hold at servers that drain",
    ("POST", "/internal/apps/observations"): "routers say what they saw of applications' requests",
    ("GET", "/internal/live"): "the simulator asks the scheduler for the queue",
    ("GET", "/internal/comparisons/{job_id}"): "the scheduler asks the simulator what it has of a job",
    ("POST", "/v1/nodes/{node_id}/enroll"): "nodes ask telemetry directly, with a token for one of them",
    ("POST", "/v1/nodes/{node_id}/rotate"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/register"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/{node_id}/heartbeat"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/energy"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/engine"): "bridges to engines ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/engine-energy"): "bridges to engines ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/secrets"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/upload"): "nodes ask telemetry directly, with their own token",
}
GATHERED = {(route.method, route.path) for route in (SUBMIT, SUBMIT_BATCH, METRICS)}
"""Answered by the gateway: submissions it sends to ``/internal/submissions``, many in one request; and it asks all
services for what they measure."""

ANSWERED_ALIKE_FOR_ALL = re.compile(r"/v1/carbon/.*|/emissions/.*|/locations")
"""Grid data: the carbon service's routes read no caller, as services ask them too, on nobody's behalf."""


@dataclass(frozen=True)
class Endpoint:
    """What the gateway and a service both say of an operation."""

    method: str
    path: str
    role: Role
    query: object
    body: object
    answer: object
    status: int
    for_projects: bool


def endpoint_of_row(route: Route) -> Endpoint:
    """Return what the gateway says."""
    said = (route.method, route.path, route.role, route.query, route.body, route.answer, route.status)
    return Endpoint(*said, route.for_projects)


def endpoints_of(router: APIRouter) -> Iterator[Endpoint]:
    """Yield what a service says, from the routes that FastAPI made of its functions."""
    for route in router.routes:
        assert isinstance(route, APIRoute)
        parameters = list(_parameters(route.dependant))
        requirement = _requirement(route)
        for method in sorted(route.methods or ()):
            yield Endpoint(
                method,
                route.path,
                requirement.role,
                next((kind for kind, where in parameters if where == "query"), None),
                next((kind for kind, where in parameters if where == "body"), None),
                route.response_model,
                route.status_code or 200,
                requirement.for_projects,
            )


def _parameters(dependant: Dependant) -> Iterator[tuple[object, str]]:
    for where, fields in (("query", dependant.query_params), ("body", dependant.body_params)):
        assert len(fields) <= 1, f"{dependant.path}: query parameters are fields of one model, as in the gateway's row"
        for each in fields:
            yield each.field_info.annotation, where
    for inner in dependant.dependencies:
        yield from _parameters(inner)


def _requirement(route: APIRoute) -> RequireRole:
    stated = [inner.call for inner in route.dependant.dependencies if isinstance(inner.call, RequireRole)]
    if not stated and (ANSWERED_ALIKE_FOR_ALL.fullmatch(route.path) or _is_internal(route)):
        return RequireRole(Role.USER, for_projects=True)
    assert len(stated) == 1, f"{route.path} states its role by one parameter: Caller, ProjectCaller, Operator or Admin"
    return stated[0]


def test_no_dependency_is_sent_to_a_thread() -> None:
    """FastAPI runs those that are no coroutines in a thread, one after another, on every request."""

    def calls(dependant: Dependant) -> Iterator[object]:
        for inner in dependant.dependencies:
            yield inner.call
            yield from calls(inner)

    routes = [route for routers in ROUTERS.values() for router in routers for route in router.routes]
    asked = {call for route in routes if isinstance(route, APIRoute) for call in calls(route.dependant)}
    assert len(asked) > 10
    assert [call for call in asked if not _is_coroutine(call)] == []


def _is_coroutine(call: object) -> bool:
    return iscoroutinefunction(call) or iscoroutinefunction(getattr(type(call), "__call__", None))  # noqa: B004


def _is_internal(route: APIRoute) -> bool:
    return all((method, route.path) in NOT_PUBLIC for method in route.methods or ())


SERVED = {
    upstream: [endpoint for router in routers for endpoint in endpoints_of(router)]
    for upstream, routers in ROUTERS.items()
}


FORWARDED = [route for route in ROUTES if (route.method, route.path) not in GATHERED]


@pytest.mark.parametrize("route", FORWARDED, ids=lambda route: f"{route.method} {route.path}")
def test_a_row_is_what_one_service_serves(route: Route) -> None:
    same_operation = [
        (upstream, endpoint)
        for upstream, endpoints in SERVED.items()
        for endpoint in endpoints
        if (endpoint.method, endpoint.path) == (route.method, route.path)
    ]

    assert same_operation == [(route.to, endpoint_of_row(route))]


def test_what_a_service_serves_is_public_or_known_not_to_be() -> None:
    public = {(route.method, route.path) for route in ROUTES}
    served = {(endpoint.method, endpoint.path) for endpoints in SERVED.values() for endpoint in endpoints}

    assert served - public == set(NOT_PUBLIC)
    assert public - served == GATHERED


def test_every_router_is_compared() -> None:
    making = re.compile(r"APIRouter\(")
    found = {
        path.relative_to(ROOT).as_posix()
        for root in ROOTS
        for path in (ROOT / root).rglob("*.py")
        if making.search(path.read_text(encoding="utf-8"))
    }
    compared = sum(len(routers) for routers in ROUTERS.values())

    assert set(ROUTERS) == set(Upstream)
    assert set(NOT_BEHIND_THE_GATEWAY) < found
    assert len(found) == compared + len(NOT_BEHIND_THE_GATEWAY)


def test_a_role_is_read_from_the_signature_and_must_be_there() -> None:
    with_role, without = APIRouter(), APIRouter()

    @with_role.get("/v1/nodes")
    async def list_nodes(_: Operator) -> None: ...

    without.get("/v1/nodes")(lambda: None)

    assert [endpoint.role for endpoint in endpoints_of(with_role)] == [Role.OPERATOR]
    with pytest.raises(AssertionError, match="states its role"):
        list(endpoints_of(without))
