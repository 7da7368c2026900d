"""Requests of applications through the router: both protocols, their order, failures, and what is reported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.contracts.apps import AppObservation
from services.contracts.codes import ProblemCode
from services.contracts.identity import KeyLimits, Role, TenantLimits
from services.contracts.routing import UpstreamKey
from services.kit.problems import ProblemError
from services.router.breaker import FAILURES, BreakerState
from services.router.reports import MOST_APP_WINDOWS, WINDOW_S, ObservationReporter
from services.router.upstream import UpstreamError
from tests.router.conftest import Stage
from tests.support.app_instances import (
    APP,
    INFER,
    InstanceServer,
    a_routed_app,
    a_routed_instance,
    an_inference,
    instance_servers,
    until,
)
from tests.support.routers import OPERATOR, Running, a_key


@dataclass
class Apps:
    stage: Stage
    router: Running
    one: InstanceServer
    two: InstanceServer

    async def infer(self, number: int = 0, **options: Any) -> httpx.Response:
        return await self.router.ask(INFER, json=an_inference(number), **options)

    async def table(self, *servers: InstanceServer, draining: tuple[InstanceServer, ...] = ()) -> None:
        rows = [a_routed_instance(each) for each in servers]
        rows += [a_routed_instance(each, state="draining") for each in draining]
        self.stage.plane.app_servers = rows
        await self.router.adopted()

    @property
    def waiting(self) -> int:
        return self.router.router.assigner.queues[APP].waiting


@pytest.fixture
async def apps(stage: Stage) -> AsyncIterator[Apps]:
    stage.plane.apps = [a_routed_app()]
    async with instance_servers("one", "two") as (one, two), stage.router() as router:
        found = Apps(stage, router, one, two)
        await found.table(one)
        yield found


async def test_an_inference_passes_unchanged_and_says_who_answered(apps: Apps) -> None:
    body = b'{ "inputs":[] , "parameters": {"binary_data_output": true} }'
    headers = {"content-type": "application/json", "inference-header-content-length": "17", "x-request-id": "r-1"}
    answer = await apps.router.ask(f"{INFER}?q=1", content=body, json=None, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["outputs"][0]["data"] == ["one"]
    assert apps.one.seen == [("POST", f"{INFER}?q=1", body)]
    assert "authorization" not in apps.one.headers[0]
    assert apps.one.headers[0]["inference-header-content-length"] == "17"
    assert apps.one.headers[0]["x-request-id"] == answer.headers["x-request-id"] == "r-1"
    found = answer.headers
    assert (found["x-wattshift-variant"], found["x-wattshift-accuracy"]) == ("b1", "79.1")
    assert found["x-wattshift-location"] == "here"
    wh, gco2 = float(found["x-wattshift-wh"]), float(found["x-wattshift-gco2"])
    assert 0 < wh < (100 + 20) * 10 / 3600
    assert gco2 == pytest.approx(wh / 1e3 * 1.2 * 500, rel=1e-4)


async def test_an_instance_is_sent_its_own_key_and_no_other(apps: Apps) -> None:
    plane = apps.stage.plane
    plane.keys = [
        UpstreamKey.model_validate(
            {"server": f"instance_{name}", "set_at": "2026-11-25T10:00:00Z", "value": f"of-{name}"}
        )
        for name in ("two", "gone")
    ]
    for number, (server, *rest) in enumerate([(apps.one,), (apps.two,), (apps.two,), (apps.one, apps.two)]):
        await apps.table(server, *rest)
        assert (await apps.infer(number)).status_code == 200
        assert (await apps.router.http.get(f"/apps/{APP}/x", headers={"x-api-key": "own"})).status_code == 200
    sent = [[each.get("authorization") for each in server.headers] for server in (apps.one, apps.two)]
    assert set(sent[0]) == {None}, "it has none"
    assert set(sent[1]) == {"Bearer of-two"}
    assert plane.keys_asked <= 4, "once for each that comes into the table"
    plane.is_serving_up = False
    assert (await apps.infer(9)).status_code == 200, "serving is away"


async def test_a_keys_limits_hold_for_applications_too(apps: Apps) -> None:
    plane = apps.stage.plane
    plane.key_limits = KeyLimits(requests_per_min=2, models=[APP])
    assert (await apps.infer()).headers["x-ratelimit-remaining-requests"] == "1"
    assert (await apps.router.http.get(f"/apps/{APP}/x")).status_code == 200
    for path, code in ((INFER, "rate_limited"), (f"/apps/{APP}/x", "rate_limited")):
        refused = await apps.router.http.post(path, json=an_inference())
        assert (refused.status_code, refused.json()["code"]) == (429, code)
        assert int(refused.headers["retry-after"]) > 0
        assert "application/json" in refused.headers["content-type"] or refused.json()["type"].endswith("/rate_limited")
    plane.key_limits, plane.excess = KeyLimits(models=["llama"]), None
    async with apps.stage.router() as fresh:
        await fresh.adopted()
        assert (await fresh.ask(INFER, json=an_inference())).json()["code"] == "not_found"
    plane.excess = "It used 3 of 2 gCO2."
    async with apps.stage.router() as fresh:
        await fresh.adopted()
        refused = await fresh.ask(INFER, json=an_inference())
        assert (refused.status_code, refused.json()["code"]) == (429, "insufficient_quota")
        assert refused.headers["content-type"] == "application/json"
    assert len(apps.one.seen) == 2


async def test_what_is_unknown_is_left_out(apps: Apps) -> None:
    apps.stage.plane.app_servers = [a_routed_instance(apps.one, idle_w=None)]
    await apps.router.adopted()
    headers = (await apps.infer()).headers
    assert "x-wattshift-wh" not in headers
    assert "x-wattshift-gco2" not in headers
    assert headers["x-wattshift-variant"] == "b1"


async def test_versions_metadata_and_readiness(apps: Apps) -> None:
    http = apps.router.http
    assert (await http.post(f"/v2/models/{APP}/versions/3/infer", json=an_inference())).status_code == 200
    assert (await http.get(f"/v2/models/{APP}/versions/3")).json()["model_name"] == APP
    assert (await http.get(f"/v2/models/{APP}/ready")).json() == {"name": APP, "ready": True}
    assert len(apps.one.seen) == 2
    await apps.table()
    assert (await http.get(f"/v2/models/{APP}/ready")).status_code == 503
    bare = httpx.AsyncClient(base_url=apps.router.url)
    async with bare:
        assert (await bare.get("/v2/health/live")).json() == {"live": True}
        assert (await bare.get("/v2/health/ready")).json() == {"ready": True}
        assert (await bare.get("/v2")).json()["name"] == "wattshift"
        assert (await bare.get(f"/v2/models/{APP}/ready")).status_code == 401


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_plain_http_reaches_the_instance_as_it_is(apps: Apps, method: str) -> None:
    headers = {"connection": "x-private", "x-private": "1", "x-public": "2"}
    answer = await apps.router.http.request(
        method, f"/apps/{APP}/a%2Fb/%C3%A4?x=%20&y", content=b"body" if method != "GET" else None, headers=headers
    )
    assert answer.status_code == 200
    assert answer.content == b"from one"
    assert apps.one.seen == [(method, "/a%2Fb/%C3%A4?x=%20&y", b"body" if method != "GET" else b"")]
    assert "x-private" not in apps.one.headers[0]
    assert apps.one.headers[0]["x-public"] == "2"
    assert answer.headers["x-own"] == "kept"
    assert answer.headers["set-cookie"] == "a=1"
    assert float(answer.headers["x-wattshift-gco2"]) > 0  # not what the instance said


async def test_an_answer_without_a_body_and_a_head(apps: Apps) -> None:
    apps.one.status = 204
    assert (await apps.router.http.delete(f"/apps/{APP}/thing")).status_code == 204
    apps.one.status = 200
    for _ in range(3):
        answer = await apps.router.http.head(f"/apps/{APP}/thing")
        assert (answer.status_code, answer.content) == (200, b"")


async def test_a_head_of_a_stream_waits_for_no_body(apps: Apps) -> None:
    async def answer_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        await reader.read()  # it waits for the next request
        writer.close()

    async with await asyncio.start_server(answer_head, "127.0.0.1", 0) as server:
        apps.one.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await apps.table(apps.one)
        answer = await apps.router.http.head(f"/apps/{APP}/events", timeout=5)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")


async def test_a_stream_of_events_passes_and_ends_with_its_footprint(apps: Apps) -> None:
    apps.one.is_stream = True
    answer = await apps.router.http.get(f"/apps/{APP}/events")
    first, second, last, nothing = answer.text.split("\n\n")
    assert (first, second, nothing) == ("data: one", "data: two", "")
    assert last.startswith(": x-wattshift-gco2=")
    assert answer.headers["x-wattshift-variant"] == "b1"
    assert answer.headers.get_list("x-accel-buffering") == ["no"]
    quiet = await apps.router.http.get(f"/apps/{APP}/events", headers={"x-wattshift-comment": "off"})
    assert quiet.text == "data: one\n\ndata: two\n\n"


async def test_an_encoded_stream_of_events_passes_as_it_is(apps: Apps) -> None:
    apps.one.is_stream, apps.one.encoding = True, "x-own"
    async with apps.router.http.stream("GET", f"/apps/{APP}/events") as answer:
        raw = b"".join([piece async for piece in answer.aiter_raw()])
    assert raw == b"data: one\n\ndata: two\n\n"


async def test_the_queue_is_first_come_first_served_and_an_instance_gets_one_at_a_time(apps: Apps) -> None:
    apps.one.gate = asyncio.Event()
    asked: list[asyncio.Task[httpx.Response]] = []
    for number in range(6):
        asked.append(asyncio.create_task(apps.infer(number)))
        await until(lambda number=number: (apps.waiting + len(apps.one.seen)) == number + 1)
    apps.one.gate.set()
    assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 6
    assert apps.one.numbers == [0, 1, 2, 3, 4, 5]
    assert apps.one.most_held == 1


async def test_a_new_instance_takes_what_waits_and_one_that_drains_finishes_what_it_has(apps: Apps) -> None:
    apps.one.gate = asyncio.Event()
    asked = [asyncio.create_task(apps.infer(0))]
    await until(lambda: apps.one.held == 1)
    asked += [asyncio.create_task(apps.infer(number)) for number in (1, 2)]
    await until(lambda: apps.waiting == 2)
    await apps.table(draining=(apps.one,))
    assert apps.stage.plane.held[-1].held == {"instance_one": 1}
    await apps.table()  # none at all: the GPU is being cut
    assert apps.stage.plane.held[-1].held == {"instance_one": 1}
    assert apps.waiting == 2
    await apps.table(apps.two)
    await until(lambda: len(apps.two.seen) == 2)
    assert [each.status_code for each in await asyncio.gather(*asked[1:])] == [200, 200]
    apps.one.gate.set()
    assert (await asked[0]).json()["outputs"][0]["data"] == ["one"]
    before = len(apps.stage.plane.held)
    await apps.router.adopted()
    assert not any(report.held for report in apps.stage.plane.held[before:])


async def test_requests_wait_for_at_most_their_time_where_no_instance_comes(stage: Stage) -> None:
    stage.plane.apps = [a_routed_app()]
    async with instance_servers("one") as (one,), stage.router(queue_timeout_s=0.2) as router:
        stage.plane.app_servers = [a_routed_instance(one, state="draining")]
        await router.adopted()
        answer = await router.ask(INFER, json=an_inference())
        assert (answer.status_code, answer.json()["code"]) == (503, "no_instance")
        assert answer.headers["retry-after"] == "5"


async def test_beyond_the_bound_requests_are_refused(stage: Stage) -> None:
    stage.plane.apps = [a_routed_app()]
    async with instance_servers("one") as (one,), stage.router(max_queue=2) as router:
        stage.plane.app_servers = [a_routed_instance(one, service_ms=3_000.0)]
        await router.adopted()
        one.gate = asyncio.Event()
        asked = [asyncio.create_task(router.ask(INFER, json=an_inference())) for _ in range(3)]
        await until(lambda: router.router.assigner.queues[APP].waiting == 2)
        refused = await router.ask(INFER, json=an_inference())
        assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "9"
        one.gate.set()
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 3


async def test_a_client_that_leaves_frees_the_instance_and_its_place_in_the_queue(apps: Apps) -> None:
    apps.one.gate = asyncio.Event()
    first = asyncio.create_task(apps.infer(0))
    await until(lambda: apps.one.held == 1)
    second = asyncio.create_task(apps.infer(1))
    third = asyncio.create_task(apps.infer(2))
    await until(lambda: apps.waiting == 2)
    second.cancel()
    await until(lambda: apps.waiting == 1)
    first.cancel()
    await until(lambda: apps.one.cancelled == 1)
    apps.one.gate.set()
    assert (await third).status_code == 200
    assert apps.one.numbers == [0, 2]
    counted = apps.router.router.metrics.app_requests.values
    assert counted == {(APP, "", "499"): 1, (APP, "b1", "499"): 1, (APP, "b1", "200"): 1}


@pytest.mark.parametrize(("reason", "is_its_own"), [("slow_client", False), ("malformed", True)])
async def test_only_its_own_failures_eject_an_instance(apps: Apps, reason: str, is_its_own: bool) -> None:
    apps.one.gate = asyncio.Event()
    for number in range(FAILURES):
        asked = asyncio.create_task(apps.infer(number))
        await until(lambda number=number: len(apps.one.seen) == number + 1)
        (connection,) = apps.router.router.fleet.instances["instance_one"].origin.busy
        connection.abort(UpstreamError(reason, "It ended."))
        assert (await asked).status_code == 502
    state = apps.router.router.assigner.queues[APP].breaker_state("instance_one", time.monotonic())
    assert (state is not BreakerState.CLOSED) is is_its_own
    assert ((reason,) in apps.router.router.metrics.upstream.values) is is_its_own


async def test_an_inference_goes_to_another_instance_when_its_own_dies_and_a_plain_post_does_not(apps: Apps) -> None:
    await apps.table(apps.one, apps.two)
    apps.one.dies = True
    answers = [await apps.infer(number) for number in range(4)]
    assert [each.json()["outputs"][0]["data"][0] for each in answers] == ["two"] * 4
    apps.two.dies = True
    plain = await apps.router.http.post(f"/apps/{APP}/orders", content=b"one")
    assert (plain.status_code, plain.json()["code"]) == (502, "upstream_closed")
    assert plain.headers["content-type"] == "application/problem+json"
    before = len(apps.one.seen) + len(apps.two.seen)
    again = await apps.router.http.post(f"/apps/{APP}/orders", content=b"one", headers={"idempotency-key": "1"})
    assert again.status_code == 502
    assert len(apps.one.seen) + len(apps.two.seen) - before > 1


async def test_what_must_not_be_sent_twice_takes_no_connection_that_may_be_closing(
    apps: Apps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.apps.door.FRESH_S", 0.0)
    origin = apps.router.router.fleet.instances["instance_one"].origin
    await apps.infer()
    (kept,) = origin.idle
    await apps.infer()
    assert origin.idle == [kept]
    await apps.router.http.post(f"/apps/{APP}/orders", content=b"one")
    (fresh,) = origin.idle
    assert fresh is not kept
    assert not kept.is_open


async def test_an_instance_that_is_not_there_costs_no_request(apps: Apps) -> None:
    gone = InstanceServer("gone", url="http://127.0.0.1:1")
    await apps.table(gone, apps.one)
    answers = await asyncio.gather(*(apps.infer(number) for number in range(5)))
    assert [each.status_code for each in answers] == [200] * 5
    assert sorted(apps.one.numbers) == [0, 1, 2, 3, 4]


async def test_an_instance_that_says_busy_is_passed_over_and_the_last_such_answer_is_the_clients(apps: Apps) -> None:
    await apps.table(apps.one, apps.two)
    apps.one.status = 503
    assert (await apps.infer()).json()["outputs"][0]["data"] == ["two"]
    apps.two.status = 503
    last = await apps.infer()
    assert (last.status_code, last.content[:4]) == (503, b"from")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/v2/models/unknown/infer", (404, "not_found")),
        ("POST", "/v2/models/%00/infer", (404, "not_found")),
        ("POST", "/v2/models/images/generate", (404, "unknown_url")),
        ("GET", "/v2/nothing", (404, "unknown_url")),
        ("GET", "/v2/models/images/infer", (405, "method_not_allowed")),
        ("POST", "/v2/health/live", (405, "method_not_allowed")),
        ("GET", "/apps/unknown/", (404, "not_found")),
        ("GET", "/apps/", (404, "not_found")),
        ("TRACE", "/apps/images/", (405, "method_not_allowed")),
    ],
)
async def test_what_there_is_not_is_refused_in_the_protocols_own_shape(
    apps: Apps, method: str, path: str, expected: tuple[int, str]
) -> None:
    answer = await apps.router.http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == expected
    assert answer.json()["error" if path.startswith("/v2") else "detail"]
    assert apps.one.seen == []


async def test_keys_sizes_and_rates(stage: Stage) -> None:
    stage.plane.apps = [a_routed_app()]
    async with instance_servers("one") as (one,), stage.router(max_body_bytes=2_000) as router:
        stage.plane.app_servers = [a_routed_instance(one)]
        await router.adopted()

        async def code(**options: Any) -> tuple[int, str]:
            options.setdefault("json", an_inference())
            answer = await router.ask(INFER, **options)
            return answer.status_code, answer.json().get("code", "")

        assert await code(key="ws_" + "n" * 43) == (401, "unauthenticated")
        assert await code(key=a_key("acme", Role.READ_ONLY)) == (403, "forbidden")
        assert await code(key=a_key("umbra")) == (404, "not_found")
        assert await code(json={"data": "x" * 3_000}) == (413, "body_too_large")
        assert one.seen == []
        assert (await code(key=a_key("ops", Role.OPERATOR)))[0] == 200
        stage.plane.apps = [a_routed_app(tenants=["umbra"])]
        await router.adopted()
        assert (await code(key=a_key("umbra")))[0] == 200
        stage.plane.limits = TenantLimits(requests_per_s=0.01, burst=1)
        assert (await code(key=a_key("third")))[0] == 404
        assert await code(key=a_key("third")) == (429, "rate_limited")


async def test_an_answer_larger_than_allowed_is_refused(stage: Stage) -> None:
    stage.plane.apps = [a_routed_app()]
    async with instance_servers("o" * 2_000_000) as (one,), stage.router(max_answer_bytes=300_000) as router:
        stage.plane.app_servers = [a_routed_instance(one, id="one")]
        await router.adopted()
        answer = await router.ask(INFER, json=an_inference())
        assert (answer.status_code, answer.json()["code"]) == (502, "upstream_too_large")


async def test_usage_goes_to_the_ledger_by_variant_and_key(apps: Apps) -> None:
    await apps.infer()
    await apps.infer(key=a_key("ops", Role.OPERATOR))
    await apps.router.router.usage.send(all_windows=True)
    usages = [each for report in apps.stage.plane.usage for each in report.usages]
    assert {(each.job_id, each.tenant_id, each.model, each.request_class) for each in usages} == {
        ("job_one", "acme", APP, "b1"),
        ("job_one", "ops", APP, "b1"),
    }
    assert all(each.requests == 1 and each.share_s > 0 and each.energy_j > 0 for each in usages)
    assert sum(each.energy_j for each in usages) == pytest.approx(120 * sum(each.share_s for each in usages))


@pytest.mark.parametrize("has_come", [False, True], ids=["before its answer", "as it reads what has come"])
async def test_who_leaves_is_charged_what_the_instance_spent_until_then(apps: Apps, has_come: bool) -> None:
    apps.one.gate, apps.one.is_stream = asyncio.Event(), has_come
    (instance,) = apps.router.router.fleet.instances.values()
    leaving = asyncio.create_task(_read_nothing(apps) if has_come else apps.infer())
    await until(lambda: apps.one.held == 1)
    await asyncio.sleep(0.1)
    if has_come:
        apps.one.gate.set()
        await until(lambda: not instance.held)
    leaving.cancel()
    counted = apps.router.router.metrics.app_requests.values
    await until(lambda: bool(counted))
    assert counted == {(APP, "b1", "499"): 1}
    await apps.router.router.usage.send(all_windows=True)
    (usage,) = [each for report in apps.stage.plane.usage for each in report.usages]
    assert usage.share_s > 0.05
    assert usage.energy_j == pytest.approx(120 * usage.share_s)


async def _read_nothing(apps: Apps) -> None:
    """Ask for a stream as a client that reads none of it."""
    headers = [(b"authorization", f"Bearer {a_key('acme')}".encode())]
    scope = {"type": "http", "method": "GET", "path": f"/apps/{APP}/events", "query_string": b"", "headers": headers}
    said: list[Any] = [{"type": "http.request", "body": b""}]

    async def receive() -> Any:
        return said.pop() if said else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    await apps.router.router(scope, receive, send)


async def test_observations_are_reported_in_whole_windows_until_they_are_accepted(apps: Apps) -> None:
    reporter, plane = apps.router.router.observations, apps.stage.plane
    start_s = int(time.time() // 5) * 5 + 10_000  # so that the router's own loop has nothing to send of it
    reporter.arrived(APP, start_s + 1.0)
    reporter.arrived(APP, start_s + 4.9)
    for latency_s in (0.010, 0.020, 0.030):
        reporter.answered(APP, "instance_one", latency_s, 0.005, start_s + 2.0)
    reporter.failed(APP, start_s + 2.0)
    plane.is_serving_up = False
    with pytest.raises(ProblemError):
        await reporter.send([APP], start_s + 5.0)
    plane.is_serving_up = True
    plane.observations.clear()
    await reporter.send([APP], start_s + 5.5)
    await reporter.send([APP], start_s + 6.0)
    (report,) = [each for each in plane.observations if each.start_at.timestamp() == start_s]
    (found,) = report.apps
    assert (found.arrivals, found.answered, found.failed) == (2, 3, 1)
    assert (found.p50_ms, found.p95_ms) == (20.0, 30.0)
    assert sum(found.latency) == 3
    (server,) = found.servers
    assert (server.server, server.answered, server.mean_service_ms) == ("instance_one", 3, 5.0)
    await reporter.send([APP], start_s + 10.0)
    assert plane.observations[-1].apps == [AppObservation(app=APP, arrivals=0, answered=0)]


async def test_what_serving_did_not_hear_for_long_is_left_out_also_when_nothing_else_comes() -> None:
    sent: list[float] = []
    is_up = False

    class Serving:
        async def request(self, *_: Any, body: Any, **__: Any) -> None:
            if not is_up:
                raise ProblemError(503, ProblemCode.UNAVAILABLE, "Serving does not answer.")
            sent.append(body.start_at.timestamp())

    serving: Any = Serving()
    reporter = ObservationReporter(serving, "r", lambda _: 0)
    reporter.arrived(APP, 1.0)
    for window in range(1, 2 * MOST_APP_WINDOWS):
        with contextlib.suppress(ProblemError):
            await reporter.send([APP], float(WINDOW_S * window))
    is_up = True
    await reporter.send([APP], 2.0 * MOST_APP_WINDOWS * WINDOW_S)
    assert sent == [WINDOW_S * (2.0 * MOST_APP_WINDOWS - 1)]


async def test_metrics_and_status_know_applications(apps: Apps) -> None:
    await apps.infer()
    text = (await apps.router.http.get("/metrics", headers=OPERATOR)).text
    assert f'wattshift_router_app_requests_total{{app="{APP}",variant="b1",status="200"}} 1' in text
    assert f'wattshift_router_app_instances{{app="{APP}",variant="b1"}} 1' in text
    assert f'wattshift_router_app_latency_seconds_count{{app="{APP}"}} 1' in text
    (app,) = (await apps.router.http.get("/status", headers=OPERATOR)).json()["apps"]
    assert app["assigned_by"] == apps.router.router.name
    assert json.dumps(app["instances"][0]["breaker"]) == '"closed"'
