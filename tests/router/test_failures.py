"""Servers and neighbours that fail: requests go elsewhere where that is safe, and nobody else pays."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.contracts.routing import RoutingTable
from services.router.breaker import FAILURES, BreakerState
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, Running, a_key, a_routed_pool, a_routed_server, chat, model_servers

DEAD = "http://127.0.0.1:1"


def state_of(router: Running, server: str) -> BreakerState:
    return router.router.fleet.servers[server].breaker.state(asyncio.get_running_loop().time())


async def two_servers(router: Running, stage: Stage, **first: Any) -> None:
    """Have two servers, of which the first is the cleaner one."""
    stage.plane.servers = [
        a_routed_server(stage.one, "first", gco2_per_kwh=10.0, **first),
        a_routed_server(stage.two, "second", gco2_per_kwh=900.0, location="there"),
    ]
    await router.adopted()


async def test_a_server_that_cannot_be_reached_is_ejected_and_another_one_answers(
    router: Running, stage: Stage
) -> None:
    await two_servers(router, stage, url=DEAD)
    answers = [await router.ask() for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert {answer.headers["x-wattshift-location"] for answer in answers} == {"there"}
    assert state_of(router, "first") is not BreakerState.CLOSED
    assert len(stage.two.seen) == 3


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_server_is_passed_over(router: Running, stage: Stage, status: int) -> None:
    await two_servers(router, stage)
    stage.one.status = status
    answer = await router.ask()
    assert (answer.status_code, answer.headers["x-wattshift-location"]) == (200, "there")


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (429, "7", (429, "upstream_rate_limited", "7")),
        (503, "7", (503, "upstream_busy", "7")),
        (429, "9" * 500, (429, "upstream_rate_limited", "2")),
        (429, "soon", (429, "upstream_rate_limited", "2")),
    ],
)
async def test_who_is_turned_away_by_all_servers_is_told_so_in_their_words(
    router: Running, stage: Stage, status: int, said: str, expected: tuple[int, str, str]
) -> None:
    stage.one.status, stage.one.sends = status, {"retry-after": said}
    answer = await router.ask()
    assert (*error_of(answer), answer.headers["retry-after"]) == expected
    assert router.router.fleet.servers["instance_1"].breaker.failures == (status == 503)


async def test_an_error_of_the_server_itself_passes_and_is_not_repeated(router: Running, stage: Stage) -> None:
    await two_servers(router, stage)
    stage.one.status, stage.one.body = 500, b'{"error": {"message": "out of memory"}}'
    answer = await router.ask()
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "out of memory")
    assert len(stage.two.seen) == 0
    for _ in range(2):
        await router.ask()
    assert state_of(router, "first") is BreakerState.OPEN
    assert (await router.ask()).status_code == 200


@asynccontextmanager
async def hanging_up() -> AsyncIterator[str]:
    """Yield the address of a server that closes each connection once it has read a request."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_server_that_closes_without_an_answer_is_asked_no_more_and_the_request_is_repeated(
    router: Running, stage: Stage
) -> None:
    await two_servers(router, stage)
    async with hanging_up() as url:
        stage.plane.servers[0] = stage.plane.servers[0].model_copy(update={"url": url})
        await router.adopted()
        assert (await router.ask()).headers["x-wattshift-location"] == "there"
        stored = await router.ask(json=chat(store=True))
    assert error_of(stored) == (502, "upstream_closed")


async def test_no_fallback_model_is_asked_what_a_server_may_have_done(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(fallback=["small"]), a_routed_pool("other", models=["small"])]
    async with hanging_up() as url:
        stage.plane.servers = [a_routed_server(stage.one, url=url), a_routed_server(stage.two, "small", pool="other")]
        await router.adopted()
        assert error_of(await router.ask(json=chat(store=True))) == (502, "upstream_closed")
        assert not stage.two.seen
        assert (await router.ask()).headers["x-wattshift-model"] == "small"


async def test_a_server_that_dies_within_a_stream_ends_it_with_an_error(router: Running, stage: Stage) -> None:
    stage.one.dies_after = 2
    answer = await router.ask(json=chat(stream=True))
    events = [json.loads(event[6:]) for event in answer.text.split("\n\n") if event.startswith("data: {")]
    assert [event["choices"][0]["delta"]["content"] for event in events[:2]] == ["one0 ", "one1 "]
    assert events[-1]["error"]["code"] == "upstream_broke_off"
    assert "[DONE]" not in answer.text
    assert router.router.fleet.servers["instance_1"].held == 0


