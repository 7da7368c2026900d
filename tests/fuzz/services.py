"""Every service against its own description, asked by everybody who can reach its port, with bodies nobody foresaw.

Whoever must not be answered is refused before anything is read; whoever may ask never gets a server error, a hang or
half of a change. Nodes are believed least: one that has enrolled says whatever the descriptions allow, and worse.

Bounded and repeatable, as `operations.py` is; `test_api.py` runs both, and with `--slow` many more examples.
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from requests.structures import CaseInsensitiveDict
from schemathesis import Case
from schemathesis.config import SchemathesisConfig

import gpu_agent.endpoints
import gpu_agent.exec_endpoints
import services.kit.metrics
from gateway.routes import EVENTS, ROUTES
from services.contracts.identity import Identity, Role
from services.contracts.problems import Problem
from services.kit.callers import CALLERS
from services.kit.enrolment import Keys
from services.kit.tokens import outgoing, outgoing_to_node
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from services.telemetry.endpoints import NODE_PATHS
from tests.architecture.test_routes import ROUTERS
from tests.support.control_plane import FakeAgent, eventually
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import scratch_folder

MOST = int(os.environ.get("FUZZ_EXAMPLES", "2"))
CONFIG = SchemathesisConfig.from_dict(
    {
        "seed": 20_261_124,
        "generation": {"database": "none", "max-examples": MOST, "with-security-parameters": False},
        "phases": {
            "coverage": {"enabled": MOST > 2, "unexpected-methods": []},
            "stateful": {"enabled": False},
        },
    }
)
WITHIN_S = 30.0
HOSTILE, BRIDGE = "node-hostile", "bridge-hostile"
FOLLOWED = {route.path for route in ROUTES if route.media == EVENTS} | {"/v1/jobs/{job_id}/logs"}
FOR_GOOD = ("/revoke", "/enroll", "/rotate", "/cancel")
"""What ends an object: asked about others than those that the rest is asked about."""
PROGRESS = "/v1/progress/"


def described() -> dict[str, Any]:
    """Return one description of all services, each beneath its name."""
    everything = FastAPI(title="services")
    for upstream, routers in ROUTERS.items():
        for router in (*routers, services.kit.metrics.router):
            everything.include_router(router, prefix=f"/{upstream.name.lower()}")
    for router in (gpu_agent.endpoints.router, gpu_agent.exec_endpoints.router, services.kit.metrics.router):
        everything.include_router(router, prefix="/agent")
    return everything.openapi()


@dataclass
class World:
    """An installation with a job that runs, and the credentials of everybody.

    Attributes:
        nobody: Headers that no service answers, by whose they are.
        ids: What stands for the names in paths.
        hostile: A node that has enrolled and says what it likes; so does the bridge.
        secret: With which the node registers.
        enrolment: That of the node with the agent.
    """

    stack: Stack
    urls: dict[str, str]
    nobody: dict[str, dict[str, str]]
    ids: dict[str, Any]
    hostile: FakeAgent
    bridge: FakeAgent
    secret: str
    enrolment: bytes
    session: requests.Session = field(default_factory=requests.Session)

    def callers(self, service: str) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the services that may ask one, each for itself and on behalf of users in every role."""
        for issuer, calls in CALLERS.get("node" if service == "agent" else service, {}).items():
            credential = self.stack.identities.credential(issuer)
            if service == "agent":
                tokens = outgoing_to_node(credential, "node-1", self.enrolment)
            else:
                tokens = outgoing(credential, service)
            yield issuer, tokens.headers()
            for role in sorted(calls.roles):
                somebody = Identity(tenant_id="acme", role=Role(role), key_id=f"key-of-{role}")
                yield f"{issuer} for {role}", tokens.headers(somebody)

    def strongest(self, service: str, method: str, path: str) -> tuple[dict[str, str], dict[str, Any]]:
        """Return the headers of who may do most at an operation, and the ids of what it may do that to."""
        if is_for_nodes(service, path):
            node = self.bridge if "engine" in path else self.hostile
            return bearer(self.secret if path.endswith("/register") else node.token), {"node_id": node.node_id}
        kind = "node" if service == "agent" else service
        for issuer, calls in CALLERS.get(kind, {}).items():
            if calls.allowed.fullmatch(f"{method} {path}"):
                callers = dict(self.callers(service))
                return callers.get(f"{issuer} for admin") or callers.get(f"{issuer} for user") or callers[
                    issuer
                ], self.ids
        return {}, self.ids


