"""The public API is read from the services' own routes, all of them, and what is not public is known not to be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from inspect import iscoroutinefunction
from typing import Annotated

import pytest
from fastapi import APIRouter, Depends, Header, Query
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from gateway.routes import EVENTS, Route, Upstream
from services.contracts.identity import Role
from services.contracts.jobs import JobBatch, JobEvent, JobSpec, SubmittedJob
from services.contracts.queries import PageQuery
from services.kit.identity import Admin, Caller, Operator, ProjectCaller
from services.kit.routes import LARGE_BODY, EventStream, for_all_users
from tests.architecture.test_imports import ROOT, ROOTS
from tools.operations import ROUTERS, Operation, operations, operations_of

NOT_BEHIND_THE_GATEWAY = {
    "gateway/endpoints.py": "what the gateway answers itself",
    "gpu_agent/endpoints.py": "an agent is asked by admission and telemetry only",
    "services/kit/metrics.py": "every process shows its figures, which the gateway gathers",
    "services/serving/batches/endpoints.py": "the router passes on what clients of OpenAI's API send",
}

NOT_PUBLIC = {
    ("POST", "/internal/submissions"): "the gateway sends it submissions in groups",
    ("GET", "/internal/agents/metrics"): "the gateway asks for the figures of agents, which answer admission",
    ("POST", "/internal/keys/resolve"): "gateway, router and serving ask it whose a key is and what it may",
    ("POST", "/internal/request-usage"): "routers tell the ledger whose a server's time was",
    ("GET", "/internal/routing"): "routers ask serving where the models are served",
    ("GET", "/internal/routing/keys"): "routers ask serving for the keys of other people's model servers",
    ("POST", "/internal/routing/held"): "routers say what they hold at servers that drain",
    ("POST", "/internal/apps/observations"): "routers say what they saw of applications' requests",
    ("GET", "/internal/live"): "the simulator asks the scheduler for the queue",
    ("GET", "/internal/comparisons/{job_id}"): "the scheduler asks the simulator what it has of a job",
    ("POST", "/internal/earlier"): "the scheduler asks the simulator which change would start a job earlier",
    ("POST", "/v1/nodes/{node_id}/enroll"): "nodes ask telemetry directly, with a token for one of them",
    ("POST", "/v1/nodes/{node_id}/rotate"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/register"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/{node_id}/certificate"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/{node_id}/leave"): "nodes ask telemetry directly, with their own credential",
    ("POST", "/v1/nodes/{node_id}/stream"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/heartbeat"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/energy"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/engine"): "bridges to engines ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/engine-energy"): "bridges to engines ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/secrets"): "nodes ask telemetry directly, with their own token",
    ("POST", "/v1/nodes/{node_id}/upload"): "nodes ask telemetry directly, with their own token",
}


def test_what_a_service_serves_is_public_or_known_not_to_be() -> None:
    public = {(each.route.method, each.route.path) for each in operations()}
    routes = [route for routers in ROUTERS.values() for router in routers for route in router.routes]
    served = {(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods or ()}

    assert served - public == set(NOT_PUBLIC)
    assert public - served == {("POST", "/v1/jobs"), ("POST", "/v1/jobs:batch"), ("GET", "/metrics")}


def test_every_router_is_read() -> None:
    making = re.compile(r"APIRouter\(")
    found = {
        path.relative_to(ROOT).as_posix(): count
        for root in ROOTS
        for path in (ROOT / root).rglob("*.py")
        if (count := len(making.findall(path.read_text(encoding="utf-8"))))
    }
    read = sum(len(routers) for routers in ROUTERS.values())

    assert set(ROUTERS) == set(Upstream) - {Upstream.GATEWAY}
    assert set(NOT_BEHIND_THE_GATEWAY) < set(found)
    assert sum(count for path, count in found.items() if path not in NOT_BEHIND_THE_GATEWAY) == read


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


def test_an_operation_is_what_its_function_says() -> None:
    router = APIRouter(prefix="/v1", tags=["jobs"])

    @router.post(
        "/jobs",
        status_code=201,
        responses={200: {"description": "It was there."}, 409: {"description": "It is not."}},
        openapi_extra=LARGE_BODY,
    )
    async def submit_job(
        spec: JobSpec,
        query: Annotated[PageQuery, Query()],
        _: ProjectCaller,
        if_match: Annotated[str | None, Header()] = None,
    ) -> SubmittedJob:
        """Submit a
        job.

        It is on disk. Nothing
        is lost.
        """
        ...

    (found,) = operations_of(Upstream.ADMISSION, router)

    assert found == Operation(
        Route(
            "submit_job",
            "POST",
            "/v1/jobs",
            Role.USER,
            Upstream.ADMISSION,
            "jobs",
            has_body=True,
            has_large_body=True,
            for_projects=True,
        ),
        summary="Submit a job",
        detail="It is on disk. Nothing is lost.",
        status=201,
        query=PageQuery,
        body=JobSpec,
        answer=SubmittedJob,
        data=None,
        headers=("if-match",),
        statuses={200: "It was there.", 409: "It is not."},
    )


def test_a_stream_says_what_its_events_are() -> None:
    router = APIRouter(tags=["events"])

    @router.get("/v1/events", responses={200: {"model": JobEvent}}, response_class=EventStream)
    async def follow_events(_: Operator) -> EventStream:
        """Follow events."""
        ...

    (found,) = operations_of(Upstream.ADMISSION, router)

    assert (found.route.media, found.data, found.answer, found.statuses) == (EVENTS, JobEvent, None, {})
    assert not found.route.answers_head


def test_a_role_is_what_the_signature_says_and_without_one_nothing_is_public() -> None:
    router, for_all = APIRouter(tags=["nodes"]), APIRouter(tags=["carbon"], dependencies=[Depends(for_all_users)])

    @router.get("/v1/nodes")
    async def list_nodes(_: Operator) -> None:
        """List nodes."""

    @router.delete("/v1/nodes")
    async def remove_nodes(_: Admin) -> None:
        """Remove nodes."""

    @router.post("/v1/nodes")
    async def add_node(_: Caller) -> None:
        """Add a node."""

    @router.post("/v1/nodes/register")
    async def register() -> None:
        """Register a node."""

    @router.get("/internal/nodes")
    async def list_all(_: Operator) -> None:
        """List all nodes."""

    @for_all.get("/v1/carbon/zones")
    async def list_zones() -> None:
        """List zones."""

    found = [
        each.route for each in (*operations_of(Upstream.TELEMETRY, router), *operations_of(Upstream.CARBON, for_all))
    ]

    assert {each.operation: (each.role, each.for_projects) for each in found} == {
        "list_nodes": (Role.OPERATOR, False),
        "remove_nodes": (Role.ADMIN, False),
        "add_node": (Role.USER, False),
        "list_zones": (Role.USER, True),
    }


async def _silent(_: Caller) -> None: ...


async def _described(_: Caller) -> None:
    """Say it."""


async def _twice(_: Caller, __: Operator) -> None:
    """Ask twice."""


async def _several(_: Caller, first: JobSpec, second: JobBatch) -> None:
    """Take two bodies."""


@pytest.mark.parametrize(
    ("function", "tags", "why"),
    [
        (_silent, ["nodes"], "needs a docstring"),
        (_twice, ["nodes"], "more than once"),
        (_several, ["nodes"], "fields of one model"),
        (_described, [], "one tag"),
    ],
)
def test_a_function_that_says_too_little_or_too_much_is_refused(function: object, tags: list[str], why: str) -> None:
    router = APIRouter()
    router.add_api_route("/v1/things", function, methods=["POST"], tags=[*tags])  # pyright: ignore[reportArgumentType]

    with pytest.raises(ValueError, match=why):
        list(operations_of(Upstream.TELEMETRY, router))


def numbers_of(dependant: Dependant) -> Iterator[tuple[str, TypeAdapter[object]]]:
    for given in dependant.query_params:
        kind, info = given.field_info.annotation, given.field_info
        fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {given.name: info}
        for name, field in fields.items():
            adapter = TypeAdapter[object](Annotated[field.annotation, field])  # type: ignore[valid-type]
            if set(re.findall(r'"type": "(\w+)"', json.dumps(adapter.json_schema()))) & {"integer", "number"}:
                yield name, adapter
    for each in dependant.dependencies:
        yield from numbers_of(each)


def test_no_query_takes_a_number_that_python_alone_reads() -> None:
    found = 0
    for router in [each for routers in ROUTERS.values() for each in routers]:
        for route in [each for each in router.routes if isinstance(each, APIRoute)]:
            for name, adapter in numbers_of(route.dependant):
                found += 1
                with pytest.raises(ValidationError):
                    pytest.fail(f"{route.path}: {name} is {adapter.validate_python('1_0')}")
    assert found > 20
