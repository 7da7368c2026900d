"""The edge with a table of another process than the gateway: it takes any rows that say method, path and role."""

from dataclasses import dataclass

import httpx
import pytest
from starlette.applications import Starlette

from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit.edge.edge import Edge, EdgeMiddleware, OpenedEdge
from services.kit.edge.exchange import Exchange
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import RateLimiter

KEY = {"authorization": f"Bearer ws_{'k' * 43}"}


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    method: str
    path: str
    role: Role = Role.USER
    answers_head: bool = True


ROWS = (
    Row("GET", "/v1/models"),
    Row("POST", "/v1/models", Role.OPERATOR),
    Row("GET", "/v1/stream", answers_head=False),
    Row("GET", "/v1/broken"),
)


async def _resolve(_: str) -> ResolvedKey:
    identity = Identity(tenant_id="t", role=Role.USER, key_id="key_1")
    return ResolvedKey(identity=identity, limits=TenantLimits(requests_per_s=0.001, burst=5))


async def _answer(exchange: Exchange, route: Row, path: str, key: ResolvedKey) -> None:
    if path == "/v1/broken":
        raise KeyError(path)
    body = f"{route.method} {path} {key.identity.tenant_id}".encode()
    await exchange.answer(200, [(b"content-type", b"text/plain")], body)


@pytest.fixture
def client() -> httpx.AsyncClient:
    opened = OpenedEdge[Row]()
    cache = KeyCache(_resolve, max_age_s=3, grace_s=60, size=10)
    opened.edge = Edge(ROWS, cache, RateLimiter(), _answer)
    transport = httpx.ASGITransport(EdgeMiddleware(Starlette(), opened))
    return httpx.AsyncClient(transport=transport, base_url="http://edge", headers=KEY)


async def test_a_row_is_answered_by_the_process(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models", headers={"x-request-id": "r1"})

    assert (answer.status_code, answer.text) == (200, "GET /v1/models t")
    assert answer.headers["x-request-id"] == "r1"
    assert answer.headers["ratelimit"].startswith('"tenant";r=4')


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/v1/stream", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models", 403),
        ("GET", "/v1/models?" + "x" * 9_000, 414),
        ("GET", "/v1/broken", 500),
        ("GET", "/v1/nowhere", 404),
    ],
)
async def test_everything_else_is_refused(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    answer = await client.request(method, path)

    assert answer.status_code == status
    assert answer.headers["x-request-id"]


async def test_a_request_without_a_key_or_beyond_the_rate_is_refused(client: httpx.AsyncClient) -> None:
    without = await client.get("/v1/models", headers={"authorization": "x"})
    statuses = [(await client.get("/v1/models")).status_code for _ in range(6)]

    assert without.status_code == 401
    assert statuses == [200] * 5 + [429]
