"""The table of routes and the description made from it, held against the services and the contracts."""

import re
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, TypeAdapter

import carbon_service.carbon_aware
import carbon_service.endpoints
import optimizer_service.endpoints
import optimizer_service.planner.endpoints
import services.scheduler.endpoints
import services.simulator.endpoints
import services.telemetry.endpoints
from gateway.examples import ANSWERS, BODIES
from gateway.openapi import describe
from gateway.routes import JSON, ROUTES, SUBMIT, SUBMIT_BATCH, Route, Upstream
from services.admission.access_endpoints import access_routes
from services.admission.endpoints import job_routes

Operation = tuple[str, str]
ABSENT: Any = None

NOT_PUBLIC = re.compile(r"/internal/.*|/v1/nodes/(register|{}/heartbeat|{}/energy)")
"""What services and nodes ask each other, and nobody else."""


def _operations(*routers: APIRouter) -> dict[Operation, dict[str, Any]]:
    app = FastAPI()
    for router in routers:
        app.include_router(router)
    return {
        (method.upper(), re.sub(r"{\w+}", "{}", path)): operation
        for path, operations in app.openapi()["paths"].items()
        for method, operation in operations.items()
    }


OPERATIONS = {
    Upstream.ADMISSION: _operations(job_routes(ABSENT, ABSENT, ABSENT, ABSENT), access_routes(ABSENT)),
    Upstream.CARBON: _operations(carbon_service.endpoints.router, carbon_service.carbon_aware.router),
    Upstream.OPTIMIZER: _operations(optimizer_service.endpoints.router, optimizer_service.planner.endpoints.router),
    Upstream.SCHEDULER: _operations(services.scheduler.endpoints.router),
    Upstream.SIMULATOR: _operations(services.simulator.endpoints.router),
    Upstream.TELEMETRY: _operations(services.telemetry.endpoints.router),
}
FORWARDED = [route for route in ROUTES if route not in (SUBMIT, SUBMIT_BATCH)]


def _operation(route: Route) -> Operation:
    return route.method, re.sub(r"{\w+}", "{}", route.path)


def _query_names(operation: dict[str, Any]) -> set[str]:
    return {parameter["name"] for parameter in operation.get("parameters", []) if parameter["in"] == "query"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The description."""
    return describe("1")


@pytest.mark.parametrize("route", FORWARDED, ids=lambda route: f"{route.method} {route.path}")
def test_what_is_described_is_what_the_service_takes(route: Route, document: dict[str, Any]) -> None:
    answered = OPERATIONS[route.to].get(_operation(route))
    assert answered, f"the {route.to} has no {route.method} {route.path}"
    described = document["paths"][route.path][route.method.lower()]
    assert _query_names(described) == _query_names(answered)
    assert ("requestBody" in described) == ("requestBody" in answered)
    assert str(route.status) in answered["responses"]


def test_every_operation_of_a_service_is_public_or_known_not_to_be() -> None:
    public = {(route.to, _operation(route)) for route in ROUTES}
    for upstream, operations in OPERATIONS.items():
        for method, path in operations:
            known = (upstream, (method, path)) in public or NOT_PUBLIC.fullmatch(path)
            assert known, f"{method} {path} of the {upstream} is in no table: add it to gateway/routes.py"


def test_operations_have_names_of_their_own() -> None:
    names = [route.operation_id for route in ROUTES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in set(re.findall(r"'\$ref': '#/([^']+)'", str(document))):
        place: Any = document
        for step in reference.split("/"):
            place = place[step]


def test_examples_are_valid() -> None:
    by_name = {route.operation_id: route for route in ROUTES}
    for name, example in BODIES.items():
        _check(by_name[name].body, example)
    for name, example in ANSWERS.items():
        if name in by_name:
            _check(by_name[name].answer, example)


def _check(kind: type[BaseModel] | Any, example: Any) -> None:
    TypeAdapter(kind).validate_python(example, strict=False)


def test_every_operation_tells_its_problems(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert {"401", "403", "404", "422", "429", "503"} <= statuses, (method, path)
            assert ("415" in statuses) == ("requestBody" in operation), (method, path)
            for status, answer in operation["responses"].items():
                if status >= "4" and "$ref" not in answer:
                    assert "application/problem+json" in answer["content"]


def test_answers_may_gain_fields_and_bodies_may_not(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    assert schemas["JobBatch"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["Job"]


def test_every_json_answer_has_a_schema() -> None:
    for route in ROUTES:
        assert (route.answer is not None) == (route.media == JSON and route.status != 204), route.path
