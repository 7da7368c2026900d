"""Output, fetched from a node that answers as agents do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from aiohttp import web

from services.contracts.exec_sessions import ExecInput, ExecRequest
from services.contracts.identity import Identity, Role
from services.contracts.nodes import (
    LOG_EOF_HEADER,
    LOG_NEXT_OFFSET_HEADER,
    LOG_OFFSET_HEADER,
    LOG_SINCE_HEADER,
    LOG_SIZE_HEADER,
)
from services.kit.problems import ProblemError
from tests.admission.installation import Admission
from tests.support.ports import Ports
from tests.support.services import TOKEN


class FakeNode:
    """Holds output, and answers for it over HTTP."""

    def __init__(self) -> None:
        self.output: dict[tuple[str, str], bytes] = {}
        self.has_ended = False
        self.is_broken = False
        self.says: dict[str, str] = {}
        self.times: dict[float, int] | None = None
        self.asked: list[dict[str, str]] = []
        self.redirects = ""
        self.is_endless = False
        self.sent_bytes = 0
        self.elsewhere = 0

    async def redirect(self, _: web.Request) -> web.Response:
        """Answer for a command and its input as one that has been taken over does."""
        return web.Response(status=307, headers={"location": self.redirects})

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """Answer for one piece."""
        if self.is_endless:
            endless = web.StreamResponse()
            await endless.prepare(request)
            with suppress(ConnectionError):
                while self.sent_bytes < 64 * 2**20:
                    await endless.write(b"x" * 65_536)
                    self.sent_bytes += 65_536
            return endless
        if request.match_info["allocation_id"] == "elsewhere":
            self.elsewhere += 1
        elif self.redirects:
            return await self.redirect(request)
        assert request.headers["authorization"] == f"Bearer {TOKEN}", "of an agent that has not enrolled"
        self.asked.append(dict(request.query))
        whole = self.output.get((request.match_info["allocation_id"], request.query["stream"]))
        if self.is_broken:
            return web.Response(status=500, text="oh")
        if whole is None:
            return web.Response(status=404, text="{}")
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        since: dict[str, str] = {}
        if "since_s" in request.query and self.times is not None:
            offset = max(offset, self.times[float(request.query["since_s"])])
            since[LOG_SINCE_HEADER] = str(offset)
        piece = whole[offset : offset + limit]
        headers = since | {
            LOG_OFFSET_HEADER: str(offset),
            LOG_NEXT_OFFSET_HEADER: str(offset + len(piece)),
            LOG_SIZE_HEADER: str(len(whole)),
            LOG_EOF_HEADER: str(self.has_ended and offset + len(piece) == len(whole)).lower(),
        }
        return web.Response(body=piece, headers=headers | self.says, content_type="text/plain")


@pytest.fixture
async def node(admission: Admission) -> AsyncIterator[FakeNode]:
    """Node `logs-1`, registered."""
    fake, ports = FakeNode(), Ports()
    app = web.Application()
    app.router.add_route("*", "/v1/allocations/{allocation_id}/logs", fake.logs)
    app.router.add_post("/v1/allocations/{allocation_id}/exec/{session_id}", fake.redirect)
    app.router.add_put("/v1/exec/{session_id}", fake.redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    port = ports.take(28_500)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await admission.add_node("logs-1", "A100", agent_url=f"http://127.0.0.1:{port}/")
    yield fake
    await admission.database.execute("DELETE FROM nodes")
    await runner.cleanup()
    ports.release()


async def _running(admission: Admission, node: FakeNode, output: bytes = b"hello world\n") -> tuple[str, str]:
    job_id = await admission.submit()
    allocation_id = await admission.start(job_id, node="logs-1")
    node.output[allocation_id, "stdout"] = output
    return job_id, f"/v1/jobs/{job_id}/logs"


async def test_a_node_sends_admission_nowhere_else(admission: Admission, node: FakeNode) -> None:
    """Who has a node's credential must not read by it what only the control plane's own host can reach."""
    job_id, path = await _running(admission, node)
    node.output["elsewhere", "stdout"] = b"a secret of the control plane's network"
    node.redirects = "/v1/allocations/elsewhere/logs?stream=stdout&offset=0&limit=100"
    for follow in ("false", "true"):
        answer = await admission.ask("GET", path, params={"follow": follow})
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    caller = Identity(tenant_id="default", role=Role.USER, key_id="key_of_a_friend")
    sessions = admission.app.state.exec_sessions
    for asking in (
        sessions.run(caller, job_id, ExecRequest(command=["true"])),
        sessions.send(caller, job_id, f"exec_1_0_{'0' * 32}", ExecInput()),
    ):
        with pytest.raises(ProblemError) as caught:
            await asking
        assert caught.value.status == 503
    assert node.elsewhere == 0


async def test_a_node_whose_answer_has_no_end_does_not_answer(admission: Admission, node: FakeNode) -> None:
    """Nor does it fill the memory of admission, which is everybody's."""
    _, path = await _running(admission, node)
    node.is_endless = True
    answer = await admission.ask("GET", path, params={"limit": 5})
    assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
    assert node.sent_bytes < 64 * 2**20


