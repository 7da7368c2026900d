"""The operations of the public API, read from the routers of the services that answer them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from fastapi import APIRouter
from fastapi.datastructures import DefaultPlaceholder
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

import carbon_service.carbon_aware
import carbon_service.endpoints
import gateway.endpoints
import optimizer_service.endpoints
import services.admission.app
import services.scheduler.endpoints
import services.scheduler.engine_endpoints
import services.scheduler.explaining_endpoints
import services.scheduler.grid_endpoints
import services.serving.endpoints
import services.simulator.endpoints
import services.telemetry.endpoints
from gateway.routes import JSON, Route, Upstream
from services.contracts.identity import Role
from services.kit.identity import RequireRole
from services.kit.routes import LARGE_BODY, for_all_users

ROUTERS: dict[Upstream, tuple[APIRouter, ...]] = {
    Upstream.ADMISSION: tuple(room.router for room in services.admission.app.ROOMS),
    Upstream.CARBON: (carbon_service.endpoints.router, carbon_service.carbon_aware.router),
    Upstream.OPTIMIZER: (optimizer_service.endpoints.router,),
    Upstream.SERVING: (
        services.serving.endpoints.router,
        services.serving.endpoints.endpoints_router,
        services.serving.endpoints.apps_router,
    ),
    Upstream.SCHEDULER: (
        services.scheduler.endpoints.router,
        services.scheduler.explaining_endpoints.router,
        services.scheduler.engine_endpoints.router,
        services.scheduler.grid_endpoints.router,
        services.scheduler.grid_endpoints.reservations,
    ),
    Upstream.SIMULATOR: services.simulator.endpoints.ROUTERS,
    Upstream.TELEMETRY: (services.telemetry.endpoints.router, services.telemetry.endpoints.internal_router),
}


@dataclass(frozen=True)
class Operation:
    """One operation, and all that its function's signature, decorator and docstring say.

    Attributes:
        route: What the gateway has to know.
        summary: What it does, in a few words: the docstring's first line, without its full stop.
        detail: What the summary leaves open, in whole sentences: the rest of the docstring.
        status: Of success.
        query: Model of the query parameters; None where it takes none.
        body: Model of the JSON body; None where it takes none.
        answer: Type of the JSON answer, a model or a list or mapping of one; None where there is none.
        data: Model of an event's data, or of a line, where the answer is a stream of these.
        headers: Request headers that it reads, in small letters.
        statuses: What else it answers, and what that means.
    """

    route: Route
    summary: str
    detail: str
    status: int
    query: type[BaseModel] | None
    body: type[BaseModel] | None
    answer: Any
    data: type[BaseModel] | None
    headers: tuple[str, ...]
    statuses: dict[int, str]


def operations() -> list[Operation]:
    """Return the operations that the gateway answers itself, and those of all services."""
    found = list(operations_of(Upstream.GATEWAY, gateway.endpoints.router))
    for to, routers in ROUTERS.items():
        found += [each for router in routers for each in operations_of(to, router)]
    return found


def operations_of(to: Upstream, router: APIRouter) -> Iterator[Operation]:
    """Yield the public operations of a router: those that say who may ask, unless services ask them.

    Raises:
        ValueError: A function leaves out what the description needs.
    """
    for route in router.routes:
        if isinstance(route, APIRoute) and (asker := _asker(route)) and not route.path.startswith("/internal/"):
            yield from (_operation(to, route, asker, method) for method in sorted(route.methods or ()))


def _asker(route: APIRoute) -> RequireRole | None:
    calls = [inner.call for inner in route.dependant.dependencies]
    stated = [call for call in calls if isinstance(call, RequireRole)]
    if for_all_users in calls:
        stated.append(RequireRole(Role.USER, for_projects=True))
    if len(stated) > 1:
        raise ValueError(f"{route.path} says more than once who may ask")
    return stated[0] if stated else None


def _operation(to: Upstream, route: APIRoute, asker: RequireRole, method: str) -> Operation:
    summary, _, detail = route.description.partition("\n\n")
    if not summary or len(route.tags) != 1:
        raise ValueError(f"{method} {route.path} needs a docstring and one tag")
    responses = {int(status): said for status, said in route.responses.items()}
    success = route.status_code or 200
    kind = route.response_class
    media = (kind.value if isinstance(kind, DefaultPlaceholder) else kind).media_type or JSON
    body = _only(route, "body_params")
    row = Route(
        operation=route.name,
        method=method,
        path=route.path,
        role=asker.role,
        to=to,
        tag=str(route.tags[0]),
        media=media,
        has_body=body is not None,
        has_large_body=route.openapi_extra == LARGE_BODY,
        for_projects=asker.for_projects,
    )
    return Operation(
        row,
        " ".join(summary.split()).removesuffix("."),
        " ".join(detail.split()),
        success,
        _only(route, "query_params"),
        body,
        route.response_model if media == JSON else None,
        responses.get(success, {}).get("model"),
        tuple(field.alias.lower() for dependant in _all(route.dependant) for field in dependant.header_params),
        {status: said["description"] for status, said in responses.items() if status != success},
    )


def _only(route: APIRoute, where: str) -> Any:
    found = [field for dependant in _all(route.dependant) for field in getattr(dependant, where)]
    if len(found) > 1:
        raise ValueError(f"{route.path}: parameters of the query, and of the body, are the fields of one model")
    return found[0].field_info.annotation if found else None


def _all(dependant: Dependant) -> Iterator[Dependant]:
    yield dependant
    for inner in dependant.dependencies:
        yield from _all(inner)


def row_of(route: Route) -> dict[str, Any]:
    """Return a route as a row of ``gateway/routes.json``: its fields, without those that are as usual."""
    values = {each.name: getattr(route, each.name) for each in fields(route)} | {"to": route.to.name}
    usual = {each.name: each.default for each in fields(route)}
    return {name: value for name, value in values.items() if value != usual[name]}
