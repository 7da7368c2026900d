"""Hosts become nodes by tokens, prove who they are, and are let in no more."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError

from services.contracts.identity import Identity, Role
from services.contracts.nodes import RankState
from services.contracts.streams import command_stream, latency_stream
from services.kit.credentials import standing_token
from services.kit.redis import connect
from services.telemetry.repository import credentials
from tests.support.control_plane import (
    JOIN_TOKEN,
    OPERATOR,
    FakeAgent,
    accept_job,
    allocate,
    eventually,
    running_telemetry,
    service_headers,
    telemetry_settings,
    usage,
)

ADMIN = Identity(tenant_id="ops", role=Role.ADMIN, key_id="key-admin")


def keys(name: str) -> dict[str, str]:
    """Return the hashes of a node's secrets: its name, and its name twice."""
    return {
        "credential_sha256": hashlib.sha256(name.encode()).hexdigest(),
        "redis_sha256": hashlib.sha256((name + name).encode()).hexdigest(),
    }


async def allowed(http: httpx.AsyncClient, node: str, **body: Any) -> str:
    """Return a one-time token."""
    answer = await http.post(f"/v1/nodes/{node}/enrollments", json=body, headers=service_headers(ADMIN))
    assert answer.status_code == 201, answer.text
    return answer.json()["token"]


async def sent(http: httpx.AsyncClient, node: str, what: str, token: str, body: Any) -> tuple[int, Any]:
    path = "/v1/nodes/register" if what == "register" else f"/v1/nodes/{node}/{what}"
    answer = await http.post(path, json=body, headers={"authorization": f"Bearer {token}"})
    return answer.status_code, answer.json()


async def revoked(http: httpx.AsyncClient, node: str) -> int:
    return (await http.post(f"/v1/nodes/{node}/revoke", headers=service_headers(ADMIN))).status_code


async def listed(http: httpx.AsyncClient) -> list[str]:
    return [each["id"] for each in (await http.get("/v1/nodes", headers=service_headers(OPERATOR))).json()["items"]]