async def test_output_is_read_piece_by_piece(admission: Admission, node: FakeNode) -> None:
    _, path = await _running(admission, node)
    first = await admission.ask("GET", path, params={"limit": 5})
    assert (first.text, first.headers[LOG_NEXT_OFFSET_HEADER], first.headers[LOG_SIZE_HEADER]) == ("hello", "5", "12")
    assert first.headers["content-type"] == "text/plain; charset=utf-8"
    rest = await admission.ask("GET", path, params={"offset": 5})
    assert rest.text == " world\n"


async def test_output_is_read_from_a_time_on(admission: Admission, node: FakeNode) -> None:
    _, path = await _running(admission, node)
    node.times = {1_793_520_000.25: 6}
    since = {"since": "2026-11-01T09:00:00.250+01:00"}

    piece = await admission.ask("GET", path, params=since)
    assert (piece.text, piece.headers[LOG_OFFSET_HEADER]) == ("world\n", "6")
    assert LOG_SINCE_HEADER not in piece.headers
    assert (await admission.ask("GET", path, params=since | {"offset": 8})).text == "rld\n"
    node.has_ended = True
    assert (await admission.ask("GET", path, params=since | {"follow": "true", "limit": 2})).text == "world\n"


async def test_a_node_that_knows_no_times_does_not_answer_with_all(admission: Admission, node: FakeNode) -> None:
    _, path = await _running(admission, node)
    for follow in ("false", "true"):
        params = {"since": "2026-11-01T08:00:00Z", "follow": follow}
        answer = await admission.ask("GET", path, params=params)
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        assert "Node logs-1 does not know when this output was written" in answer.json()["detail"]


async def test_earlier_gangs_are_remembered(admission: Admission, node: FakeNode) -> None:
    job_id, path = await _running(admission, node, b"first")
    await admission.database.execute("UPDATE allocations SET state = 'ended' WHERE job_id = $1", job_id)
    second = await admission.start(job_id, node="logs-1")
    node.output[second, "stdout"], node.output[second, "stderr"] = b"second", b"oops"
    found = [
        (await admission.ask("GET", path, params=params)).text
        for params in ({}, {"generation": 1}, {"generation": 2}, {"stream": "stderr"}, {"node": "logs-1"})
    ]
    assert found == ["second", "first", "second", "oops", "second"]


async def test_followed_output_ends_with_the_gang(admission: Admission, node: FakeNode) -> None:
    job_id, path = await _running(admission, node, b"one ")
    following = asyncio.create_task(admission.ask("GET", path, params={"follow": "true", "limit": 3}))
    assert not (await asyncio.wait({following}, timeout=0.3))[0]
    node.output[f"{job_id}.1", "stdout"] += b"two "
    node.is_broken = True  # the node is away for a moment
    assert not (await asyncio.wait({following}, timeout=0.6))[0]
    node.is_broken = False
    node.output[f"{job_id}.1", "stdout"] += b"three"
    node.has_ended = True
    assert (await asyncio.wait_for(following, 20)).text == "one two three"


async def test_a_node_that_went_with_its_gang_ends_the_stream(admission: Admission, node: FakeNode) -> None:
    job_id, path = await _running(admission, node, b"last words")
    following = asyncio.create_task(admission.ask("GET", path, params={"follow": "true"}))
    assert not (await asyncio.wait({following}, timeout=0.3))[0]
    node.is_broken = True
    await admission.end(job_id, "failed")
    assert (await asyncio.wait_for(following, 20)).text == "last words"


@pytest.mark.parametrize(
    ("params", "status", "code"),
    [
        ({"generation": 2}, 404, "no_data"),
        ({"node": "other"}, 404, "no_data"),
        ({"stream": "stderr"}, 404, "no_data"),
        ({"stream": "x"}, 422, "invalid_request"),
        ({"generation": 2**40}, 422, "invalid_request"),
        ({"offset": -1}, 422, "invalid_request"),
        ({"limit": 10**9}, 422, "invalid_request"),
        ({"since": "10m"}, 422, "invalid_request"),
    ],
)
async def test_output_that_is_not_there(
    admission: Admission, node: FakeNode, params: dict[str, str], status: int, code: str
) -> None:
    _, path = await _running(admission, node)
    answer = await admission.ask("GET", path, params=params)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_a_job_that_waits_has_no_output(admission: Admission) -> None:
    answer = await admission.ask("GET", f"/v1/jobs/{await admission.submit()}/logs")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_data")


async def test_a_node_that_does_not_answer_is_named(admission: Admission) -> None:
    job_id = await admission.submit()
    await admission.start(job_id, node="gone")
    for has_address in (False, True):
        if has_address:
            await admission.add_node("gone", "A100", agent_url="http://127.0.0.1:1")
        answer = await admission.ask("GET", f"/v1/jobs/{job_id}/logs")
        assert (answer.status_code, answer.json()["code"]) == (503, "unavailable")
        assert "gone" in answer.json()["detail"]
    await admission.database.execute("DELETE FROM nodes")


@pytest.mark.parametrize("said", ["\u00b2", "9" * 5_000])
async def test_where_a_node_says_that_output_goes_on_is_believed_if_it_is_a_number(
    admission: Admission, node: FakeNode, said: str
) -> None:
    _, path = await _running(admission, node)
    node.says = {LOG_NEXT_OFFSET_HEADER: said}
    answer = await admission.ask("GET", path)
    assert (answer.status_code, answer.text) == (200, "hello world\n")
