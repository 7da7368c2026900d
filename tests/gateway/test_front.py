"""The public API through real processes: what a user does, and what a user should not get to do."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.contracts.jobs import Job, JobEvent, JobList, SubmittedJob
from services.contracts.problems import Problem
from tests.gateway.conftest import Front

SPEC: dict[str, Any] = {"name": "train", "command": ["python", "train.py"]}


async def _submit(front: Front, headers: dict[str, str] | None = None, **changes: Any) -> str:
    answer = await front.client.post("/v1/jobs", json=SPEC | changes, headers=headers)
    assert answer.status_code == 201, answer.text
    return SubmittedJob.model_validate_json(answer.content).id


async def test_a_job_from_submission_to_its_end(front: Front) -> None:
    answer = await front.client.post("/v1/jobs", json=SPEC, headers={"idempotency-key": "story"})
    job = SubmittedJob.model_validate_json(answer.content)
    assert (answer.status_code, answer.headers["location"]) == (201, f"/v1/jobs/{job.id}")
    again = await front.client.post("/v1/jobs", json=SPEC, headers={"idempotency-key": "story"})
    assert (again.status_code, again.content) == (201, answer.content)
    assert again.headers["idempotency-replayed"] == "true"

    events: list[JobEvent] = []
    async with asyncio.timeout(20), front.client.stream("GET", f"/v1/jobs/{job.id}/events") as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                events.append(JobEvent.model_validate_json(line.removeprefix("data: ")))
                if events[-1].type == "job.submitted":
                    assert (await front.client.post(f"/v1/jobs/{job.id}/hold")).json()["state"] == "held"
                if events[-1].type == "job.held":
                    assert (await front.client.post(f"/v1/jobs/{job.id}/cancel")).json()["state"] == "cancelled"
    assert [event.type for event in events] == ["job.submitted", "job.held", "job.cancelled"]
    over = await front.client.get(f"/v1/jobs/{job.id}/events", headers={"last-event-id": events[-1].id})
    assert over.status_code == 204


async def test_a_batch_and_the_pages_of_a_list(front: Front) -> None:
    caller = await front.key_for("pages")
    batch = {"jobs": [SPEC | {"name": f"n-{i}"} for i in range(25)]}
    assert (await front.client.post("/v1/jobs:batch", json=batch, headers=caller)).status_code == 201
    names: list[str] = []
    cursor: str | None = None
    while not names or cursor:
        params = {"limit": 10} | ({"cursor": cursor} if cursor else {})
        page = JobList.model_validate_json((await front.client.get("/v1/jobs", params=params, headers=caller)).content)
        names, cursor = names + [job.name for job in page.items], page.next_cursor
    assert names == [f"n-{i}" for i in reversed(range(25))]


async def test_two_hundred_submissions_with_one_key_are_one_job(front: Front) -> None:
    caller = await front.key_for("stampede") | {"idempotency-key": "one"}
    answers = await asyncio.gather(*(front.client.post("/v1/jobs", json=SPEC, headers=caller) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in answers) == 1
    assert await front.count("jobs", "tenant_id = 'stampede'") == 1


async def test_a_quota_is_exact_through_the_gateway(front: Front) -> None:
    caller = await front.key_for("quota", max_active_jobs=7)
    answers = await asyncio.gather(*(front.client.post("/v1/jobs", json=SPEC, headers=caller) for _ in range(60)))
    refused = [answer.json()["code"] for answer in answers if answer.status_code != 201]
    assert refused == ["quota_exceeded"] * 53
    assert await front.count("jobs", "tenant_id = 'quota'") == 7


async def test_nobody_reaches_what_is_anothers(front: Front) -> None:
    mine = await _submit(front)
    stranger = await front.key_for("stranger")
    for method, path in (("GET", ""), ("POST", "/cancel"), ("POST", "/hold"), ("GET", "/events"), ("GET", "/logs")):
        answer = await front.client.request(method, f"/v1/jobs/{mine}{path}", headers=stranger)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    for path in ("/v1/tenants", "/v1/keys", "/v1/audit", "/v1/nodes", "/v1/invariants"):
        answer = await front.client.get(path, headers=stranger)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    forged = stranger | {"x-wattshift-tenant": "default", "x-wattshift-role": "admin"}
    assert (await front.client.get(f"/v1/jobs/{mine}", headers=forged)).status_code == 404
    assert Job.model_validate_json((await front.client.get(f"/v1/jobs/{mine}")).content).state == "queued"


async def test_a_revoked_key_stops_within_seconds(front: Front) -> None:
    caller = await front.key_for("revoked")
    assert (await front.client.get("/v1/jobs", headers=caller)).status_code == 200
    assert (await front.client.delete(f"/v1/keys/{caller['x-key-id']}")).status_code == 204
    status = 200
    async with asyncio.timeout(8):
        while status == 200:
            status = (await front.client.get("/v1/jobs", headers=caller)).status_code
    assert status == 401


DEEP = "[" * 200_000
BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "body_not_json"),
    (b"{", 400, "body_not_json"),
    (b"\xff\xfe{}", 400, "body_not_json"),
    (b'{"name": "\xc3\x28"}', 400, "body_not_json"),
    (b'\xef\xbb\xbf{"name": "a", "command": ["x"]}', 400, "body_not_json"),
    (DEEP.encode(), 400, "body_not_json"),
    (b'{"name": "a", "command": ["\\ud83d"]}', 400, "body_not_json"),
    (b'{"name": "a", "command": ["\\u0000"]}', 422, "invalid_request"),
    (b'{"name": "a", "command": ["x"], "priority": ' + b"9" * 5_000 + b"}", 400, "body_not_json"),
    (b'{"name": "a", "command": ["x"], "work": {"total": 1e400}}', 422, "invalid_request"),
    (b'{"name": "a", "command": ["x"], "work": {"total": NaN}}', 422, "invalid_request"),
    (b'{"name": "a", "command": "x"}', 422, "invalid_request"),
    (b'[{"name": "a", "command": ["x"]}]', 422, "invalid_request"),
    (b'"x"', 422, "invalid_request"),
    (b"null", 422, "invalid_request"),
    (b"x" * (1024 * 1024 + 1), 413, "body_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BODIES, ids=lambda value: repr(value)[:30])
@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/tenants", "/v1/keys"])
async def test_a_bad_body_changes_nothing(front: Front, path: str, body: bytes, status: int, code: str) -> None:
    tables = ("jobs", "job_events", "submissions", "tenants", "api_keys")
    before = [await front.count(table) for table in tables]
    answer = await front.client.post(path, content=body, headers={"content-type": "application/json"})
    problem = Problem.model_validate_json(answer.content)
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem.request_id == answer.headers["x-request-id"]
    if path == "/v1/jobs":
        assert (answer.status_code, problem.code) == (status, code)
    else:
        assert answer.status_code in (400, 413, 422)
    assert [await front.count(table) for table in tables] == before


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "ü".encode(), "a\tb"])
async def test_a_bad_idempotency_key_is_pointed_out(front: Front, key: str | bytes) -> None:
    answer = await front.client.post("/v1/jobs", json=SPEC, headers={"idempotency-key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "#Idempotency-Key"


@pytest.mark.parametrize(
    "query",
    [
        "?limit=0",
        "?limit=x",
        "?cursor=x",
        "?cursor=%00",
        "?state=x",
        "?name=%00",
        "?q=%00",
        "?label=%00",
        "?foo=1",
        "?submitted_after=x",
        "?limit=" + "9" * 400,
        "?q=%ff",
        "?%00=1",
        "?state=%ed%a0%80",
    ],
)
async def test_a_bad_question_gets_a_problem(front: Front, query: str) -> None:
    answer = await front.client.get(f"/v1/jobs{query}")
    assert answer.status_code in (200, 422), answer.text
    assert (answer.status_code == 200) == (query == "?q=%ff")  # a character that stands for itself, and is in no name
    if answer.status_code == 422:
        assert Problem.model_validate_json(answer.content).errors


async def _raw(front: Front, request: bytes) -> bytes:
    host, _, port = front.services.urls["GATEWAY"].removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(10):
            return await reader.read(65_536)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "line",
    [b"GET /v1/jobs/%00 HTTP/1.1", b"GET /v1/jobs/..%2f..%2fetc HTTP/1.1", b"GET /v1/jobs/../../etc/passwd HTTP/1.1",
     b"GET //v1/jobs HTTP/1.1", b"GET /v1/jobs/" + b"x" * 7_000 + b" HTTP/1.1", b"GET /\xff\xfe HTTP/1.1",
     b"GET /v1/jobs/%zz HTTP/1.1", b"BREW /v1/jobs HTTP/1.1", b"GET /v1/jobs?" + b"x" * 20_000 + b" HTTP/1.1"],
    ids=lambda line: line[:24].decode("latin-1"),
)  # fmt: skip
async def test_malformed_paths_lead_nowhere(front: Front, line: bytes) -> None:
    key = front.services.admin_key().encode()
    answer = await _raw(front, line + b"\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n\r\n")
    status = int(answer[9:12])
    assert status in (400, 404, 405, 414), answer[:200]


async def test_an_idle_gateway_answers_a_lone_request_quickly(front: Front) -> None:
    """Nagle's algorithm and a delayed acknowledgement together would cost 40 ms at every answer."""
    await _submit(front)
    loop = asyncio.get_running_loop()
    taken_s: list[float] = []
    for _ in range(20):
        start_s = loop.time()
        await _submit(front)
        taken_s.append(loop.time() - start_s)
    assert min(taken_s) < 0.03, taken_s


async def test_the_document_is_the_same_for_everybody(front: Front) -> None:
    async with httpx.AsyncClient(base_url=front.services.urls["GATEWAY"]) as anybody:
        document = json.loads((await anybody.get("/openapi.json")).content)
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]) > {"/v1/jobs", "/v1/jobs:batch", "/v1/nodes", "/emissions/bylocation"}