async def test_without_a_server_there_is_a_503_with_a_time(router: Running, stage: Stage) -> None:
    stage.plane.servers = []
    await router.adopted()
    answer = await router.ask()
    assert error_of(answer) == (503, "no_server")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_fallback_model_answers_while_no_server_of_the_model_does(router: Running, stage: Stage) -> None:
    stage.plane.pools = [
        a_routed_pool(fallback=["missing", "small"]),
        a_routed_pool("other", models=["small"]),
    ]
    stage.plane.servers = [
        a_routed_server(stage.one, url=DEAD),
        a_routed_server(stage.two, "small_1", pool="other"),
    ]
    await router.adopted()
    answer = await router.ask()
    assert (answer.status_code, answer.headers["x-wattshift-model"]) == (200, "small")
    assert json.loads(stage.two.seen[0])["model"] == "small"


@pytest.mark.parametrize("is_last", [True, False])
async def test_from_zero_a_request_waits_for_a_first_instance_where_no_fallback_may_answer(
    router: Running, stage: Stage, is_last: bool
) -> None:
    stage.plane.pools = [a_routed_pool(starting=1, fallback=[] if is_last else ["small"])]
    stage.plane.pools += [] if is_last else [a_routed_pool("other", models=["small"])]
    stage.plane.servers = [a_routed_server(stage.two, pool="other")]
    await router.adopted()
    asking = asyncio.create_task(router.ask())
    if is_last:
        await stage.one.until(lambda: any(len(lane.queue) for lane in router.router.lanes.all()))
        await router.router._check()  # pyright: ignore[reportPrivateUsage]
        stage.plane.servers = [a_routed_server(stage.one)]
        await router.adopted()
    answer = await asking
    assert (answer.status_code, answer.headers.get("x-wattshift-model")) == (200, None if is_last else "small")


