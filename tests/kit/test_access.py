"""The access log: one line for each request, with who, what, how it ended and under which id, and with no secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from services.contracts.identity import Identity, ResolvedKey, Role, TenantLimits
from services.kit import logging as service_logging
from services.kit import traces
from services.kit.access import _REPORTS, AccessLog  # pyright: ignore[reportPrivateUsage]
from services.kit.app import create_service
from services.kit.credentials import caller_key
from services.kit.edge.edge import Edge, EdgeMiddleware, OpenedEdge
from services.kit.edge.exchange import Exchange
from services.kit.edge.keys import KeyCache
from services.kit.edge.limits import RateLimiter
from services.kit.heads import Server, ServerConfig
from services.kit.logging import Log
from services.kit.settings import SharedSettings
from services.kit.sockets import listening
from services.kit.tokens import Incoming, Outgoing
from services.telemetry.endpoints import router as telemetry
from tests.kit.test_edge import Row

SECRET = b"of-the-scheduler-and-long-enough"
USER = Identity(tenant_id="acme", role=Role.OPERATOR, key_id="key_1", user_id="user_1")
API_KEY = f"ws_{'k' * 43}"
GIVEN = f"00-{'a' * 32}-{'b' * 16}-01"
HIDDEN = "hunter2"

Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def logged() -> Iterator[Lines]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(service_logging._Formatter("oven", as_json=True))  # pyright: ignore[reportPrivateUsage]
    loggers = [logging.getLogger(name) for name in ("services", "oven")]
    for each in loggers:
        each.addHandler(handler)
        each.setLevel(logging.INFO)

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in written.getvalue().splitlines()]
        written.seek(0)
        written.truncate()
        return found

    yield lines
    for each in loggers:
        each.removeHandler(handler)
        each.setLevel(logging.NOTSET)


def a_service() -> FastAPI:
    """Return the scheduler as far as its token goes, with a route that shows what it knows of its request."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield

    async def ready() -> None:
        return

    settings = SharedSettings(WATTSHIFT_SERVICE_TOKEN="a-token-of-sixteen-and-more")
    app = create_service("oven", settings, lifespan=lifespan, readiness=ready, incoming=Incoming("scheduler", [SECRET]))

    @app.get("/v1/ovens/{name}")
    async def read(name: str) -> dict[str, str]:
        Log("oven").info("oven.read")
        return traces.passed_on()

    @app.get("/v1/broken")
    async def broken() -> Response:
        raise KeyError(HIDDEN)

    return app


