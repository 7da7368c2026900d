"""Pools through the gateway: roles, headers and bodies of their size, with the serving behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.support.pools import a_pool, windows_ago
from tests.support.services import Services, services


@pytest.fixture(scope="module")
def started(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The three processes; the carbon service is away, so that any zone is taken."""
    with (
        services(tmp_path_factory.mktemp("pools"), database_url, redis_url) as found,
        found.started("services.admission.app"),
        found.started("services.serving.app"),
        found.started("gateway.app", ready_path="/healthz"),
    ):
        yield found


@pytest.fixture(scope="module")
async def client(started: Services) -> AsyncIterator[httpx.AsyncClient]:
    """The public API with an admin's key."""
    headers = {"authorization": f"Bearer {started.admin_key()}"}
    async with httpx.AsyncClient(base_url=started.urls["GATEWAY"], headers=headers, timeout=30) as made:
        yield made


async def key_of(client: httpx.AsyncClient, tenant: str, role: str) -> dict[str, str]:
    await client.post("/v1/tenants", json={"id": tenant})
    made = await client.post("/v1/keys", json={"tenant_id": tenant, "role": role})
    return {"authorization": f"Bearer {made.json()['secret']}"}


async def test_operators_make_pools_and_their_tenants_report_and_read(client: httpx.AsyncClient) -> None:
    operator, user = await key_of(client, "acme", "operator"), await key_of(client, "acme", "user")
    stranger = await key_of(client, "umbra", "user")
    refused = await client.put("/v1/pools/chat", json=a_pool(), headers=user)
    assert (refused.status_code, refused.json()["code"]) == (403, "forbidden")
    made = await client.put("/v1/pools/chat", json=a_pool(mode="fixed"), headers=operator)
    assert (made.status_code, made.json()["tenant_id"]) == (201, "acme")
    assert (await client.get("/v1/pools/chat", headers=user)).json()["name"] == "chat"
    body = {"source": "r1", "windows": windows_ago(2, [[10, 10]])}
    reported = await client.post("/v1/pools/chat/traffic", json=body, headers=user)
    assert (reported.status_code, reported.json()) == (200, {"windows": 2, "requests": 2})
    for method, path in (("GET", ""), ("GET", "/plans"), ("GET", "/instances"), ("POST", "/traffic")):
        json = body if method == "POST" else None
        answer = await client.request(method, f"/v1/pools/chat{path}", json=json, headers=stranger)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path


async def test_an_etag_travels_both_ways(client: httpx.AsyncClient) -> None:
    tag = (await client.put("/v1/pools/tagged", json=a_pool(mode="fixed"))).headers["etag"]
    again = await client.put("/v1/pools/tagged", json=a_pool(min_up_s=5.0), headers={"if-match": tag})
    assert (again.status_code, again.json()["revision"]) == (200, 2)
    late = await client.put("/v1/pools/tagged", json=a_pool(min_up_s=6.0), headers={"if-match": tag})
    assert (late.status_code, late.headers["content-type"]) == (412, "application/problem+json")


async def test_a_report_may_be_as_large_as_it_says(client: httpx.AsyncClient) -> None:
    await client.put("/v1/pools/large", json=a_pool(mode="fixed"))
    windows = windows_ago(100, [[123_456, 123_456]] * 2_000)
    answer = await client.post("/v1/pools/large/traffic", json={"source": "r1", "windows": windows})
    assert (answer.status_code, answer.json()) == (200, {"windows": 100, "requests": 200_000})
    windows[0]["requests"].append([1, 1])
    answer = await client.post("/v1/pools/large/traffic", json={"source": "r1", "windows": windows})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
