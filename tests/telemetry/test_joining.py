"""A host joins by an invitation, under a name that no node has or in the place of one, and leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.admission.repository.jobs import JobRepository
from services.db.engine import create_engine
from services.kit.self_signed import fingerprint, new_certificate
from tests.support.control_plane import FakeAgent, running_telemetry, service_headers, telemetry_settings
from tests.telemetry.test_enrolment import ADMIN, OPERATOR, keys, revoked, sent

URL = "https://10.0.0.1:8443"


@pytest.fixture(scope="module")
async def module_http(
    module_plane: Any, database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    path = tmp_path_factory.mktemp("joining") / "certificate.pem"
    path.write_text(new_certificate("wattshift"))
    settings = telemetry_settings(database_url, redis_url, join_url=URL, tls_cert=path, tls_key=path)
    async with running_telemetry(settings) as found:
        found.headers["x-pin"] = fingerprint(path.read_text())
        yield found


@pytest.fixture
def http(plane: Any, module_http: httpx.AsyncClient) -> httpx.AsyncClient:
    """A telemetry where hosts may join."""
    return module_http


async def invited(http: httpx.AsyncClient, **spec: Any) -> str:
    answer = await http.post("/v1/nodes/invitations", json=spec, headers=service_headers(ADMIN))
    assert answer.status_code == 201, answer.text
    assert answer.json()["url"] == URL
    token, _, pin = answer.json()["token"].partition(".")
    assert pin == http.headers["x-pin"], "whoever joins knows by it whom it asks"
    return token


async def test_an_invitation_lets_one_host_in_under_one_name_once(http) -> None:
    token = await invited(http)
    first = await sent(http, "box", "enroll", token, keys("a"))
    assert first[0] == 200
    assert await sent(http, "box", "enroll", token, keys("a")) == first, "an answer that was lost can be had again"
    for name, own in (("box", "b"), ("other", "a"), ("other", "b")):
        refused = await sent(http, name, "enroll", token, keys(own))
        assert refused[0] == 401, (name, own)
    assert (await sent(http, "box", "register", "a", FakeAgent(http, "box").registration))[0] == 200


async def test_an_invitation_takes_no_name_that_a_host_has(http) -> None:
    for own in ("a", "b"):
        assert (await sent(http, f"box-{own}", "enroll", await invited(http), keys(own)))[0] == 200
    old = FakeAgent(http, "old")
    await old.register()  # of the release before: it has no credential
    token = await invited(http)
    for name in ("box-a", "old", "node-2"):
        refused = await sent(http, name, "enroll", token, keys("c"))
        assert (refused[0], "another name" in refused[1]["detail"]) == (401, True), name
    assert (await sent(http, "box-a", "register", "a", FakeAgent(http, "box-a").registration))[0] == 200
    assert (await sent(http, "box-c", "enroll", token, keys("c")))[0] == 200, "a refusal spends no token"


async def test_of_two_hosts_that_want_a_new_name_one_gets_it(http) -> None:
    tokens = [await invited(http) for _ in range(4)]
    found = await asyncio.gather(
        *(sent(http, "box", "enroll", token, keys(str(number))) for number, token in enumerate(tokens))
    )
    assert sorted(status for status, _ in found) == [200, 401, 401, 401]
    (winner,) = [number for number, (status, _) in enumerate(found) if status == 200]
    registered = await sent(http, "box", "register", str(winner), FakeAgent(http, "box").registration)
    assert registered[0] == 200


async def test_an_invitation_for_a_name_replaces_the_node(http) -> None:
    assert (await sent(http, "box", "enroll", await invited(http), keys("a")))[0] == 200
    token = await invited(http, node_id="box")
    assert (await sent(http, "other", "enroll", token, keys("b")))[0] == 401
    assert (await sent(http, "box", "enroll", token, keys("b")))[0] == 200
    registration = FakeAgent(http, "box").registration
    assert [(await sent(http, "box", "register", own, registration))[0] for own in "ab"] == [401, 200]


async def test_invitations_end_and_are_made_by_admins_where_hosts_can_join(http, plane) -> None:
    token = await invited(http, lifetime_s=0.001)
    await asyncio.sleep(0.05)
    ended = await sent(http, "box", "enroll", token, keys("a"))
    assert (ended[0], ended[1]["detail"][:22]) == (401, "This token has expired")
    assert (await sent(http, "box", "enroll", "wse_madeup", keys("a")))[0] == 401
    answer = await http.post("/v1/nodes/invitations", json={}, headers=service_headers(OPERATOR))
    assert answer.status_code == 403
    for spec, status in (({"node_id": "node-3"}, 409), ({"lifetime_s": 0}, 422), ({"node_id": ""}, 422)):
        answer = await http.post("/v1/nodes/invitations", json=spec, headers=service_headers(ADMIN))
        assert answer.status_code == status, spec
    closed = await plane.http.post("/v1/nodes/invitations", json={}, headers=service_headers(ADMIN))
    assert (closed.status_code, "wattshift up --listen" in closed.json()["detail"]) == (409, True)
    async with plane.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM node_enrolments WHERE used_as IS NOT NULL") == 0
        assert await connection.fetchval("SELECT count(*) FROM node_credentials") == 0


async def test_a_node_that_leaves_is_out_at_once_and_may_come_back(http, plane) -> None:
    assert (await sent(http, "box", "enroll", await invited(http), keys("a")))[0] == 200
    agent = FakeAgent(http, "box")
    agent.token = (await sent(http, "box", "register", "a", agent.registration))[1]["token"]
    for token in ("b", agent.token, ""):
        assert (await sent(http, "box", "leave", token, None))[0] == 401, "by its own credential alone"
    answer = await http.post("/v1/nodes/box/leave", headers={"authorization": "Bearer a"})
    assert answer.status_code == 204
    assert (await agent.post("/v1/nodes/box/heartbeat", agent.heartbeat())).status_code == 401
    for what in ("register", "leave", "certificate", "rotate"):
        body = agent.registration if what == "register" else keys("a")
        assert (await sent(http, "box", what, "a", body))[0] == 401, what
    async with plane.database.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM audit_log WHERE action = 'node.left'") == 1
    assert (await sent(http, "box", "enroll", await invited(http), keys("c")))[0] == 200


async def test_admission_knows_the_agent_of_a_node_by_its_newest_certificate(http, database_url: str) -> None:
    engine = create_engine(database_url)

    async def known() -> bytes | None:
        async with engine.connect() as connection:
            return (await JobRepository(connection).agents_up())["box"].certificate_sha256

    assert (await sent(http, "box", "enroll", await invited(http), keys("a")))[0] == 200
    agent = FakeAgent(http, "box")
    agent.token = (await sent(http, "box", "register", "a", agent.registration))[1]["token"]
    await agent.beat()
    assert await known() is None
    assert (await sent(http, "box", "certificate", "b", None))[0] == 401
    for _ in range(2):
        made = (await sent(http, "box", "certificate", "a", None))[1]["pem"]
        assert "PRIVATE KEY" in made
        assert await known() == bytes.fromhex(fingerprint(made))
    assert await revoked(http, "box") == 204
    assert (await sent(http, "box", "enroll", await invited(http, node_id="box"), keys("d")))[0] == 200
    agent.token = (await sent(http, "box", "register", "d", agent.registration))[1]["token"]
    await agent.beat()
    assert await known() is None, "that of the host before is of no use any more"
    await engine.dispose()