@pytest.mark.parametrize(
    ("starting", "why"), [(2, "yet: 2 are starting"), (1, "yet: 1 is starting"), (0, "and none is starting")]
)
async def test_who_waits_for_a_first_instance_is_told_why_it_was_in_vain(
    stage: Stage, starting: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.lanes.WANTED_WITHIN_S", 0.0)
    promised = [{"name": "any", "max_latency_s": 0.2}] if starting == 2 else []
    stage.plane.pools, stage.plane.servers = [a_routed_pool(starting=starting, classes=promised)], []
    async with stage.router(queue_timeout_s=60 if promised or not starting else 0.2) as router:
        await router.adopted()
        answer = await router.ask()
    assert error_of(answer) == (503, "no_server")
    assert why in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_pool_that_is_deleted_has_nobody_wait_for_it(router: Running, stage: Stage) -> None:
    stage.plane.pools, stage.plane.servers = [a_routed_pool(starting=1)], []
    await router.adopted()
    asking = asyncio.create_task(router.ask())
    await stage.one.until(lambda: any(len(lane.queue) for lane in router.router.lanes.all()))
    stage.plane.pools = []
    await router.adopted()
    assert error_of(await asking) == (503, "no_server")


@pytest.mark.parametrize("may_repeat", [True, False])
async def test_a_fallback_model_is_asked_after_a_time_out_where_the_request_may_be_repeated(
    stage: Stage, may_repeat: bool
) -> None:
    stage.one.gate = asyncio.Event()
    stage.plane.pools = [a_routed_pool(fallback=["small"]), a_routed_pool("other", models=["small"])]
    stage.plane.servers = [a_routed_server(stage.one), a_routed_server(stage.two, "small_1", pool="other")]
    async with stage.router(first_byte_timeout_s=0.2) as router:
        await router.adopted()
        answer = await router.ask(json=chat() if may_repeat else chat(store=True))
    found = answer.headers.get("x-wattshift-model") if may_repeat else error_of(answer)
    assert found == ("small" if may_repeat else (504, "upstream_timeout"))


@pytest.mark.parametrize(
    ("limit", "expected"),
    [({"first_byte_timeout_s": 0.2}, "did not answer"), ({"total_timeout_s": 0.2}, "complete within")],
)
async def test_a_slow_server_is_given_up(stage: Stage, limit: dict[str, float], expected: str) -> None:
    stage.one.gate = asyncio.Event()
    async with stage.router(**limit) as router:
        await router.adopted()
        answer = await router.ask()
    assert error_of(answer) == (504, "upstream_timeout")
    assert expected in answer.json()["error"]["message"]
    assert stage.one.cancelled == 1


async def test_silence_within_a_stream_ends_it(stage: Stage) -> None:
    stage.one.stream_gate = asyncio.Event()
    async with stage.router(silence_timeout_s=0.2) as router:
        await router.adopted()
        answer = await router.ask(json=chat(stream=True))
    assert "upstream_broke_off" in answer.text
    assert "silent" in answer.text


async def test_the_last_table_serves_while_serving_is_away_and_after_a_start(stage: Stage) -> None:
    async with stage.router() as router:
        await router.adopted()
        stage.plane.is_serving_up = False
        assert (await router.ask()).status_code == 200
    kept = RoutingTable.model_validate_json((stage.folder / "router" / "table.json").read_bytes())
    assert [server.id for server in kept.servers] == ["instance_1"]
    async with stage.router() as again:
        assert (await again.ask()).status_code == 200
        assert (await again.http.get("/readyz")).status_code == 200


async def test_a_damaged_copy_of_the_table_is_passed_over(stage: Stage) -> None:
    path = stage.folder / "router" / "table.json"
    path.parent.mkdir()
    path.write_text('{"pools": [')
    stage.plane.is_serving_up = False
    async with stage.router() as router:
        assert (await router.http.get("/readyz")).status_code == 503
        stage.plane.is_serving_up = True
        await router.adopted()
        assert (await router.ask()).status_code == 200


async def test_a_draining_server_gets_no_more_and_serving_hears_what_it_holds(router: Running, stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    asking = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    stage.plane.servers = [
        a_routed_server(stage.one, state="draining"),
        a_routed_server(stage.two, "instance_2", location="there"),
    ]
    await router.adopted()
    assert (await router.ask()).headers["x-wattshift-location"] == "there"
    assert stage.plane.held[-1].held == {"instance_1": 1}
    stage.one.gate.set()
    assert (await asking).status_code == 200
    await router.adopted()
    assert stage.plane.held[-1].held == {"instance_1": 0}


async def test_a_server_that_left_the_table_finishes_what_it_holds(router: Running, stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    asking = asyncio.create_task(router.ask())
    await stage.one.until(lambda: stage.one.held == 1)
    stage.plane.servers = []
    await router.adopted()
    stage.one.gate.set()
    assert (await asking).status_code == 200
    assert error_of(await router.ask()) == (503, "no_server")


async def test_endpoints_outside_the_networks_are_not_connected_to(stage: Stage) -> None:
    spec = a_routed_server(stage.one, "endpoint:lab", pool=None, models=["lab-model"], job_id=None)
    local = spec.url.replace("127.0.0.1", "localhost")
    stage.plane.servers = [spec.model_copy(update={"url": local})]
    async with stage.router(endpoint_networks="10.8.0.0/16") as router:
        await router.adopted()
        assert error_of(await router.ask(json=chat(model="lab-model"))) == (502, "upstream_refused_address")
        assert stage.one.seen == []
    async with stage.router(endpoint_networks="127.0.0.0/8") as router:
        await router.adopted()
        assert (await router.ask(json=chat(model="lab-model"))).status_code == 200


async def test_a_stream_that_breaks_off_before_its_first_event_is_no_answer(router: Running, stage: Stage) -> None:
    await two_servers(router, stage)
    stage.one.dies_after = 0

    answer = await router.ask(json=chat(stream=True))

    assert "data: [DONE]" in answer.text
    assert (len(stage.one.seen), len(stage.two.seen)) == (1, 1)
    assert router.router.metrics.requests.values == {(MODEL, "", "200"): 1}
    await router.router.usage.send(all_windows=True)
    assert sum(usage.requests for report in stage.plane.usage for usage in report.usages) == 1


async def test_one_tenants_trouble_costs_no_other_anything(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(), a_routed_pool("umbras", tenant_id="umbra", models=["u"])]
    stage.plane.servers = [
        a_routed_server(stage.one),
        a_routed_server(stage.two, "u1", pool="umbras", tenant_id="umbra", capacity=1),
    ]
    await router.adopted()
    stage.two.gate = asyncio.Event()
    theirs = [asyncio.create_task(router.ask(json=chat(model="u"), key=a_key("umbra"))) for _ in range(20)]
    await stage.two.until(lambda: stage.two.held == 1)
    assert (await router.ask()).status_code == 200
    assert stage.two.most_held == 1
    stage.two.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*theirs)} == {200}


async def test_a_server_that_lies_about_its_tokens_is_not_believed(router: Running, stage: Stage) -> None:
    stage.one.body = json.dumps({"usage": {"prompt_tokens": -7, "completion_tokens": "many"}}).encode()
    before = router.router.expectations.lengths.predict([MODEL]).answers
    answer = await router.ask(json=chat("x" * 400))
    assert answer.status_code == 200
    await router.router.traffic.send(time.time() + 5)
    told = [window for _, report in stage.plane.traffic for window in report.windows]
    assert sum(map(len, (window.requests for window in told))) >= 1
    assert all(length >= 0 for window in told for lengths in window.requests for length in lengths)
    assert before == 0


async def test_servers_are_probed_and_taken_back(router: Running, stage: Stage) -> None:
    async with model_servers("three") as (three,):
        stage.plane.servers = [a_routed_server(three, "third")]
        await router.adopted()
        three.status = 503
        for _ in range(4):
            await router.ask()
        assert state_of(router, "third") is BreakerState.OPEN
        three.status = 200
        await router.router.probe_servers()
        assert state_of(router, "third") is BreakerState.HALF_OPEN
        assert (await router.ask()).status_code == 200
        assert state_of(router, "third") is BreakerState.CLOSED


@pytest.mark.parametrize(("status", "is_well"), [(200, True), (404, True), (429, True), (500, False), (401, False)])
async def test_an_ejected_server_is_tried_by_the_router_itself_while_another_serves(
    router: Running, stage: Stage, status: int, is_well: bool
) -> None:
    await two_servers(router, stage, upstream_model="tiny")
    stage.one.status = status
    breaker = router.router.fleet.servers["first"].breaker
    breaker.failed(time.monotonic(), is_certain=True)
    breaker.reachable(time.monotonic())
    assert (await router.ask()).headers["x-wattshift-location"] == "there"
    await router.router._check()  # pyright: ignore[reportPrivateUsage]
    await stage.one.until(lambda: not router.router.trials.running)
    assert [json.loads(body) for body in stage.one.seen] == [{"model": "tiny", "prompt": "1", "max_tokens": 1}]
    assert (breaker.opened_s is None) is is_well
    assert breaker.ejections == (0 if is_well else 2)


async def test_a_server_on_trial_gets_one_request_until_that_one_ends(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, "first")]
    await router.adopted()
    stage.one.gate = asyncio.Event()
    breaker = router.router.fleet.servers["first"].breaker
    before = asyncio.create_task(router.ask())
    await stage.one.until(lambda: len(stage.one.seen) == 1)
    breaker.failed(time.monotonic(), is_certain=True)
    breaker.reachable(time.monotonic())
    trial = asyncio.create_task(router.ask())
    await stage.one.until(lambda: len(stage.one.seen) == 2)
    for leaving, passes in ((before, False), (trial, True)):
        cancelled = stage.one.cancelled
        leaving.cancel()
        await stage.one.until(lambda cancelled=cancelled: stage.one.cancelled > cancelled)
        assert breaker.passes(time.monotonic()) is passes


