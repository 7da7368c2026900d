"""What nodes get for the gangs that they start, and what no other caller gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.db.database import Database
from services.db.sealing import Sealer, new_instance_key, open_instance_key
from tests.support.control_plane import (
    JOIN_TOKEN,
    SERVICE_TOKEN,
    FakeAgent,
    accept_job,
    allocate,
    end_allocation,
    running_telemetry,
    telemetry_settings,
)

KEY = "a-key-that-seals-secrets-in-tests-only"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """The database, with the tenant of the jobs."""
    found = await Database.open(database_url, size=2, application_name="test")
    async with found.connection() as connection:
        await connection.execute(
            "INSERT INTO tenants (id, limits) VALUES ('t', '{}'), ('u', '{}') ON CONFLICT DO NOTHING"
        )
        await connection.execute("TRUNCATE secrets")
    try:
        yield found
    finally:
        await found.close()


@pytest.fixture
async def http(database_url: str, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Telemetry with a key for secrets."""
    async with running_telemetry(telemetry_settings(database_url, redis_url, secrets_key=KEY)) as found:
        yield found


@pytest.fixture
async def agent(http: httpx.AsyncClient) -> FakeAgent:
    """A registered node."""
    return await a_node(http, "n1")


async def a_node(http: httpx.AsyncClient, name: str) -> FakeAgent:
    agent = FakeAgent(http, name)
    await agent.register()
    return agent


async def keep(
    database: Database, name: str, value: str, *, tenant: str = "t", project: str = "", key: str = KEY
) -> None:
    sealed = Sealer(key).seal(value, tenant, project, name)
    async with database.connection() as connection:
        await connection.execute(
            "INSERT INTO secrets (tenant_id, project, name, version, sealed) VALUES ($1, $2, $3, 1, $4)",
            *(tenant, project, name, sealed),
        )


async def a_gang(database: Database, *names: str, node: str = "n1", **spec: Any) -> str:
    uses = [{"name": name, "env": f"V{number}"} for number, name in enumerate(names)]
    return await allocate(database, await accept_job(database, secrets=uses or None, **spec), {node: [0]})


async def ask(agent: FakeAgent, gang: str, **options: Any) -> httpx.Response:
    return await agent.post(f"/v1/nodes/{agent.node_id}/secrets", {"allocation_id": gang}, **options)


async def test_a_node_opens_the_secrets_of_the_gang_it_starts(database: Database, agent: FakeAgent) -> None:
    await keep(database, "A", "one\ntwo")
    await keep(database, "B", "of the tenant")
    await keep(database, "B", "of the project", project="vision")
    await keep(database, "B", "of another project", project="aaa")
    gang = await a_gang(database, "A", "B", "A", project="vision")

    answer = await ask(agent, gang)

    assert answer.status_code == 200
    assert answer.json() == {
        "secrets": [{"name": "A", "value": "one\ntwo"}, {"name": "B", "value": "of the project"}],
        "missing": [],
    }
    await end_allocation(database, gang)


async def test_nobody_else_opens_them(database: Database, http: httpx.AsyncClient, agent: FakeAgent) -> None:
    await keep(database, "A", "hunter2")
    other = await a_node(http, "n2")
    gang = await a_gang(database, "A")

    refused = [await ask(agent, gang, token=token) for token in ("", JOIN_TOKEN, SERVICE_TOKEN, other.token)]
    refused += [await ask(other, gang), await ask(agent, "job_unknown.1")]
    assert [answer.status_code for answer in refused] == [401, 401, 401, 401, 404, 404]
    await end_allocation(database, gang)
    refused.append(await ask(agent, gang))
    assert refused[-1].status_code == 404, "a gang that has ended gets nothing any more"
    assert all("hunter2" not in answer.text for answer in refused)


async def test_a_gang_whose_part_on_the_node_is_over_gets_nothing(database: Database, agent: FakeAgent) -> None:
    await keep(database, "A", "hunter2")
    gang = await a_gang(database, "A")
    async with database.connection() as connection:
        await connection.execute("INSERT INTO rank_ends (allocation_id, node_id) VALUES ($1, 'n1')", gang)

    assert (await ask(agent, gang)).status_code == 404
    await end_allocation(database, gang)


async def test_what_cannot_be_had_is_named_and_the_rest_is_not_held_back(database: Database, agent: FakeAgent) -> None:
    await keep(database, "A", "hunter2")
    await keep(database, "FOREIGN", "hunter3", tenant="u")
    await keep(database, "OLD", "hunter4", key="a-key-that-the-installation-has-lost")
    gang = await a_gang(database, "A", "FOREIGN", "OLD")

    answer = (await ask(agent, gang)).json()

    assert answer["secrets"] == [{"name": "A", "value": "hunter2"}]
    assert answer["missing"] == [
        "The secret FOREIGN does not exist any more.",
        "The secret OLD was sealed with a key that the control plane does not have; set it again.",
    ]
    await end_allocation(database, gang)


async def test_an_instance_s_node_gets_its_key_and_no_job_that_takes_its_name(
    database: Database, agent: FakeAgent
) -> None:
    sealed = new_instance_key(Sealer(KEY), "t", "instance_1")
    assert sealed is not None
    named: dict[str, Any] = {"environment": {"WATTSHIFT_INSTANCE": "instance_1"}}
    service = {"zone": "DE", "node_labels": {}}
    server, claims, stranger = [
        await accept_job(database, **spec)
        for spec in (named | {"service": service}, named, named | {"service": service})
    ]
    async with database.connection() as connection:
        await connection.execute("DELETE FROM pool_instances")
        await connection.execute(
            "INSERT INTO pool_instances (id, pool, tenant_id, place, mode, terms, state, sealed_key) SELECT "
            "'instance_1', 'p', tenant_id, 'here', 'one', '{}', 'wanted', $2 FROM jobs WHERE id = $1",
            *(server, sealed),
        )
        await connection.execute(
            "INSERT INTO submissions (tenant_id, idempotency_key, body_sha256, job_ids, batch) "
            "SELECT tenant_id, 'instance_1', '', ARRAY[id], false FROM jobs WHERE id = $1",
            server,
        )
    gangs = [await allocate(database, job, {"n1": [device]}) for device, job in enumerate((server, claims, stranger))]
    answers = [(await ask(agent, gang)).json() for gang in gangs]
    key = open_instance_key(Sealer(KEY), sealed, "t", "instance_1")
    assert [each.get("instance_key") for each in answers] == [key, None, None]
    for gang in gangs:
        await end_allocation(database, gang)


async def test_a_job_without_secrets_has_none(database: Database, agent: FakeAgent) -> None:
    gang = await a_gang(database)
    assert (await ask(agent, gang)).json() == {"secrets": [], "missing": []}
    await end_allocation(database, gang)