async def test_a_token_lets_one_host_in_as_one_node_once(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    token = await allowed(http, "n1")

    assert (await sent(http, "n2", "enroll", token, keys("a")))[0] == 401, "it is for another node"
    first = await sent(http, "n1", "enroll", token, keys("a"))
    again = await sent(http, "n1", "enroll", token, keys("a"))
    another = await sent(http, "n1", "enroll", token, keys("b"))
    registered = await sent(http, "n1", "register", "a", agent.registration)
    agent.token = registered[1]["token"]
    await agent.beat()

    assert (first[0], registered[0]) == (200, 200)
    assert first == again, "an answer that was lost can be had again"
    assert (another[0], another[1]["detail"][:26]) == (401, "This token was used before")
    for wrong in (token, JOIN_TOKEN, "b", ""):
        assert (await sent(http, "n1", "register", wrong, agent.registration))[0] == 401
    other = FakeAgent(http, "n2").registration
    assert (await sent(http, "n2", "register", "a", other))[0] == 401, "a credential is of one node"
    found = (await http.get("/v1/nodes/n1", headers=service_headers(OPERATOR))).json()
    assert found["credential"] == "own"


async def test_a_node_with_an_agent_speaks_for_no_engine_and_becomes_none(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    bridge = {**FakeAgent(http, "slurm").registration, "driver": "engine", "devices": []}
    report = {"boot_id": "b", "kind": "slurm", "mode": "control", "nodes": []}
    for node, role in (("n1", "agent"), ("slurm", "engine")):
        assert (await sent(http, node, "enroll", await allowed(http, node, role=role), keys(node)))[0] == 200
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE node_credentials SET role = NULL")  # as of the release before
    at_node = (await sent(http, "n1", "register", "n1", agent.registration))[1]["token"]
    at_bridge = (await sent(http, "slurm", "register", "slurm", bridge))[1]["token"]

    assert (await sent(http, "slurm", "engine", at_bridge, report))[0] == 200
    assert (await sent(http, "n1", "engine", at_node, report))[0] == 401
    turned = await sent(http, "n1", "register", "n1", {**agent.registration, "driver": "engine"})
    assert (turned[0], turned[1]["detail"]) == (409, "n1 is known as a node with an agent. Enrol under another name.")
    turned = await sent(http, "slurm", "register", "slurm", {**bridge, "driver": "simulated"})
    assert turned[0] == 409
    assert (await sent(http, "slurm", "engine", at_bridge, report))[0] == 200, "a refused registration changes nothing"


@pytest.mark.parametrize(("role", "other", "command"), [("agent", "engine", "n1 --engine"), ("engine", "agent", "n1")])
async def test_a_token_is_for_an_agent_or_for_a_bridge(plane, role: str, other: str, command: str) -> None:
    http = plane.http
    drivers = {"agent": "simulated", "engine": "engine"}
    registration = {**FakeAgent(http, "n1").registration, "devices": []}
    token = await allowed(http, "n1", role=role)

    refused = await sent(http, "n1", "enroll", token, {**keys("a"), "role": other})
    let_in = await sent(http, "n1", "enroll", token, {**keys("a"), "role": role})
    repeated = await sent(http, "n1", "enroll", token, {**keys("a"), "role": other})
    lied = await sent(http, "n1", "register", "a", {**registration, "driver": drivers[other]})
    registered = await sent(http, "n1", "register", "a", {**registration, "driver": drivers[role]})

    assert (refused[0], let_in[0], repeated[0], lied[0], registered[0]) == (401, 200, 401, 401, 200)
    assert refused[1]["detail"].endswith(f": ask an admin for one (wattshift nodes enroll {command}).")
    assert refused[1]["detail"] == repeated[1]["detail"] == lied[1]["detail"]
    asked = {"json": {"role": other}, "headers": service_headers(ADMIN)}
    assert (await http.post("/v1/nodes/n1/enrollments", **asked)).status_code == 409, "the name is taken"
    asked["json"] = {"role": "admin"}
    assert (await http.post("/v1/nodes/n1/enrollments", **asked)).status_code == 422


async def test_who_says_no_role_has_that_of_its_token(plane) -> None:
    """As an agent of the release before, whose wrong token shows when it registers, and which may enrol again."""
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    assert (await sent(http, "n1", "enroll", await allowed(http, "n1", role="engine"), keys("a")))[0] == 200
    assert (await sent(http, "n1", "register", "a", agent.registration))[0] == 401
    assert (await sent(http, "n1", "rotate", "a", keys("b")))[0] == 200
    assert (await sent(http, "n1", "register", "b", agent.registration))[0] == 401, "replaced keys have the role, too"

    assert (await sent(http, "n1", "enroll", await allowed(http, "n1"), keys("c")))[0] == 200
    assert (await sent(http, "n1", "register", "c", agent.registration))[0] == 200


async def test_tokens_of_the_release_before_let_in_either(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    bridge = {**FakeAgent(http, "slurm").registration, "driver": "engine", "devices": []}
    tokens = {node: await allowed(http, node) for node in ("n1", "slurm")}
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE node_enrolments SET role = NULL")

    assert (await sent(http, "n1", "enroll", tokens["n1"], keys("n1")))[0] == 200
    assert (await sent(http, "slurm", "enroll", tokens["slurm"], {**keys("slurm"), "role": "engine"}))[0] == 200
    assert (await sent(http, "n1", "register", "n1", agent.registration))[0] == 200
    assert (await sent(http, "slurm", "register", "slurm", bridge))[0] == 200


async def test_a_standing_token_lets_no_bridge_in(plane) -> None:
    token = standing_token(JOIN_TOKEN, "n1")
    assert (await sent(plane.http, "n1", "enroll", token, {**keys("a"), "role": "engine"}))[0] == 401
    assert (await sent(plane.http, "n1", "enroll", token, {**keys("a"), "role": "agent"}))[0] == 200


async def test_a_token_ends(plane) -> None:
    token = await allowed(plane.http, "n1", lifetime_s=5)
    async with plane.database.connection() as connection:
        await connection.execute("UPDATE node_enrolments SET expires_at = now()")

    answer = await sent(plane.http, "n1", "enroll", token, keys("a"))

    assert answer[0] == 401
    assert "expired" in answer[1]["detail"]
    for lifetime_s in (0, -1, 1e9, "x"):
        asked = {"json": {"lifetime_s": lifetime_s}, "headers": service_headers(ADMIN)}
        assert (await plane.http.post("/v1/nodes/n1/enrollments", **asked)).status_code == 422


async def test_only_admins_let_nodes_in_and_out(plane) -> None:
    for path in ("enrollments", "revoke"):
        answer = await plane.http.post(f"/v1/nodes/n1/{path}", json={}, headers=service_headers(OPERATOR))
        assert answer.status_code == 403


async def test_a_node_that_enrols_while_it_is_revoked_does_so_before_or_after(
    plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    http, token = plane.http, await allowed(plane.http, "n1")
    enrols = asyncio.Event()
    enrol = credentials.enrol

    async def slowly(*arguments: Any) -> None:
        enrols.set()
        await asyncio.sleep(0.5)
        await enrol(*arguments)

    monkeypatch.setattr(credentials, "enrol", slowly)
    enrolling = asyncio.create_task(sent(http, "n1", "enroll", token, keys("b")))
    await enrols.wait()
    assert await revoked(http, "n1") == 204
    assert (await enrolling)[0] == 200
    assert (await sent(http, "n1", "register", "b", FakeAgent(http, "n1").registration))[0] == 401


async def test_a_revoked_node_is_out_until_it_is_let_in_anew(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    standing, unused = standing_token(JOIN_TOKEN, "n1"), await allowed(plane.http, "n1")
    before = (await sent(http, "n1", "enroll", standing, keys("a")))[1]
    agent.token = (await sent(http, "n1", "register", "a", agent.registration))[1]["token"]
    await agent.beat()

    assert await revoked(http, "n1") == 204
    assert (await agent.post("/v1/nodes/n1/heartbeat", agent.heartbeat())).status_code == 401
    assert (await agent.report()).status_code == 401
    for what, token in (("register", "a"), ("register", JOIN_TOKEN), ("rotate", "a")):
        body = agent.registration if what == "register" else keys("b")
        assert (await sent(http, "n1", what, token, body))[0] == 401
    for token in (standing, unused, JOIN_TOKEN):
        assert (await sent(http, "n1", "enroll", token, keys("b")))[0] == 401
    state = (await http.get("/v1/nodes/n1", headers=service_headers(OPERATOR))).json()["credential"]
    lists: list[list[str]] = []
    for lease in ("1 hour", "0"):
        async with plane.database.transaction() as connection:
            await connection.execute("UPDATE nodes SET lease_until = now() + $1::text::interval", lease)
        lists.append(await listed(http))

    after = await sent(http, "n1", "enroll", await allowed(http, "n1"), keys("b"))

    assert state == "revoked"
    assert after[0] == 200
    assert after[1]["call_secrets"] != before["call_secrets"], "who had the name before cannot pass as admission"
    assert (await sent(http, "n1", "register", "b", agent.registration))[0] == 200
    assert [*lists, await listed(http)] == [["n1"], [], ["n1"]], "it is shown as long as it may run anything"
    assert await revoked(http, "nobody") == 404


async def test_a_host_that_takes_a_name_over_ends_who_had_it(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    await sent(http, "n1", "enroll", await allowed(http, "n1"), keys("a"))
    agent.token = (await sent(http, "n1", "register", "a", agent.registration))[1]["token"]
    await agent.beat()

    await sent(http, "n1", "enroll", await allowed(http, "n1"), keys("b"))

    assert (await agent.post("/v1/nodes/n1/heartbeat", agent.heartbeat())).status_code == 401
    assert (await sent(http, "n1", "register", "a", agent.registration))[0] == 401


async def test_secrets_are_replaced_without_a_gap(plane) -> None:
    http, agent = plane.http, FakeAgent(plane.http, "n1")
    await sent(http, "n1", "enroll", await allowed(http, "n1"), keys("a"))

    replaced = await sent(http, "n1", "rotate", "a", keys("b"))
    assert replaced[0] == 200
    assert replaced == await sent(http, "n1", "rotate", "a", keys("b")), "its answer was lost"
    assert (await sent(http, "n1", "register", "a", agent.registration))[0] == 200, "the answer may not have come"
    assert replaced == await sent(http, "n1", "rotate", "b", keys("b")), "the new one is shown, and the old one ends"
    assert (await sent(http, "n1", "register", "a", agent.registration))[0] == 401
    assert (await sent(http, "n1", "register", "b", agent.registration))[0] == 200
    assert (await sent(http, "n1", "rotate", "x", keys("c")))[0] == 401


async def test_nodes_of_the_release_before_join_by_the_shared_token_until_they_enrol(plane) -> None:
    agent = FakeAgent(plane.http, "n1")
    await agent.register()
    await agent.beat()
    found = (await plane.http.get("/v1/nodes/n1", headers=service_headers(OPERATOR))).json()

    enrolled = await sent(plane.http, "n1", "enroll", JOIN_TOKEN, keys("a"))
    again = await sent(plane.http, "n1", "enroll", JOIN_TOKEN, keys("b"))

    assert found["credential"] == "shared"
    assert (enrolled[0], again[0]) == (200, 401)
    assert (await sent(plane.http, "n1", "register", JOIN_TOKEN, agent.registration))[0] == 401
    assert (await agent.post("/v1/nodes/n1/heartbeat", agent.heartbeat())).status_code == 401


async def test_the_shared_token_can_be_ended(database_url: str, redis_url: str) -> None:
    settings = telemetry_settings(database_url, redis_url, join_token_enrols=False)
    async with running_telemetry(settings) as http:
        registration = FakeAgent(http, "never-seen").registration

        assert (await sent(http, "never-seen", "register", JOIN_TOKEN, registration))[0] == 401
        assert (await sent(http, "never-seen", "enroll", JOIN_TOKEN, keys("a")))[0] == 401
        assert (await sent(http, "never-seen", "enroll", standing_token(JOIN_TOKEN, "x"), keys("a")))[0] == 401


async def test_a_node_speaks_of_its_own_gangs_alone(plane) -> None:
    one, _ = await plane.agent("n1"), await plane.agent("n2")
    job = await accept_job(plane.database)
    theirs = await allocate(plane.database, job, {"n2": [0]})
    one.say(theirs, RankState.EXITED, code=0, progress_done=7)
    await one.beat()
    await one.report(one.interval(1_000, 1_002, usage(theirs, 50.0)))

    async with plane.database.connection() as connection:
        ranks = await connection.fetch("SELECT * FROM rank_statuses")
        progress = await connection.fetch("SELECT * FROM job_progress")
        charged = await connection.fetch("SELECT * FROM energy_usages WHERE job_id IS NOT NULL")
    assert (ranks, progress, charged) == ([], [], [])
    for what, body in (("secrets", {"allocation_id": theirs}), ("upload", {"allocation_id": theirs, "number": 0})):
        assert (await one.post(f"/v1/nodes/n1/{what}", body)).status_code == 404


@asynccontextmanager
async def as_node(redis_url: str, name: str, password: str) -> AsyncIterator[Any]:
    client = connect(redis_url, user=(f"node:{name}", password))
    client.get_retry().update_retries(0) if hasattr(client, "get_retry") and client.get_retry() else None
    try:
        yield client
    finally:
        await client.aclose()


async def test_a_node_reads_its_own_stream_and_nothing_else(plane, redis_url: str) -> None:
    for name in ("n1", "n2"):
        await sent(plane.http, name, "enroll", await allowed(plane.http, name), keys(name))
    async with connect(redis_url) as admin, as_node(redis_url, "n1", "n1n1") as node:
        await admin.xadd(command_stream("n1"), {"command": "x"})
        await admin.xadd(command_stream("n2"), {"command": "x"})
        assert len((await node.xread({command_stream("n1"): "0-0"}))[0][1]) == 1
        # What agents of the release before do:
        await node.xgroup_create(command_stream("n1"), "agent", id="0", mkstream=True)
        read = await node.xreadgroup("agent", "agent", {command_stream("n1"): ">"}, count=1)
        async with node.pipeline(transaction=True) as pipeline:
            pipeline.xack(command_stream("n1"), "agent", read[0][1][0][0])
            pipeline.xdel(command_stream("n1"), read[0][1][0][0])
            assert await pipeline.execute() == [1, 1]
        await node.xrevrange(latency_stream("n1"), count=1)
        refused = [
            ("XRANGE", command_stream("n2"), "-", "+"),
            ("XREVRANGE", command_stream("n2"), "+", "-"),
            ("XADD", command_stream("n1"), "*", "command", "y"),
            ("XADD", command_stream("n2"), "*", "command", "y"),
            ("XDEL", latency_stream("n1"), "0-1"),
            ("KEYS", "*"),
            ("GET", "wattshift:celery:optimizer"),
            ("ACL", "LIST"),
            ("CONFIG", "GET", "*"),
            ("FLUSHALL",),
        ]
        for command in refused:
            with pytest.raises(NoPermissionError):
                await node.execute_command(*command)


async def test_users_of_nodes_come_back_and_go_within_seconds(plane, redis_url: str) -> None:
    await sent(plane.http, "n1", "enroll", await allowed(plane.http, "n1"), keys("n1"))

    async def is_let_in() -> bool:
        async with as_node(redis_url, "n1", "n1n1") as node:
            try:
                return bool(await node.ping())
            except (AuthenticationError, NoPermissionError):
                return False

    async with Redis.from_url(redis_url, decode_responses=True) as admin:
        assert await is_let_in()
        await admin.execute_command("ACL", "DELUSER", "node:n1")  # as a server that was wiped
        await eventually(is_let_in)
        await admin.execute_command("ACL", "SETUSER", "node:stranger", "on", "nopass", "~*", "+@all")

        async def only_known() -> bool:
            return [name for name in await admin.execute_command("ACL", "USERS") if name.startswith("node:")] == [
                "node:n1"
            ]

        await eventually(only_known)
        await sent(plane.http, "n1", "rotate", "n1", keys("m1"))
        assert await is_let_in(), "until the new secret was shown"
        await sent(plane.http, "n1", "rotate", "m1", keys("m1"))
        assert not await is_let_in()
        assert await revoked(plane.http, "n1") == 204
        assert "node:n1" not in await admin.execute_command("ACL", "USERS")