async def test_a_stream_that_a_hung_server_does_not_begin_is_answered_by_another(stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    stage.plane.servers = [
        a_routed_server(stage.one, "hung", gco2_per_kwh=1.0),
        a_routed_server(stage.two, "sound", gco2_per_kwh=500.0),
    ]
    async with stage.router(stream_first_byte_timeout_s=0.2) as router:
        await router.adopted()
        for number in range(FAILURES):
            answer = await router.ask(json=chat("Hi", stream=True))
            assert answer.status_code == 200
            assert "two0" in answer.text
            assert len(stage.one.seen) == number + 1
        assert state_of(router, "hung") is BreakerState.OPEN
        stage.plane.servers = stage.plane.servers[:1]
        await router.adopted()
        router.router.fleet.servers["hung"].breaker.succeeded()
        alone = asyncio.create_task(router.ask(json=chat("Hi", stream=True)))
        await stage.one.until(lambda: len(stage.one.seen) == FAILURES + 1)
        connection = next(iter(router.router.fleet.servers["hung"].origin.busy))
        connection.check(router.router.limits, time.monotonic() + 100)
        assert connection.error is None, "nobody else could answer it"
        stage.one.gate.set()
        assert (await alone).status_code == 200


async def test_a_server_that_says_itself_that_it_cannot_serve_is_given_nothing(router: Running, stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, "ill"), a_routed_server(stage.two, "sound")]
    await router.adopted()
    stage.one.health = 503
    await router.router.probe_servers()
    assert state_of(router, "ill") is BreakerState.OPEN
    await router.ask()
    assert (len(stage.one.seen), len(stage.two.seen)) == (0, 1)
    stage.one.health = 200
    await router.router.probe_servers()
    assert state_of(router, "ill") is BreakerState.HALF_OPEN
