"""The gateway's table and the published description are what the services' routers say."""

from __future__ import annotations

import json

from aiohttp import web

from gateway.routes import read_routes
from tests.gateway.public import a_gateway
from tools.operations import operations
from tools.published import ROOT, lost, published


def test_what_is_published_is_what_the_services_serve() -> None:
    stale = [path for path, text in published().items() if (ROOT / path).read_text(encoding="utf-8") != text]

    assert stale == [], "the API has changed: run `.venv/bin/python -m tools.published`"
    assert list(read_routes()) == [each.route for each in operations()]


async def test_the_gateway_serves_what_is_published() -> None:
    async def unused(_: web.Request) -> web.StreamResponse:
        raise AssertionError("the description comes from the gateway itself")

    async with a_gateway(unused) as client:
        served = (await client.get("/openapi.json")).json()

    assert json.loads((ROOT / "deploy" / "openapi.json").read_text()) == served


def test_an_operation_keeps_its_name_method_and_path() -> None:
    def table(*rows: tuple[str, str, str]) -> str:
        return json.dumps([{"operation": name, "method": method, "path": path} for name, method, path in rows])

    jobs, nodes = ("list_jobs", "GET", "/v1/jobs"), ("list_nodes", "GET", "/v1/nodes")

    assert lost(table(nodes, jobs), table(jobs)) == []
    assert lost(table(("find_jobs", "GET", "/v1/jobs")), table(jobs)) == ["list_jobs GET /v1/jobs"]
    assert lost(table(("list_jobs", "GET", "/v2/jobs")), table(jobs, nodes)) == [
        "list_jobs GET /v1/jobs",
        "list_nodes GET /v1/nodes",
    ]
