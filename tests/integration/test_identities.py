"""Every operation of every service, asked by everybody who must not be answered, on objects that are there.

The operations are those of the services' own OpenAPI descriptions, and of the public one, so that a new route is asked
here too.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import gpu_agent.endpoints
import services.kit.metrics
from gateway.routes import Upstream
from services.contracts.identity import Identity, Role
from services.kit.callers import CALLERS
from services.kit.credentials import standing_token
from services.kit.tokens import outgoing
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from services.telemetry.endpoints import NODE_PATHS
from tests.support.control_plane import eventually
from tests.support.servers import ON_PORTS, fresh_database, scratch_folder
from tools.operations import ROUTERS

JOB_NAME, SECRET = "marker-of-acme", "ACME_MARKER"
STRANGER = Identity(tenant_id="other", role=Role.USER, key_id="key_of_other")
PROGRESS = "/v1/progress/"
OF_THE_NODE = "a node's credential"


@dataclass(frozen=True)
class Operation:
    """One operation of one process, with the ids of real objects in its path."""

    service: str
    method: str
    template: str
    path: str

    @property
    def is_for_nodes(self) -> bool:
        return self.service == "telemetry" and NODE_PATHS.fullmatch(self.path) is not None

    def __str__(self) -> str:
        return f"{self.service}: {self.method} {self.template}"


@dataclass
class World:
    """An installation with a tenant's objects in it, and the credentials that must not reach them.

    Attributes:
        own: The headers of the tenant.
        bad: Headers that let nobody in anywhere, by what they are.
        ids: What stands for the names in paths.
    """

    stack: Stack
    http: httpx.AsyncClient
    admin: dict[str, str]
    own: dict[str, str]
    other: dict[str, str]
    bad: dict[str, dict[str, str]]
    ids: dict[str, str]
    urls: dict[str, str]

    def operations(self) -> Iterator[Operation]:
        """Yield every operation behind the gateway, and of the agent."""
        described = {upstream.name.lower(): routers for upstream, routers in ROUTERS.items()}
        described["agent"] = (gpu_agent.endpoints.router,)
        for service, routers in described.items():
            app = FastAPI()
            for router in (*routers, services.kit.metrics.router):
                app.include_router(router)
            yield from self.operations_of(service, app.openapi())

    def operations_of(self, service: str, document: dict[str, Any]) -> Iterator[Operation]:
        for template, methods in document["paths"].items():
            path = re.sub(r"\{(\w+)\}", lambda name: self.ids.get(name[1], "nothing"), template)
            for method in methods:
                if method in ("get", "post", "put", "patch", "delete"):
                    yield Operation(service, method.upper(), template, path)

    async def ask(self, asked: Operation, headers: dict[str, str]) -> httpx.Response:
        return await self.http.request(asked.method, self.urls[asked.service] + asked.path, headers=headers)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
async def world(postgres_url: str, redis_url: str) -> AsyncIterator[World]:
    servers = {"DATABASE_URL": fresh_database(postgres_url), "REDIS_URL": redis_url}
    env = {**ON_PORTS, **servers, "GATEWAY_KEY_MAX_AGE_S": "0.01"}
    with scratch_folder() as data:
        running = Stack(data, nodes="1x1", env=env, services=SERVICES, workers=())
        async with running as stack, httpx.AsyncClient(timeout=30) as http:
            yield await prepared(stack, http)


async def prepared(stack: Stack, http: httpx.AsyncClient) -> World:
    """Make the objects and the credentials."""
    admin = bearer((stack.folder.path / "admin.key").read_text().strip())

    async def made(path: str, headers: dict[str, str], body: Any, method: str = "POST") -> Any:
        answer = await http.request(method, stack.gateway_url + path, headers=headers, json=body)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    for tenant in ("acme", "other"):
        await made("/v1/tenants", admin, {"id": tenant})
    keys = {t: await made("/v1/keys", admin, {"tenant_id": t, "role": "user"}) for t in ("acme", "other")}
    own, other = (bearer(keys[tenant]["secret"]) for tenant in ("acme", "other"))
    revoked = await made("/v1/keys", admin, {"tenant_id": "acme", "role": "user"})
    await http.delete(f"{stack.gateway_url}/v1/keys/{revoked['id']}", headers=admin)
    job = await made("/v1/jobs", own, {"name": JOB_NAME, "command": ["sleep", "600"]})
    await made(f"/v1/secrets/{SECRET}", own, {"value": "x"}, "PUT")

    async def runs() -> bool:
        answer = await http.get(f"{stack.gateway_url}/v1/jobs/{job['id']}", headers=own)
        return answer.json()["state"] == "running"

    await eventually(runs)
    credential = (stack.folder.path / "nodes" / "node-1" / "credential.json").read_text()
    found = re.search(r'"secret":"([^"]+)"', credential)
    assert found
    join = stack.folder.secret("node-join-token")
    node = (await http.get(f"{stack.gateway_url}/v1/nodes/node-1", headers=admin)).json()
    return World(
        stack,
        http,
        admin,
        own,
        other,
        {
            "nothing": {},
            "a stranger's key": bearer("ws_" + "x" * 43),
            "a revoked key": bearer(revoked["secret"]),
            OF_THE_NODE: bearer(found[1]),
            "a node's token to enrol": bearer(standing_token(join, "node-1")),
            "the shared tokens": bearer(stack.folder.secret("service-token")),
            "the identity in headers": {"x-wattshift-tenant": "acme", "x-wattshift-role": "admin"},
        },
        {
            **{"job_id": job["id"], "node_id": "node-1", "tenant_id": "acme", "name": SECRET, "gpu": "0"},
            **{"key_id": keys["acme"]["id"], "allocation_id": f"{job['id']}.1", "secret": SECRET},
        },
        {**stack.urls, "agent": node["agent_url"]},
    )


async def test_nobody_is_answered_without_a_valid_credential(world: World) -> None:
    asked = list(world.operations())
    wrong: list[str] = []
    for operation in asked:
        if operation.template.startswith(PROGRESS):
            allowed = {404, 422}  # the token is in the path, and of one job
        elif operation.is_for_nodes:
            allowed = {401, 422}  # with a body that is right, it is 401: tests/telemetry/test_enrolment.py
        else:
            allowed = {401}
        for who, headers in world.bad.items():
            if operation.is_for_nodes and who == OF_THE_NODE:
                continue  # that is its owner, which would leave
            answer = await world.ask(operation, headers)
            if answer.status_code not in allowed:
                wrong.append(f"{operation}, {who}: {answer.status_code}")

    assert len(asked) > 120
    behind = {each.name.lower() for each in Upstream if each is not Upstream.GATEWAY}  # that one is asked below
    assert {operation.service for operation in asked} == behind | {"agent"}
    assert wrong == []


async def test_a_key_of_a_user_opens_no_service(world: World) -> None:
    for operation in world.operations():
        if not operation.is_for_nodes and not operation.template.startswith(PROGRESS):
            assert (await world.ask(operation, world.own)).status_code == 401, operation


async def test_services_answer_what_their_callers_are_for(world: World) -> None:
    for operation in world.operations():
        for issuer, calls in CALLERS.get(operation.service, {}).items():
            if calls.allowed.fullmatch(f"{operation.method} {operation.path}") or operation.is_for_nodes:
                continue
            sent = outgoing(world.stack.identities.credential(issuer), operation.service).headers()
            assert (await world.ask(operation, sent)).status_code == 403, (operation, issuer)


async def test_the_public_api_answers_nobody_without_a_valid_key(world: World) -> None:
    document = (await world.http.get(f"{world.stack.gateway_url}/openapi.json")).json()
    asked = list(world.operations_of("gateway", document))
    for operation in asked:
        for who, headers in world.bad.items():
            assert (await world.ask(operation, headers)).status_code == 401, (operation, who)
    for path in ("/v1/models", "/v1/chat/completions"):
        for who, headers in world.bad.items():
            method = "GET" if path.endswith("models") else "POST"
            answer = await world.http.request(method, world.urls["router"] + path, headers=headers, json={})
            assert answer.status_code == 401, (path, who)
    assert len(asked) > 90


async def test_another_tenant_reaches_nothing_of_a_tenant(world: World) -> None:
    """On the public API, and at each service as the gateway would ask it."""
    document = (await world.http.get(f"{world.stack.gateway_url}/openapi.json")).json()
    gateway = world.stack.identities.credential("gateway")
    asked = [(each, world.other) for each in world.operations_of("gateway", document)]
    asked += [
        (each, outgoing(gateway, each.service).headers(STRANGER))
        for each in world.operations()
        if each.service != "agent" and not each.is_for_nodes and not each.template.startswith("/internal/")
    ]
    for operation, headers in asked:
        async with world.http.stream(
            operation.method, world.urls[operation.service] + operation.path, headers=headers, json={}
        ) as answer:
            is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
            text = "" if is_stream else (await answer.aread()).decode()
        assert answer.status_code < 500, (operation, text)
        assert JOB_NAME not in text, operation
        assert SECRET not in text or SECRET in operation.path, operation
        if "{job_id}" in operation.template or "{node_id}" in operation.template or "{key_id}" in operation.template:
            assert answer.status_code in (403, 404, 422), (operation, answer.status_code)

    with_tenant = [
        path
        for path, methods in document["paths"].items()
        if any(each["name"] == "tenant" for each in methods.get("get", {}).get("parameters", ()))
    ]
    assert "/v1/simulations" in with_tenant
    for path in with_tenant:
        for headers, status in ((world.other, 403), (world.own, 200), (world.admin, 200)):
            answer = await world.http.get(f"{world.stack.gateway_url}{path}?tenant=acme", headers=headers)
            assert answer.status_code == status, (path, answer.text)

    job = await world.http.get(f"{world.stack.gateway_url}/v1/jobs/{world.ids['job_id']}", headers=world.own)
    secrets = await world.http.get(f"{world.stack.gateway_url}/v1/secrets", headers=world.own)
    assert (job.json()["state"], job.json()["name"]) == ("running", JOB_NAME), job.text
    assert SECRET in secrets.text
