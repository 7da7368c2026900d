"""Reports of nodes are read faster than other requests, and answered as if they were not."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest
from fastapi import APIRouter, FastAPI

from services.contracts.nodes import EnergyReceipt, HeartbeatReply, RankState
from services.kit.problems import ProblemError, install_problem_handlers
from services.telemetry import endpoints
from services.telemetry.endpoints import ReportRoute
from services.telemetry.service import unknown_node
from tests.support.control_plane import FakeAgent, usage


class Service:
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def heartbeat(self, *asked: Any) -> HeartbeatReply:
        self.asked.append(asked)
        if asked[1] == "wrong":
            raise unknown_node()
        if asked[1] == "breaks":
            raise RuntimeError
        return HeartbeatReply(lease_ttl_s=20, allocations=["job_1.1"])

    async def store_energy(self, *asked: Any) -> EnergyReceipt:
        self.asked.append(asked)
        return EnergyReceipt(accepted=1, duplicates=0)


def an_app(route_class: Any) -> FastAPI:
    app = FastAPI()
    install_problem_handlers(app)
    router = APIRouter(prefix="/v1")
    for path, endpoint in (("heartbeat", endpoints.heartbeat), ("energy", endpoints.store_energy)):
        router.add_api_route(f"/nodes/{{node_id}}/{path}", endpoint, methods=["POST"], route_class_override=route_class)
    app.include_router(router)
    app.state.telemetry = Service()
    return app


def a_report(kind: str) -> dict[str, Any]:
    agent = FakeAgent(None, "n0", 2, base_url="http://x")  # type: ignore[arg-type]
    agent.say("job_00000000000000000000000001.1", RankState.RUNNING, progress_done=1.5)
    if kind == "heartbeat":
        return agent.heartbeat()
    return {
        "intervals": [agent.interval(1_000.0, 1_002.0, usage("job_00000000000000000000000001.1", 800, gpus=2, done=3))]
    }


BODIES: dict[str, Any] = {
    "good": lambda report: orjson.dumps(report),
    "with a field of a later release": lambda report: orjson.dumps(report | {"later": [1, {"x": None}]}),
    "empty": lambda _: b"",
    "null": lambda _: b"null",
    "a list": lambda _: b"[]",
    "no fields": lambda _: b"{}",
    "cut off": lambda report: orjson.dumps(report)[:-3],
    "not utf-8": lambda report: orjson.dumps(report)[:-1] + b', "x": "\xff"}',
    "half a surrogate": lambda report: orjson.dumps(report)[:-1] + b', "boot_id": "\\ud800"}',
    "a nul": lambda report: orjson.dumps(report)[:-1] + b', "boot_id": "a\\u0000", "intervals": 1}',
    "not a number": lambda report: orjson.dumps(report).replace(b"1.5", b"NaN").replace(b"800", b"Infinity"),
    "a number for a time": lambda report: orjson.dumps(report).replace(b'"started_at":null', b'"started_at":5'),
    "numbers as text": lambda report: orjson.dumps(report).replace(b"1.5", b'"1.5"').replace(b"800", b'"800"'),
    "truth for a number": lambda report: orjson.dumps(report).replace(b"1.5", b"true").replace(b"800", b"true"),
    "a key twice": lambda report: orjson.dumps(report)[:-1] + b', "boot_id": "other", "intervals": []}',
}
HEADERS: dict[str, dict[str, str]] = {
    "usual": {"content-type": "application/json", "authorization": "Bearer t"},
    "with a charset": {"content-type": "application/json; charset=utf-8", "authorization": "bearer t"},
    "no type": {"authorization": "Basic t"},
    "a wrong token": {"content-type": "application/json", "authorization": "Bearer wrong"},
    "a fault": {"content-type": "application/json", "authorization": "Bearer breaks"},
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("kind", ["heartbeat", "energy"])
async def test_every_answer_is_that_of_a_usual_route(kind: str, headers: dict[str, str]) -> None:
    fast, usual = an_app(ReportRoute), an_app(None)
    for name, make in BODIES.items():
        body = make(a_report(kind))
        for node in ("n0", "n" * 63, "n" * 64, "-n", "n%0A"):
            answers: list[tuple[Any, ...]] = []
            for app in (fast, usual):
                transport = httpx.ASGITransport(app, raise_app_exceptions=False)
                async with httpx.AsyncClient(transport=transport, base_url="http://telemetry") as http:
                    answer = await http.post(f"/v1/nodes/{node}/{kind}", content=body, headers=headers)
                answers.append((answer.status_code, answer.headers.get("content-type"), answer.json()))
            assert answers[0] == answers[1], (name, node)
        assert fast.state.telemetry.asked == usual.state.telemetry.asked, name
    assert fast.state.telemetry.asked or "content-type" not in headers


async def test_the_framework_is_not_asked_of_a_report_that_is_as_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(_: Any) -> Any:
        async def refuse(_: Any) -> None:
            raise ProblemError(418, "teapot", "the framework was asked")  # type: ignore[arg-type]

        return refuse

    monkeypatch.setattr("fastapi.routing.APIRoute.get_route_handler", usual)
    transport = httpx.ASGITransport(an_app(ReportRoute), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://telemetry") as http:
        answer = await http.post("/v1/nodes/n0/heartbeat", json=a_report("heartbeat"))
    assert (answer.status_code, answer.json()["allocations"]) == (200, ["job_1.1"])
