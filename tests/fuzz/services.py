"""Every service against its own description, asked by everybody who can reach its port, with bodies nobody foresaw.

Whoever must not be answered is refused before anything is read; whoever may ask never gets a server error, a hang or
half of a change. Nodes are believed least: one that has enrolled says whatever the descriptions allow, and worse.

Bounded and repeatable, as `operations.py` is; `test_api.py` runs both, and with `--slow` many more examples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis import Case

import gpu_agent.endpoints
import services.kit.metrics
from tests.fuzz.asking import BODIES, CONFIG, FOLLOWED, JSON, MOST, WORDS, ask, assert_answered, bearer
from tests.fuzz.world import BRIDGE, HOSTILE, World, is_for_nodes
from tools.operations import ROUTERS

FOR_GOOD = ("/revoke", "/enroll", "/rotate", "/cancel")
"""What ends an object: asked about others than those that the rest is asked about."""
PROGRESS = "/v1/progress/"


def described() -> dict[str, Any]:
    """Return one description of all services, each beneath its name."""
    everything = FastAPI(title="services")
    for upstream, routers in ROUTERS.items():
        for router in (*routers, services.kit.metrics.router):
            everything.include_router(router, prefix=f"/{upstream.name.lower()}")
    for router in (gpu_agent.endpoints.router, services.kit.metrics.router):
        everything.include_router(router, prefix="/agent")
    return everything.openapi()


DESCRIBED = described()
schema = schemathesis.openapi.from_dict(DESCRIBED, config=CONFIG)


@schema.parametrize()
@settings(max_examples=MOST, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_who_must_not_is_refused_and_who_may_gets_an_answer(case: Case, world: World) -> None:
    service, path = aimed(case, world)
    sent = case.as_transport_kwargs(base_url="")
    sent["url"] = world.urls[service] + sent["url"].removeprefix(f"/{service}")
    asked = f"{service}: {case.method} {path}"
    is_nodes = is_for_nodes(service, path)
    for who, headers in world.nobody.items():
        answer = ask(world.session, sent, headers)
        if path.startswith(PROGRESS):
            assert answer.status_code in (404, 422), (asked, who, answer.text)  # the token is in the path
        elif is_nodes and who.startswith("a node"):
            assert_answered(answer, f"{asked}, {who}, {sent}")
        elif is_nodes:
            assert answer.status_code in (400, 401, 422), (asked, who, answer.text)
        else:
            assert answer.status_code == 401, (asked, who, answer.text)
    may: Iterable[tuple[str, dict[str, str]]] = world.callers(service)
    if is_nodes:
        node = world.bridge if "engine" in path else world.hostile
        may = [("the node", bearer(world.secret if path.endswith("/register") else node.token))]
    for who, headers in may:
        answer = ask(world.session, sent, headers)
        assert_answered(answer, f"{asked}, {who}, {sent}")
        if path.endswith("/register") and answer.ok:
            world.hostile.token = answer.json()["token"]


def aimed(case: Case, world: World) -> tuple[str, str]:
    """Let a case be about what is there, without ending it; return its service, and its path there."""
    service, _, template = case.path.removeprefix("/").partition("/")
    template = "/" + template
    if template in FOLLOWED and isinstance(case.query, dict):
        case.query["follow"] = "false"
    parameters = case.path_parameters or {}
    is_nodes = is_for_nodes(service, template)
    if is_nodes:
        name = BRIDGE if "engine" in template else HOSTILE
        if not template.endswith(FOR_GOOD):
            parameters.update({"node_id": name} if "node_id" in parameters else {})
        _claim(case.body, {"node_id": name, "allocation_id": world.ids["allocation_id"]})
    elif case.method == "GET" or (service in ("agent", "scheduler", "telemetry") and not template.endswith(FOR_GOOD)):
        parameters.update({name: world.ids[name] for name in parameters if name in world.ids})
    return service, re.sub(r"\{(\w+)\}", lambda found: quote(str(parameters[found[1]]), safe=""), template)


def _claim(body: Any, names: dict[str, str]) -> None:
    """Let a node's words be about itself, and about a gang that runs on another one."""
    if isinstance(body, dict):
        for name, value in body.items():
            if name in names and isinstance(value, str):
                body[name] = names[name]
            _claim(value, names)
    elif isinstance(body, list):
        for value in body:
            _claim(value, names)


@pytest.mark.parametrize("service", sorted({path.split("/")[1] for path in DESCRIBED["paths"]}))
def test_hostile_words_and_bodies_are_refused(service: str, world: World) -> None:
    asked = 0
    for method, path, query in operations_of(service):
        headers, own = world.strongest(service, method, path)
        if path.endswith(FOR_GOOD) or method == "DELETE":
            own = {}
        known = path.format_map(defaultdict(lambda: "nothing", own))
        tries = [(re.sub(r"\{\w+\}", word, path), b"") for word in WORDS if "{" in path]
        tries += [(f"{known}?{name}={word}&follow=false", b"") for name in query for word in WORDS]
        tries += [(known, body) for body in BODIES] if method in ("POST", "PUT", "PATCH") else []
        for where, body in tries:
            sent = {"method": method, "url": world.urls[service] + where, "data": body, "headers": JSON}
            assert_answered(ask(world.session, sent, headers), f"{service}: {method} {where[:200]} {body[:50]!r}")
            asked += 1
    assert asked


def operations_of(service: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield method, path and names in the query of a service's operations."""
    for path, methods in DESCRIBED["paths"].items():
        if path.startswith(f"/{service}/"):
            for method, operation in methods.items():
                query = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
                yield method.upper(), path.removeprefix(f"/{service}"), query