DESCRIBED = described()
schema = schemathesis.openapi.from_dict(DESCRIBED, config=CONFIG)


def is_for_nodes(service: str, path: str) -> bool:
    return service == "telemetry" and NODE_PATHS.fullmatch(path) is not None


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
async def world() -> AsyncIterator[World]:
    """An installation whose one GPU is taken: a job that was made up must not run on the machine that tests."""
    with scratch_folder() as folder, forked_by_the_supervisor():
        running = Stack(folder / "data", nodes="1x1", services=SERVICES, workers=(), env={"SCHEDULER_POLICY": "fifo"})
        async with running as stack, httpx.AsyncClient(timeout=WITHIN_S) as http:
            yield await prepared(stack, http)


async def prepared(stack: Stack, http: httpx.AsyncClient) -> World:
    """Make the objects and the credentials."""
    admin = bearer((stack.folder.path / "admin.key").read_text().strip())

    async def made(path: str, headers: dict[str, str], body: Any) -> Any:
        answer = await http.post(stack.gateway_url + path, headers=headers, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    await made("/v1/tenants", admin, {"id": "acme"})
    keys = {role: await made("/v1/keys", admin, {"tenant_id": "acme", "role": role}) for role in ("user", "operator")}
    job = await made("/v1/jobs", bearer(keys["user"]["secret"]), {"name": "there", "command": ["sleep", "36000"]})

    async def runs() -> bool:
        answer = await http.get(f"{stack.gateway_url}/v1/jobs/{job['id']}", headers=admin)
        return answer.json()["state"] == "running"

    await eventually(runs)
    hostile = FakeAgent(http, HOSTILE, base_url=stack.urls["telemetry"])
    bridge = FakeAgent(http, BRIDGE, base_url=stack.urls["telemetry"], driver="engine", devices=[])
    secret = await enrolled(hostile, await made(f"/v1/nodes/{HOSTILE}/enrollments", admin, {}))
    await enrolled(bridge, await made(f"/v1/nodes/{BRIDGE}/enrollments", admin, {"role": "engine"}))
    node = (await http.get(f"{stack.gateway_url}/v1/nodes/node-1", headers=admin)).json()
    connection = await asyncpg.connect(stack.environment["DATABASE_URL"])
    enrolment = await connection.fetchval("SELECT enrolment FROM node_credentials WHERE node_id = 'node-1'")
    await connection.close()
    nobody = {
        "nobody": {},
        "a stranger": bearer("ws_" + "x" * 43),
        "a tenant": bearer(keys["user"]["secret"]),
        "an operator": bearer(keys["operator"]["secret"]),
        "a node": bearer(hostile.token),
        "a node's credential": bearer(secret),
    }
    ids = {"job_id": job["id"], "node_id": "node-1", "allocation_id": f"{job['id']}.1", "gpu": 0}
    return World(stack, {**stack.urls, "agent": node["agent_url"]}, nobody, ids, hostile, bridge, secret, enrolment)


async def enrolled(node: FakeAgent, allowed: dict[str, Any]) -> str:
    """Let a node in and register it; return its credential."""
    keys = Keys.new()
    body = keys.hashes().model_dump(mode="json") | {"role": allowed["role"]}
    answer = await node.post(f"/v1/nodes/{node.node_id}/enroll", body, token=allowed["token"])
    assert answer.status_code == 200, answer.text
    answer = await node.post("/v1/nodes/register", node.registration, token=keys.secret)
    assert answer.status_code == 200, answer.text
    node.token = answer.json()["token"]
    return keys.secret


@schema.parametrize()
@settings(max_examples=MOST, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_who_must_not_is_refused_and_who_may_gets_an_answer(case: Case, world: World) -> None:
    service, path = aimed(case, world)
    sent = case.as_transport_kwargs(base_url="")
    sent["url"] = world.urls[service] + sent["url"].removeprefix(f"/{service}")
    asked = f"{service}: {case.method} {path}"
    is_nodes = is_for_nodes(service, path)
    for who, headers in world.nobody.items():
        answer = ask(world, sent, headers)
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
        answer = ask(world, sent, headers)
        assert_answered(answer, f"{asked}, {who}, {sent}")
        if path.endswith("/register") and answer.ok:
            world.hostile.token = answer.json()["token"]


def ask(world: World, sent: dict[str, Any], headers: dict[str, str]) -> requests.Response:
    """Return a whole answer; AssertionError if it does not end in time."""
    given = CaseInsensitiveDict({**(sent.get("headers") or {}), **headers})
    until_s = time.monotonic() + WITHIN_S
    with world.session.request(**{**sent, "headers": given}, timeout=WITHIN_S, stream=True) as answer:
        content = bytearray()
        for piece in answer.iter_content(65_536):
            content += piece
            assert time.monotonic() < until_s, (sent, headers, content[:500])
        answer._content = bytes(content)
    return answer


def assert_answered(answer: requests.Response, asked: str) -> None:
    """Fail for a server error, and for a refusal that does not say what is wrong.

    Energy of a grid of which nothing is known is not lost: it is to be sent again.
    """
    is_later = answer.status_code == 503 and "energy" in asked and "retry-after" in answer.headers
    assert answer.status_code < 500 or is_later, (asked, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json", (asked, answer.text)
        assert Problem.model_validate_json(answer.content).detail


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


WORDS = ("%00", "..%2F..%2Fetc%2Fpasswd", "x" * 5_000, "-1", str(2**63), "%F0%9F%92%A5", "'%20OR%201=1--", "NaN")
"""In the place of ids, and of values in queries."""
BODIES = (
    *(b"", b"{", b"null", b"[]", b'"x"', b"NaN", b'{"a": 1e999}', b'{"a": ' + b"9" * 5_000 + b"}", b"\xff\xfe"),
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"\\ud800": "\\udfff"}', b'{"a": 1, "a": 2}', b"x" * 100_000),
)


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
            json = {"content-type": "application/json"}
            sent = {"method": method, "url": world.urls[service] + where, "data": body, "headers": json}
            assert_answered(ask(world, sent, headers), f"{service}: {method} {where[:200]} {body[:50]!r}")
            asked += 1
    assert asked


def operations_of(service: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield method, path and names in the query of a service's operations."""
    for path, methods in DESCRIBED["paths"].items():
        if path.startswith(f"/{service}/"):
            for method, operation in methods.items():
                query = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
                yield method.upper(), path.removeprefix(f"/{service}"), query


def test_the_installation_stands(world: World) -> None:
    """After all that: every process is ready, everything that was stored can be read, and the job runs."""
    for service, url in world.urls.items():
        answer = world.session.get(f"{url}/readyz", timeout=WITHIN_S)
        assert answer.status_code == 200, (service, answer.text)
    admin = bearer((world.stack.folder.path / "admin.key").read_text().strip())
    for route in ROUTES:
        if route.method == "GET" and "{" not in route.path:
            url = world.stack.gateway_url + route.path
            sent = {"method": "GET", "url": url, "params": {"follow": "false"} if route.path in FOLLOWED else {}}
            assert ask(world, sent, admin).status_code < 500, route.path
    job = world.session.get(f"{world.stack.gateway_url}/v1/jobs/{world.ids['job_id']}", headers=admin, timeout=WITHIN_S)
    assert job.json()["state"] == "running"
    found = world.session.get(f"{world.stack.gateway_url}/v1/invariants", headers=admin, timeout=WITHIN_S).json()
    assert found["holds"], found
