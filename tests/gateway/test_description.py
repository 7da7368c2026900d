"""The description made of the services' operations."""

import json
import re
from typing import Any

import pytest
from aiohttp import web
from pydantic import BaseModel, TypeAdapter

from gateway.reference import render
from gateway.routes import JSON
from services.contracts.codes import MEANINGS, ProblemCode
from tests.gateway.public import a_gateway
from tests.support.api_examples import EXAMPLES
from tools.openapi import MESSAGES
from tools.operations import Operation
from tools.operations import operations as read_operations
from tools.published import ROOT

OPERATIONS = read_operations()


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The description."""
    return json.loads((ROOT / "deploy" / "openapi.json").read_text())


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.route.operation)
def test_an_operation_is_described(operation: Operation, document: dict[str, Any]) -> None:
    described = document["paths"][operation.route.path][operation.route.method.lower()]
    queries = {parameter["name"] for parameter in described["parameters"] if parameter["in"] == "query"}
    assert queries == set(operation.query.model_fields if operation.query else ())
    assert ("requestBody" in described) == (operation.body is not None)
    assert str(operation.status) in described["responses"]


def test_operations_have_names_of_their_own() -> None:
    names = [operation.route.operation for operation in OPERATIONS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name) for name in names)


def test_a_schema_is_named_after_its_model_alone(document: dict[str, Any]) -> None:
    """Two models of one name would get their modules' paths as names."""
    assert [name for name in document["components"]["schemas"] if "__" in name] == []


def test_no_object_within_a_schema_takes_the_name_of_another_schema(document: dict[str, Any]) -> None:
    """Generators name an object that a property describes in place after its schema and itself, and refuse doubles."""
    schemas = document["components"]["schemas"]
    inner = {
        name + "".join(part.capitalize() for part in each.split("_"))
        for name, schema in schemas.items()
        for each, held in schema.get("properties", {}).items()
        if any(one.get("type") == "object" for one in (held, *held.get("anyOf", ())))
    }
    assert inner
    assert inner & set(schemas) == set()


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
    taken_in = {each.body.__name__: each.body for each in OPERATIONS if each.body is not None}
    given = {each.answer.__name__: each.answer for each in OPERATIONS if isinstance(each.answer, type)}
    given |= {message.__name__: message for message in MESSAGES.values()}
    streams = {each.data.__name__: each.data for each in OPERATIONS if each.data is not None}
    for name, example in EXAMPLES.items():
        if name in streams:
            for data in re.findall(r"^data: (.*)$", example, re.MULTILINE):
                TypeAdapter(streams[name]).validate_json(data)
            continue
        kind: type[BaseModel] = taken_in.get(name) or given[name]
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
    for each in OPERATIONS:
        assert (each.answer is not None) == (each.route.media == JSON and each.status != 204), each.route.path


def test_the_page_names_every_operation_and_model_and_lets_no_text_be_markup(document: dict[str, Any]) -> None:
    page = render({**document, "info": {**document["info"], "description": "<script>alert(1)</script> & more"}})

    for each in OPERATIONS:
        assert f'<details id="{each.route.operation}">' in page
    for name in document["components"]["schemas"]:
        assert f'<details id="{name}">' in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "<script" not in page
    assert '<td>list of <a href="#JobSpec">JobSpec</a></td>' in page
    assert "<code>preempting</code>" in page


async def _nothing(_: web.Request) -> web.StreamResponse:
    return web.json_response({})


def codes_of_the_router() -> set[str]:
    """Return the codes that the router's errors are made with."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "services" / "router" / "apps").glob("*.py")]
    codes = {code for source in sources for code in re.findall(r'DoorError\(\s*\d+,\s*"(\w+)"', source)}
    return codes | {"method_not_allowed"}  # of ``openai.check_method``


async def test_the_type_of_each_problem_is_a_page_that_explains_it() -> None:
    assert len(codes_of_the_router()) > 5
    assert {*ProblemCode} | codes_of_the_router() <= {*MEANINGS}
    async with a_gateway(_nothing) as client:
        refused = (await client.get("/v1/jobs")).json()
        assert refused["type"] == "/problems/unauthenticated"
        page = await client.get(refused["type"])
        assert page.status_code == 200
        assert "wattshift keys create" in page.text
        for code in MEANINGS:
            assert f'href="/problems/{code}"' in page.text
            assert (await client.get(f"/problems/{code}")).status_code == 200
        unknown = await client.get("/problems/%3Cscript%3E")
        assert unknown.status_code == 404
        assert "<script>" not in unknown.text