def asking(app: Any, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(AccessLog(app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://kitchen", headers=headers)


def as_gateway(identity: Identity | None = USER) -> dict[str, str]:
    return Outgoing("gateway", "scheduler", caller_key(SECRET, "gateway")).headers(identity)


async def test_a_service_says_who_did_what_under_which_id(logged: Lines) -> None:
    async with asking(a_service(), **as_gateway(), **{"x-request-id": "mine-1", "traceparent": GIVEN}) as http:
        answer = await http.get("/v1/ovens/one?code=" + HIDDEN)

    read, line = logged()
    assert (read["event"], read["request_id"], read["trace_id"]) == ("oven.read", "mine-1", "a" * 32)
    assert line.pop("duration_ms") >= 0
    del line["at"]
    assert line == {
        "level": "info",
        "process": "oven",
        "event": "request.answered",
        "method": "GET",
        "status": 200,
        "route": "/v1/ovens/{name}",
        "path": "/v1/ovens/one",
        "tenant_id": "acme",
        "key_id": "key_1",
        "role": "operator",
        "user_id": "user_1",
        "service": "gateway",
        "bytes": len(answer.content),
        "request_id": "mine-1",
        "trace_id": "a" * 32,
    }
    assert answer.json() == {"x-request-id": "mine-1", "traceparent": GIVEN}  # what it would send to others


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/ovens/one", {"authorization": f"Bearer {HIDDEN}"}, 401),
        ("/v1/broken", None, 500),
        (f"/v1/{HIDDEN}", None, 404),
        ("/metrics", {}, 401),
    ],
)
async def test_what_is_refused_and_what_fails_is_logged(
    logged: Lines, path: str, headers: dict[str, str] | None, status: int
) -> None:
    async with asking(a_service(), **(as_gateway() if headers is None else headers)) as http:
        await http.get(path)

    line = logged()[-1]
    assert (line["event"], line["status"]) == ("request.answered", status)
    assert HIDDEN not in json.dumps(line)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/ovens/one", "/metrics"])
async def test_probes_and_what_services_ask_for_themselves_are_for_debugging(logged: Lines, path: str) -> None:
    identity = USER if path == "/metrics" else None
    async with asking(a_service(), **as_gateway(identity)) as http:
        assert (await http.get(path)).status_code == 200
        assert [line["event"] for line in logged() if line["event"] != "oven.read"] == []
        logging.getLogger("services").setLevel("DEBUG")
        await http.get(path)
        assert [line["level"] for line in logged() if line["event"] == "request.answered"] == ["debug"]


async def test_of_reports_of_nodes_only_what_is_refused_is_logged(logged: Lines) -> None:
    app = FastAPI()
    for path in sorted(_REPORTS):
        assert [each for each in telemetry.routes if getattr(each, "path", "") == path], path

        @app.post(path)
        async def store(node_id: str) -> Response:
            return Response(status_code=401 if node_id == "stranger" else 200)

        async with asking(app) as http:
            await http.post(path.format(node_id="node-1"))
            assert logged() == []
            await http.post(path.format(node_id="stranger"))
            assert [(line["route"], line["status"]) for line in logged()] == [(path, 401)]


async def _resolve(_: str) -> ResolvedKey:
    return ResolvedKey(identity=USER, limits=TenantLimits())


async def _answer(exchange: Exchange, route: Row, path: str, key: ResolvedKey) -> None:
    await exchange.answer(200, [], b"cake")


def an_edge() -> EdgeMiddleware:
    opened = OpenedEdge[Row]()
    cache = KeyCache(_resolve, max_age_s=3, grace_s=60, size=10)
    opened.edge = Edge((Row("GET", "/v1/cakes/{name}"),), cache, RateLimiter(), _answer)
    pages = FastAPI()

    @pages.get("/shelf/{name}")
    async def shelf(name: str) -> str:
        return name

    return EdgeMiddleware(pages, opened)


async def test_a_request_on_the_same_connection_has_nothing_of_the_one_before(logged: Lines) -> None:
    async with asking(a_service(), **as_gateway()) as http:
        await http.get("/v1/ovens/one", headers={"x-request-id": "mine-1", "traceparent": GIVEN})
        await http.get("/v1/ovens/two")

    lines = [(line.get("request_id"), line.get("trace_id")) for line in logged()]
    assert lines == [("mine-1", "a" * 32)] * 2 + [(None, None)] * 2


async def test_the_edge_says_who_did_what(logged: Lines) -> None:
    async with asking(an_edge(), authorization=f"Bearer {API_KEY}") as http:
        answer = await http.get(f"/v1/cakes/one?key={HIDDEN}", headers={"x-request-id": "mine-2"})
        await http.get("/shelf/two")

    cake, page = logged()
    assert (cake["route"], cake["path"]) == ("/v1/cakes/{name}", "/v1/cakes/one")
    assert (cake["tenant_id"], cake["key_id"], cake["role"], cake["user_id"]) == ("acme", "key_1", "operator", "user_1")
    assert (cake["status"], cake["bytes"], cake["client"], cake["request_id"]) == (200, 4, "127.0.0.1", "mine-2")
    assert answer.headers["x-request-id"] == "mine-2"
    assert (page["route"], "tenant_id" in page, len(page["request_id"])) == ("/shelf/{name}", False, 16)
    assert API_KEY not in json.dumps([cake, page])
    assert HIDDEN not in json.dumps([cake, page])


@pytest.mark.parametrize("given", [b"a\nb", b"a\x1b[2J", b"x" * 1_000_000, b"a b", "\u202e".encode(), b""])
async def test_an_id_that_could_forge_a_line_is_replaced_everywhere(logged: Lines, given: bytes) -> None:
    async with asking(an_edge(), authorization=f"Bearer {API_KEY}") as http:
        request = http.build_request("GET", "/v1/cakes/one")
        request.headers = httpx.Headers([*request.headers.raw, (b"x-request-id", given)])
        answer = await http.send(request)

    (line,) = logged()
    assert line["request_id"] == answer.headers["x-request-id"]
    assert len(line["request_id"]) == 16
    assert int(line["request_id"], 16) >= 0


@pytest.mark.parametrize("given", ["req_011CSHoEeqs5C35K2UUqR7Fy", "tenant/42;attempt=3", "a" * 128, '{"run":"7"}'])
async def test_an_id_of_any_form_is_kept(logged: Lines, given: str) -> None:
    async with asking(an_edge(), authorization=f"Bearer {API_KEY}", **{"x-request-id": given}) as http:
        answer = await http.get("/v1/cakes/one")

    assert answer.headers["x-request-id"] == logged()[0]["request_id"] == given


async def test_lines_of_a_turn_of_the_loop_are_written_together_and_warnings_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        service_logging.configure_logging("oven", log_format="json")
        Log("oven").info("oven.lit")
        Log("oven").info("oven.hot", degrees=220)
        assert written.getvalue() == ""
        await asyncio.sleep(0)
        assert [json.loads(line)["event"] for line in written.getvalue().splitlines()] == ["oven.lit", "oven.hot"]
        Log("oven").info("oven.read")
        Log("oven").warning("oven.smokes")
        assert written.getvalue().splitlines()[2:] != []
        events = [json.loads(line)["event"] for line in written.getvalue().splitlines()]
        assert events == ["oven.lit", "oven.hot", "oven.read", "oven.smokes"]
        await asyncio.to_thread(Log("oven").info, "oven.cold")
        logging.getLogger("another").warning("not of ours: %s", 5)
        assert [json.loads(line)["event"] for line in written.getvalue().splitlines()][4:] == [
            "oven.cold",
            "not of ours: 5",
        ]
    finally:
        root.handlers[:] = before
        root.setLevel(level)


async def test_an_answer_cut_off_as_the_process_stops_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/broken":
            raise ValueError("a fault has its traceback")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.Event().wait()

    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        service_logging.configure_logging("oven")
        with listening("127.0.0.1", 0) as at:
            server = Server(ServerConfig(endless, lifespan="off", timeout_graceful_shutdown=1, log_config=None))
            serving = asyncio.create_task(server.serve([at]))
            url = f"http://127.0.0.1:{at.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as asking:
                assert (await asking.get("/broken")).status_code == 500
                async with asking.stream("GET", "/") as answer:
                    pieces = answer.aiter_raw()
                    assert await anext(pieces) == b"first"
                    server.should_exit = True
                    with pytest.raises(httpx.RemoteProtocolError):
                        await anext(pieces)
            await serving
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    written = capsys.readouterr().out
    assert "a fault has its traceback" in written
    assert "Finished" in written
    assert "CancelledError" not in written
    assert written.count("Traceback") == 1


async def test_a_client_that_leaves_before_its_answer_has_a_line(logged: Lines) -> None:
    async def gone(scope: Scope, receive: Receive, send: Send) -> None:
        return

    async with asking(gone) as http:
        with pytest.raises(AssertionError):  # the transport of the test wants an answer
            await http.get("/")

    assert [line["status"] for line in logged()] == [499]


@given(st.text(), st.text())
def test_what_a_field_holds_cannot_pass_for_a_line_or_a_field(name: str, event: str) -> None:
    formatter = service_logging._Formatter("x", as_json=False)  # pyright: ignore[reportPrivateUsage]
    record = logging.LogRecord("x", logging.INFO, "", 0, event, (), None)
    record.fields = {"name": name, "status": 200}
    (line,) = formatter.format(record).split("\n")
    assert line.endswith(" status=200")
    record = logging.LogRecord("x", logging.INFO, "", 0, "baked", (), None)
    record.fields = {"name": name, "status": 200}
    assert len(shlex.split(formatter.format(record))) == 5


def test_the_lines_of_a_traceback_are_indented() -> None:
    formatter = service_logging._Formatter("x", as_json=False)  # pyright: ignore[reportPrivateUsage]
    try:
        raise KeyError("x") from ValueError("a\n12:00:00.000 INFO    key.created")
    except KeyError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", (), (KeyError, error, error.__traceback__))
    first, *rest = formatter.format(record).split("\n")
    assert first.endswith("failed")
    assert len(rest) > 4
    assert all(line.startswith("  ") for line in rest)


def test_the_id_goes_with_the_trace_where_there_are_no_headers() -> None:
    assert (traces.current(), traces.passed_on()) == (None, {})
    with traces.within(f"{GIVEN};mine"):
        assert (traces.trace_id(), traces.request_id(), traces.current()) == ("a" * 32, "mine", f"{GIVEN};mine")
        with traces.within(";other"):
            assert (traces.trace_id(), traces.request_id()) == ("a" * 32, "other")
        with traces.span("bake") as span, traces.within(span.traceparent):
            assert span.traceparent == traces.current() == f"{GIVEN};mine"
    for wrong in ("x", "x;a b", f"{GIVEN}0", f";{'x' * 129}", ";"):
        with traces.within(wrong):
            assert (traces.trace_id(), traces.request_id(), traces.current()) == (None, "", None)
    assert (traces.id_of(GIVEN), traces.id_of(f"{GIVEN};a"), traces.id_of(";a")) == ("a" * 32, "a" * 32, None)
