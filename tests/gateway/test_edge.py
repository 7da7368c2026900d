"""The edge: who comes in, as whom, how often; and what a service's answer becomes."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from aiohttp import web

from services.contracts.identity import Identity, Role, TenantLimits
from services.kit.credentials import Credential, roots_of
from services.kit.tokens import Incoming
from tests.gateway.public import KEYS, a_gateway, authorization
from tests.support.crowds import known_connections
from tests.support.services import TOKEN

JOB = "/v1/jobs/job_00000000000000000000000000"


async def _echo(request: web.Request) -> web.StreamResponse:
    """Tell the caller what arrived."""
    seen = {"method": request.method, "path": request.raw_path, "headers": dict(request.headers)}
    return web.json_response(seen | {"body": (await request.read()).decode()}, headers={"etag": '"1"'})


def _problem(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    assert document["request_id"] == answer.headers["x-request-id"]
    return answer.status_code, document["code"]


async def test_a_service_learns_who_asks_and_nothing_that_a_client_made_up() -> None:
    async with a_gateway(_echo) as client:
        forged = {
            "x-wattshift-tenant": "other",
            "X-Wattshift-Role": "admin",
            "x-wattshift-key": "x",
            "cookie": "a=b",
            "forwarded": "for=x",
            "if-none-match": '"1"',
            "accept-encoding": "gzip",
        }
        answer = await client.get(f"{JOB}/footprint?limit=3&cursor=%C3%BC%26", headers=forged | authorization())
    seen = answer.json()
    received = {name.lower(): value for name, value in seen["headers"].items()}
    assert (seen["method"], seen["path"]) == ("GET", f"{JOB}/footprint?limit=3&cursor=%C3%BC%26")
    secrets = Credential.derived("telemetry", roots_of(TOKEN)).secrets
    caller = Incoming("telemetry", secrets).caller(received["authorization"], "GET", f"{JOB}/footprint")
    assert caller.service == "gateway"
    assert caller.identity == Identity(tenant_id="of-user", role=Role.USER, key_id="key_user")
    assert (received["if-none-match"], received["x-request-id"]) == ('"1"', answer.headers["x-request-id"])
    assert not {"cookie", "forwarded", "x-wattshift-tenant", "x-wattshift-role", "x-wattshift-key"} & set(received)
    assert "gzip" not in received.get("accept-encoding", "")
    assert answer.headers["etag"] == '"1"'


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1.2:3_4", True), ("x" * 129, False), ("a b", False), ("ü".encode(), False), ("", False)]
)
async def test_a_request_id_is_kept_if_it_is_harmless(given: str | bytes, kept: bool) -> None:
    async with a_gateway(_echo) as client:
        answer = await client.get(JOB, headers=authorization() | {"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) == kept
    received = {name.lower(): value for name, value in answer.json()["headers"].items()}
    assert received["x-request-id"] == answer.headers["x-request-id"]


async def test_roles_are_checked_before_the_service_is_asked() -> None:
    async with a_gateway(_echo) as client:
        found = [(await client.get("/v1/nodes", headers=authorization(role))).status_code for role in Role]
        keys = [(await client.get("/v1/keys", headers=authorization(role))).status_code for role in Role]
        nobody = await client.get("/v1/nodes")
        stranger = await client.get("/v1/nodes", headers={"authorization": "Bearer ws_" + "x" * 43})
    assert (found, keys) == ([403, 403, 403, 200, 200], [403, 403, 403, 403, 200])
    assert (_problem(nobody), _problem(stranger)) == ((401, "unauthenticated"), (401, "unauthenticated"))
    assert nobody.headers["www-authenticate"] == "Bearer"


async def test_a_read_only_key_reads_and_changes_nothing() -> None:
    async with a_gateway(_echo) as client:
        headers = authorization(Role.READ_ONLY)
        assert (await client.get(JOB, headers=headers)).status_code == 200
        refused = [await client.post("/v1/jobs", json={}, headers=headers), await client.delete(JOB, headers=headers)]
        cancelled = await client.post(f"{JOB}/cancel", headers=headers)
    assert [answer.status_code for answer in refused] == [403, 405]
    assert (cancelled.status_code, cancelled.json()["detail"]) == (403, "This API key is read-only.")


async def test_a_tenant_that_asks_too_often_is_slowed() -> None:
    async with a_gateway(_echo, limits=TenantLimits(requests_per_s=0.01, burst=3)) as client:
        answers = [await client.get(JOB, headers=authorization()) for _ in range(4)]
        other = await client.get(JOB, headers=authorization(Role.ADMIN))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert _problem(answers[3]) == (429, "rate_limited")
    assert int(answers[3].headers["retry-after"]) > 90
    assert answers[0].headers["ratelimit"].startswith('"tenant";r=2')
    assert other.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/jobs/", 404, "not_found"),
        ("GET", "/v1/jobs/a%2Fb", 404, "not_found"),
        ("GET", "/v1/jobs/%00", 404, "not_found"),
        ("GET", "/internal/submissions", 404, "not_found"),
        ("POST", "/internal/keys/resolve", 404, "not_found"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/jobs", 405, "method_not_allowed"),
        ("TRACE", "/v1/jobs", 405, "method_not_allowed"),
        ("HEAD", "/v1/events", 405, None),
        ("POST", "/", 405, "method_not_allowed"),
        ("GET", "/v1/jobs?" + "x" * 9_000, 414, "invalid_request"),
        ("GET", "/v1/carbon/zones", 503, "unavailable"),
    ],
)
async def test_what_leads_nowhere(method: str, path: str, status: int, code: str | None) -> None:
    async with a_gateway(_echo, connect_timeout_s=0.2) as client:
        answer = await client.request(method, path, headers=authorization(Role.ADMIN))
    assert answer.status_code == status
    if code:
        assert _problem(answer) == (status, code)
    if status == 405:
        assert answer.headers["allow"]


async def test_a_head_is_a_get_without_its_body() -> None:
    async with a_gateway(_echo) as client:
        answer = await client.head(JOB, headers=authorization())
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (200, b"", '"1"')


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/merge-patch+json", 200),
        (None, 415),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_bodies_are_json(content_type: str | None, status: int) -> None:
    headers = authorization(Role.ADMIN) | ({"content-type": content_type} if content_type else {})
    async with a_gateway(_echo) as client:
        answer = await client.post("/v1/keys", headers=headers, content=b"{}")
        submission = await client.post("/v1/jobs", headers=headers, content=b"{}")
    assert answer.status_code == status
    assert status == 200 or _problem(answer) == _problem(submission) == (415, "unsupported_media_type")


async def test_a_body_too_large_is_refused_announced_or_not() -> None:
    async def grow() -> Any:
        for _ in range(40):
            yield b"x" * 1_000

    async with a_gateway(_echo, max_body_bytes=20_000, max_batch_bytes=20_000) as client:
        headers = authorization(Role.ADMIN) | {"content-type": "application/json"}
        for path in ("/v1/keys", "/v1/jobs", "/v1/jobs:batch"):
            for content in (b"x" * 20_001, grow()):
                answer = await client.post(path, headers=headers, content=content)
                assert _problem(answer) == (413, "body_too_large")
        assert (await client.post("/v1/keys", headers=headers, content=b"x" * 20_000)).status_code == 200


async def test_large_bodies_together_are_bounded() -> None:
    may_answer = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return web.json_response({})

    async with a_gateway(wait, max_buffered_bytes=100_000) as client:
        headers = authorization(Role.ADMIN) | {"content-type": "application/json"}

        async def post() -> httpx.Response:
            return await client.post("/v1/keys", headers=headers, content=b"x" * 60_000)

        first = asyncio.create_task(post())
        await asyncio.wait({first}, timeout=0.3)
        assert _problem(await post()) == (503, "unavailable")
        may_answer.set()
        assert (await first).status_code == 200
        assert (await post()).status_code == 200


async def test_a_service_that_breaks_is_unavailable_and_its_page_is_not_shown() -> None:
    async def break_down(_: web.Request) -> web.StreamResponse:
        return web.Response(status=502, text="<html>Bad Gateway</html>", content_type="text/html")

    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.abort()
        return web.Response()

    for handler in (break_down, hang_up):
        async with a_gateway(handler) as client:
            assert _problem(await client.get(JOB, headers=authorization())) == (503, "unavailable")


async def test_a_service_that_refuses_the_gateway_does_not_make_the_clients_key_a_wrong_one() -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=401, text=json.dumps({"code": "unauthenticated"}), content_type="application/json")

    async with a_gateway(refuse) as client:
        answer = await client.get(JOB, headers=authorization())
    assert _problem(answer) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_services_problem_is_passed_on() -> None:
    document = {"type": "x", "title": "Conflict", "status": 409, "detail": "no", "code": "invalid_transition"}

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=409, text=json.dumps(document), content_type="application/problem+json")

    async with a_gateway(refuse) as client:
        answer = await client.post(f"{JOB}/cancel", headers=authorization())
    assert (answer.status_code, answer.json()) == (409, document)


async def test_readiness_names_what_is_missing() -> None:
    async def ready(_: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ready"})

    async with a_gateway(ready) as client:
        assert (await client.get("/healthz")).status_code == 200
        answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["status"] == "degraded"
    assert answer.json()["detail"] == "not ready: carbon service, optimizer, scheduler, serving, simulator"


async def test_the_pages_need_no_key_and_no_other_server() -> None:
    async with a_gateway(_echo) as client:
        for path in ("/", "/docs", "/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 200
            # An address in an example's text is none that a browser asks: there its quotes are written as &quot;.
            assert not re.search(r"""(=|url\(|@import)\s*["']?\s*(https?:)?//""", answer.text)
    assert all(key not in answer.text for key in KEYS.values())


async def test_a_connection_is_known_once_it_has_shown_a_valid_key() -> None:
    async with a_gateway(_echo) as client:
        await client.get("/healthz")
        await client.get(f"{JOB}/footprint", headers={"authorization": "Bearer ws_" + "x" * 43})
        assert not known_connections()
        await client.get(f"{JOB}/footprint", headers=authorization())
        assert known_connections() == 1
    assert not known_connections()
