"""An installation with objects of a tenant in it, and the credentials of everybody."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg
import httpx
import requests

from services.contracts.identity import Identity, Role
from services.kit.callers import CALLERS
from services.kit.enrolment import Keys
from services.kit.settings import SharedSettings
from services.kit.tokens import outgoing, outgoing_to_node
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from services.telemetry.endpoints import NODE_PATHS
from tests.fuzz.asking import WITHIN_S, bearer
from tests.fuzz.rules import prices
from tests.serving.fleets import a_fleet, an_app
from tests.serving.pools import a_spec
from tests.support.api_examples import EXAMPLES
from tests.support.control_plane import FakeAgent, eventually
from tests.support.forked import forked_by_the_supervisor
from tests.support.servers import ON_PORTS, scratch_folder

ZONE = "US-CAL-CISO"
HOSTILE, BRIDGE = "node-hostile", "bridge-hostile"
MARKER = "marker-of-acme"
"""In the names of what belongs to `acme`."""
MIN_RUN_S = 6.0  #: Before it no policy stops a gang


@dataclass
class World:
    """An installation with a job that runs, and the credentials of everybody.

    Attributes:
        nobody: Headers that no service answers, by whose they are.
        nobody_at_the_gate: Headers that the public API does not answer.
        somebody: Headers of those whom it answers, but for the admin.
        admin: The headers of the admin.
        ids: What stands for the names in paths.
        objects: What of ``acme`` stands for them on the public API.
        hostile: A node that has enrolled and says what it likes; so does the bridge.
        secret: With which the node registers.
        enrolment: That of the node with the agent.
    """

    stack: Stack
    urls: dict[str, str]
    nobody: dict[str, dict[str, str]]
    nobody_at_the_gate: dict[str, dict[str, str]]
    somebody: dict[str, dict[str, str]]
    admin: dict[str, str]
    ids: dict[str, Any]
    objects: dict[str, str]
    hostile: FakeAgent
    bridge: FakeAgent
    secret: str
    enrolment: bytes
    session: requests.Session = field(default_factory=requests.Session)

    @property
    def held_job(self) -> str:
        """A job that does not run."""
        return self.objects["held_job_id"]

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


def is_for_nodes(service: str, path: str) -> bool:
    return service == "telemetry" and NODE_PATHS.fullmatch(path) is not None


@asynccontextmanager
async def installed() -> AsyncIterator[World]:
    """An installation whose one GPU is taken: a job that was made up must not run on the machine that tests."""
    env = ON_PORTS | {
        "SCHEDULER_POLICY": "fifo",
        "SCHEDULER_MIN_RUN_S": str(MIN_RUN_S),
        "SCHEDULER_ROUND_INTERVAL_S": "4",
        "ADMISSION_BUDGET_INTERVAL_S": "1",
        "ADMISSION_WEBHOOK_NETWORKS": "127.0.0.0/8",
        "WATTSHIFT_ENDPOINT_NETWORKS": "127.0.0.0/8",
    }
    with scratch_folder() as folder, forked_by_the_supervisor():
        (folder / "prices.toml").write_text(prices(SharedSettings.model_fields["zone"].default))
        env["CARBON_PRICES_FILE"] = str(folder / "prices.toml")
        running = Stack(folder / "data", nodes="1x1", services=SERVICES, workers=(), env=env)
        async with running as stack, httpx.AsyncClient(timeout=WITHIN_S) as http:
            yield await prepared(stack, http)


async def prepared(stack: Stack, http: httpx.AsyncClient) -> World:
    """Make the objects and the credentials."""
    admin = bearer((stack.folder.path / "admin.key").read_text().strip())

    async def made(path: str, headers: dict[str, str], body: Any, method: str = "POST") -> Any:
        answer = await http.request(method, stack.gateway_url + path, headers=headers, json=body)
        assert answer.is_success, (path, answer.text)
        return answer.json()

    async def a_key(tenant: str, role: str) -> dict[str, Any]:
        return await made("/v1/keys", admin, {"tenant_id": tenant, "role": role})

    limits = {"requests_per_s": 100_000, "burst": 100_000}
    for tenant in ("acme", "umbra"):
        await made("/v1/tenants", admin, {"id": tenant, "limits": limits})
    keys = {role: await a_key("acme", role) for role in ("user", "operator", "read_only")}
    other, revoked, spare = await a_key("umbra", "user"), await a_key("acme", "user"), await a_key("acme", "user")
    assert (await http.delete(f"{stack.gateway_url}/v1/keys/{revoked['id']}", headers=admin)).is_success
    user = bearer(keys["user"]["secret"])
    job = await made("/v1/jobs", user, {"name": MARKER, "command": ["sleep", "36000"]})

    async def runs() -> bool:
        answer = await http.get(f"{stack.gateway_url}/v1/jobs/{job['id']}", headers=admin)
        return answer.json()["state"] == "running"

    await eventually(runs)
    objects = await objects_of_acme(made, user, bearer(keys["operator"]["secret"]), admin)
    hostile = FakeAgent(http, HOSTILE, base_url=stack.urls["telemetry"])
    bridge = FakeAgent(http, BRIDGE, base_url=stack.urls["telemetry"], driver="engine", devices=[])
    secret = await enrolled(hostile, await made(f"/v1/nodes/{HOSTILE}/enrollments", admin, {}))
    await enrolled(bridge, await made(f"/v1/nodes/{BRIDGE}/enrollments", admin, {"role": "engine"}))
    node = (await http.get(f"{stack.gateway_url}/v1/nodes/node-1", headers=admin)).json()
    connection = await asyncpg.connect(stack.environment["DATABASE_URL"])
    enrolment = await connection.fetchval("SELECT enrolment FROM node_credentials WHERE node_id = 'node-1'")
    await connection.close()
    strangers = {
        "nobody": {},
        "a stranger": bearer("ws_" + "x" * 43),
        "a node": bearer(hostile.token),
        "a node's credential": bearer(secret),
    }
    return World(
        stack,
        {**stack.urls, "agent": node["agent_url"]},
        {**strangers, "a tenant": user, "an operator": bearer(keys["operator"]["secret"])},
        {
            **strangers,
            "a revoked key": bearer(revoked["secret"]),
            "a service": bearer(stack.folder.secret("service-token")),
        },
        {
            "a reader": bearer(keys["read_only"]["secret"]),
            "a user": user,
            "another tenant": bearer(other["secret"]),
            "an operator": bearer(keys["operator"]["secret"]),
        },
        admin,
        {"job_id": job["id"], "node_id": "node-1", "allocation_id": f"{job['id']}.1", "gpu": 0},
        {**objects, "job_id": job["id"], "key_id": spare["id"]},
        hostile,
        bridge,
        secret,
        enrolment,
    )


async def objects_of_acme(
    made: Callable[..., Awaitable[Any]], user: dict[str, str], operator: dict[str, str], admin: dict[str, str]
) -> dict[str, str]:
    """Make one of everything that a tenant may have; return their ids by the names that paths have for them."""
    held = {"name": MARKER, "command": ["true"], "hold": True}
    sha256 = hashlib.sha256(b"x" * 100).hexdigest()
    webhook = {"url": f"http://127.0.0.1:9/{MARKER}", "events": ["job.ended"]}
    budget = {"tenant_id": "acme", "project": MARKER, "quantity": "kwh", "amount": 500}
    endpoint = {"url": "http://127.0.0.1:9", "models": [MARKER], "location": "here"}
    pool = a_spec(mode="fixed", places=[{"name": "west", "zone": ZONE}]).model_dump(mode="json")
    fleet, app = a_fleet(tenants=["acme", "umbra"], zone=ZONE).model_dump(mode="json"), an_app(fleet="shared")
    reservation = {"name": MARKER, "gpus": 1, "duration_s": 60, "start_at": "2100-01-01T00:00:00Z"}
    simulation = {"policy": ["fifo"], "jobs": "green-day", "carbon": "GB", "start": "2023-08-08", "days": 1}
    for secret in (MARKER, "TAKEN"):
        await made(f"/v1/secrets/{secret}", user, {"value": "x"}, "PUT")
    await made(f"/v1/endpoints/{MARKER}", operator, endpoint, "PUT")
    await made(f"/v1/uploads/{sha256}", user, {"size_bytes": 100}, "PUT")
    await made(f"/v1/pools/{MARKER}", operator, pool, "PUT")
    await made("/v1/fleets/shared", operator, fleet, "PUT")
    await made(f"/v1/apps/{MARKER}", user, app.model_dump(mode="json"), "PUT")
    return {
        "held_job_id": (await made("/v1/jobs", user, held))["id"],
        "array_id": (await made("/v1/jobs", user, {**held, "array": "0-1"}))["id"],
        "webhook_id": (await made("/v1/webhooks", user, webhook))["id"],
        "budget_id": (await made("/v1/budgets", admin, budget, "PUT"))["id"],
        "solve_id": (await made("/v1/optimize/allocation", user, EXAMPLES["AllocationRequest"]))["id"],
        "simulation_id": (await made("/v1/simulations", user, simulation))["id"],
        "name": "TAKEN",  # as a secret of its own any tenant may have it too
        "endpoint": MARKER,
        "pool": MARKER,
        "plan_id": (await made(f"/v1/pools/{MARKER}/plans", operator, None))["id"],
        "fleet": "shared",
        "app": MARKER,
        "reservation_id": (await made("/v1/reservations", user, reservation))["id"],
        "sha256": sha256,
        "tenant_id": "acme",
        "number": "0",
    }


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
