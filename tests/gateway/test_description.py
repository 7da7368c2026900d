"""The description made from the table of routes."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from gateway.examples import ANSWERS, BODIES
from gateway.openapi import describe
from gateway.routes import JSON, ROUTES, Route


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The description."""
    return describe("1")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_a_row_is_described(route: Route, document: dict[str, Any]) -> None:
    described = document["paths"][route.path][route.method.lower()]
    queries = {parameter["name"] for parameter in described["parameters"] if parameter["in"] == "query"}
    assert queries == set(route.query.model_fields if route.query else ())
    assert ("requestBody" in described) == (route.body is not None)
    assert str(route.status) in described["responses"]


def test_operations_have_names_of_their_own() -> None:
    names = [route.operation for route in ROUTES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name) for name in names)


def test_released_operations_keep_their_names() -> None:
    """Generated clients call operations by these names: a new one is added to the list, none is ever changed."""
    released = (Path(__file__).parent / "operations.txt").read_text().splitlines()
    described = {f"{route.operation} {route.method} {route.path}" for route in ROUTES}
    assert set(released) <= described
    assert released == sorted(released)


def test_a_schema_is_named_after_its_model_alone(document: dict[str, Any]) -> None:
    """Two models of one name would get their modules' paths as names."""
    assert [name for name in document["components"]["schemas"] if "__" in name] == []


def test_event_streams_are_strings_to_generated_clients(document: dict[str, Any]) -> None:
    for path in ("/v1/events", "/v1/jobs/{job_id}/events"):
        (media, content), *others = document["paths"][path]["get"]["responses"]["200"]["content"].items()
        assert (media, content["schema"]["type"], others) == ("text/event-stream", "string", [])


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in set(re.findall(r"'\$ref': '#/([^']+)'", str(document))):
        place: Any = document
        for step in reference.split("/"):
            place = place[step]


def test_examples_are_valid() -> None:
    by_name = {route.operation: route for route in ROUTES}
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
