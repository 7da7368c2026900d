"""Lanes: who is next when all servers are full, who is turned away, and who loses its place."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from services.contracts.routing import RoutedClass
from services.core.policies.freesh.laxity import Order
from services.core.policies.freesh.server_choice import Work
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, Running, a_key, a_routed_pool, a_routed_server, chat


def waiting(router: Running) -> int:
    return sum(len(lane.queue) for lane in router.router.lanes.all())


async def until_waiting(router: Running, stage: Stage, count: int) -> None:
    await stage.one.until(lambda: waiting(router) == count)


def asked_for(stage: Stage) -> list[str]:
    return [json.loads(body)["messages"][0]["content"] for body in stage.one.seen]


@pytest.fixture
async def narrow(stage: Stage) -> Stage:
    """A stage whose only server takes one request at a time, and holds it until told."""
    stage.plane.servers = [a_routed_server(stage.one, capacity=1)]
    stage.one.gate = asyncio.Event()
    return stage


@pytest.mark.parametrize(
    ("order", "expected"),
    [(Order.FCFS, ["long", "short"]), (Order.LLF, ["short", "long"]), (Order.SRTF, ["short", "long"])],
)
async def test_the_next_is_the_first_in_the_chosen_order(narrow: Stage, order: Order, expected: list[str]) -> None:
    async with narrow.router(order=order, preemptions=0) as router:
        await router.adopted()
        first = asyncio.create_task(router.ask(json=chat("first")))
        await narrow.one.until(lambda: narrow.one.held == 1)
        rest = [asyncio.create_task(router.ask(json=chat("long", max_tokens=190)))]
        await until_waiting(router, narrow, 1)
        rest.append(asyncio.create_task(router.ask(json=chat("short", max_tokens=2))))
        await until_waiting(router, narrow, 2)
        narrow.one.gate.set()
        assert {answer.status_code for answer in await asyncio.gather(first, *rest)} == {200}
    assert asked_for(narrow) == ["first", *expected]


async def test_a_more_urgent_request_takes_the_place_of_one_without_an_answer_once(narrow: Stage) -> None:
    async with narrow.router(order=Order.SRTF) as router:
        await router.adopted()
        long = asyncio.create_task(router.ask(json=chat("long", max_tokens=190)))
        await narrow.one.until(lambda: narrow.one.held == 1)
        short = asyncio.create_task(router.ask(json=chat("short", max_tokens=2)))
        await narrow.one.until(lambda: asked_for(narrow) == ["long", "short"])
        shorter = asyncio.create_task(router.ask(json=chat("shorter", max_tokens=1)))
        await until_waiting(router, narrow, 2)
        narrow.one.gate.set()
        answers = await asyncio.gather(long, short, shorter)
        assert [*router.router.metrics.preemptions.values.values()] == [1]
    assert {answer.status_code for answer in answers} == {200}
    assert narrow.one.cancelled == 1
    assert asked_for(narrow) == ["long", "short", "shorter", "long"]


async def test_what_may_not_be_sent_twice_keeps_its_place(narrow: Stage) -> None:
    async with narrow.router(order=Order.SRTF) as router:
        await router.adopted()
        long = asyncio.create_task(router.ask(json=chat("long", max_tokens=190, store=True)))
        await narrow.one.until(lambda: narrow.one.held == 1)
        short = asyncio.create_task(router.ask(json=chat("short", max_tokens=2)))
        await until_waiting(router, narrow, 1)
        narrow.one.gate.set()
        answers = await asyncio.gather(long, short)
    assert {answer.status_code for answer in answers} == {200}
    assert narrow.one.cancelled == 0
    assert asked_for(narrow) == ["long", "short"]


async def test_what_a_client_has_begun_to_receive_keeps_its_place(narrow: Stage) -> None:
    narrow.one.gate = None
    narrow.one.stream_gate = asyncio.Event()
    async with narrow.router(order=Order.SRTF) as router:
        await router.adopted()
        async with router.http.stream("POST", "/v1/chat/completions", json=chat("long", stream=True)) as stream:
            pieces = stream.aiter_text()
            assert "one0" in await anext(pieces)
            short = asyncio.create_task(router.ask(json=chat("short", max_tokens=1)))
            await until_waiting(router, narrow, 1)
            narrow.one.stream_gate.set()
            rest = "".join([piece async for piece in pieces])
        assert "[DONE]" in rest
        assert (await short).status_code == 200
    assert narrow.one.cancelled == 0


async def test_a_full_queue_answers_429_with_a_time_and_disturbs_no_other(narrow: Stage) -> None:
    async with narrow.router(max_queue=2) as router:
        await router.adopted()
        accepted = [asyncio.create_task(router.ask()) for _ in range(3)]
        await narrow.one.until(lambda: narrow.one.held == 1 and waiting(router) == 2)
        refused = await router.ask()
        assert error_of(refused) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        narrow.one.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*accepted)] == [200] * 3


async def test_who_waits_for_too_long_gets_429(narrow: Stage) -> None:
    async with narrow.router(queue_timeout_s=0.1) as router:
        await router.adopted()
        first = asyncio.create_task(router.ask())
        await narrow.one.until(lambda: narrow.one.held == 1)
        assert error_of(await router.ask()) == (429, "queue_full")
        assert waiting(router) == 0
        narrow.one.gate.set()
        assert (await first).status_code == 200


async def test_a_client_that_leaves_the_queue_is_never_sent(narrow: Stage) -> None:
    async with narrow.router() as router:
        await router.adopted()
        first = asyncio.create_task(router.ask(json=chat("first")))
        await narrow.one.until(lambda: narrow.one.held == 1)
        gone = asyncio.create_task(router.ask(json=chat("gone")))
        await until_waiting(router, narrow, 1)
        gone.cancel()
        await until_waiting(router, narrow, 0)
        narrow.one.gate.set()
        assert (await first).status_code == 200
        assert (await router.ask(json=chat("next"))).status_code == 200
    assert asked_for(narrow) == ["first", "next"]


async def test_a_tenant_that_holds_more_than_its_share_comes_after_the_others(narrow: Stage) -> None:
    narrow.plane.pools = [a_routed_pool(tenants=["umbra"])]
    narrow.plane.servers = [a_routed_server(narrow.one, capacity=2)]
    async with narrow.router(order=Order.FCFS) as router:
        await router.adopted()
        mine = [asyncio.create_task(router.ask(json=chat(f"mine {index}"))) for index in range(2)]
        await narrow.one.until(lambda: narrow.one.held == 2)
        mine.append(asyncio.create_task(router.ask(json=chat("mine later"))))
        await until_waiting(router, narrow, 1)
        theirs = asyncio.create_task(router.ask(json=chat("theirs"), key=a_key("umbra")))
        await until_waiting(router, narrow, 2)
        narrow.one.gate.set()
        await asyncio.gather(*mine, theirs)
    assert asked_for(narrow)[2:] == ["theirs", "mine later"]


async def test_a_tenant_may_have_so_many_requests_at_once(narrow: Stage) -> None:
    async with narrow.router(max_requests_per_tenant=1) as router:
        await router.adopted()
        first = asyncio.create_task(router.ask())
        await narrow.one.until(lambda: narrow.one.held == 1)
        refused = await router.ask()
        assert error_of(refused) == (429, "rate_limit_exceeded")
        narrow.one.gate.set()
        assert (await first).status_code == 200


def four_classes(**more: Any) -> dict[str, Any]:
    classes = [RoutedClass(name=name) for name in ("SS", "SL", "LS", "LL")]
    return {"partition": "a", "input_tokens": 100, "output_tokens": 50, "classes": classes, **more}


async def test_requests_go_to_the_servers_of_their_class_by_the_thresholds_in_force(
    router: Running, stage: Stage
) -> None:
    stage.plane.pools = [a_routed_pool(**four_classes())]
    stage.plane.servers = [
        a_routed_server(stage.one, "short_in", request_class="SS"),
        a_routed_server(stage.two, "long_in", request_class="LS"),
    ]
    await router.adopted()
    await router.ask(json=chat("Hi", max_tokens=10))
    await router.ask(json=chat("word " * 200, max_tokens=10))
    assert (len(stage.one.seen), len(stage.two.seen)) == (1, 1)
    stage.plane.pools = [a_routed_pool(**four_classes(input_tokens=10_000))]
    await router.adopted()
    await router.ask(json=chat("word " * 200, max_tokens=10))
    assert (len(stage.one.seen), len(stage.two.seen)) == (2, 1)


async def test_a_class_without_servers_is_served_by_those_of_the_others(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(**four_classes())]
    stage.plane.servers = [a_routed_server(stage.one, request_class="LL")]
    await router.adopted()
    assert (await router.ask(json=chat("Hi", max_tokens=10))).status_code == 200


async def test_a_class_whose_servers_fail_is_served_by_those_of_the_others(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(**four_classes())]
    stage.plane.servers = [
        a_routed_server(stage.one, "dead", request_class="SS", url="http://127.0.0.1:1"),
        a_routed_server(stage.two, "alive", request_class="LL"),
    ]
    await router.adopted()
    answers = [await router.ask(json=chat("Hi", max_tokens=10)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(stage.two.seen) == 3


async def test_the_cleanest_place_is_taken_unless_it_is_too_far_away(stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(classes=[RoutedClass(name="any", max_latency_s=8.0)], partition="p")]
    stage.plane.servers = [
        a_routed_server(stage.one, "near", location="near", gco2_per_kwh=500.0),
        a_routed_server(stage.two, "far", location="far", gco2_per_kwh=50.0),
    ]
    async with stage.router(network_ms={"default": {"far": 20.0}, "island": {"far": 9_000.0}}) as router:
        await router.adopted()
        assert (await router.ask()).headers["x-wattshift-location"] == "far"
        islanders = await router.ask(headers={"x-wattshift-region": "island"})
        assert islanders.headers["x-wattshift-location"] == "near"


async def test_the_cleaner_of_equal_endpoints_is_taken_also_after_it_was_drained(router: Running, stage: Stage) -> None:
    clean, dirty = (
        a_routed_server(server, name, pool=None, models=[MODEL], gco2_per_kwh=gco2)
        for server, name, gco2 in ((stage.one, "clean", 96.0), (stage.two, "dirty", 343.0))
    )

    async def asked(count: int) -> tuple[int, int]:
        stage.one.seen.clear(), stage.two.seen.clear()
        await asyncio.gather(*(router.ask(json=chat(f"Question {number}")) for number in range(count)))
        await router.router.probe_servers()
        return len(stage.one.seen), len(stage.two.seen)

    stage.plane.servers = [clean, dirty]
    await router.adopted()
    assert await asked(8) == (8, 0)
    stage.plane.servers = [clean.model_copy(update={"state": "draining"}), dirty]
    await router.adopted()
    assert await asked(40) == (0, 40)
    stage.plane.servers = [clean, dirty]
    await router.adopted()
    assert await asked(8) == (8, 0)
    assert await asked(40) == (40, 0)


async def test_a_server_that_was_slow_is_given_requests_again_once_it_has_been_left_alone(
    router: Running, stage: Stage
) -> None:
    stage.plane.pools = [a_routed_pool(classes=[RoutedClass(name="any", max_latency_s=8.0)], partition="p")]
    stage.plane.servers = [
        a_routed_server(stage.one, "clean", gco2_per_kwh=96.0),
        a_routed_server(stage.two, "dirty", gco2_per_kwh=343.0),
    ]
    await router.adopted()
    clean = router.router.fleet.servers["clean"]

    async def takes_s(probes: int) -> float:
        for _ in range(probes):
            await router.router.probe_servers()
        return clean.costs.ttft_s

    for _ in range(50):
        given = clean.costs.begin(Work(100, 5.0), 0.0)
        clean.costs.learn(given, 60.0, 61.0, 5)
        clean.costs.end(given)
    slow_s = clean.costs.ttft_s
    await router.ask()
    assert (len(stage.one.seen), len(stage.two.seen)) == (0, 1), "it would be late"
    assert await takes_s(1) == slow_s, "it has answered since the last look"
    given = clean.costs.begin(Work(100, 5.0), 0.0)
    assert await takes_s(1) == slow_s, "it works on a request"
    clean.costs.end(given)
    assert await takes_s(35) < 8.0
    await router.ask()
    assert (len(stage.one.seen), len(stage.two.seen)) == (1, 1)


async def test_a_lane_of_other_classes_servers_prefers_none_because_its_own_requests_are_short(
    router: Running, stage: Stage
) -> None:
    profile = {"full_power_w": 400.0, "ttft_ms": 100.0, "tbt_ms": 30.0}
    stage.plane.pools = [a_routed_pool(**four_classes())]
    stage.plane.servers = [
        a_routed_server(
            stage.one, "short", request_class="SS", max_qps=9.0, latency_s=1, gco2_per_kwh=300.0, **profile
        ),
        a_routed_server(stage.two, "long", request_class="LL", max_qps=1.0, latency_s=9, gco2_per_kwh=100.0, **profile),
    ]
    await router.adopted()
    await router.ask(json=chat("word " * 200, max_tokens=10))
    assert (len(stage.one.seen), len(stage.two.seen)) == (0, 1)


SYSTEM = "One system prompt for all. " * 40


def talk(*turns: str) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    return {"model": MODEL, "messages": [{"role": "system", "content": SYSTEM}, *messages]}


async def test_requests_at_once_with_one_system_prompt_are_spread(router: Running, stage: Stage) -> None:
    stage.one.gate = stage.two.gate = asyncio.Event()
    servers = (stage.one, "a"), (stage.two, "b"), (stage.two, "c")
    stage.plane.servers = [a_routed_server(server, name) for server, name in servers]
    await router.adopted()
    asked = [asyncio.create_task(router.ask(json=talk(f"Question {number}"))) for number in range(45)]
    await stage.one.until(lambda: stage.one.held + stage.two.held == 45)
    held = [each.held for each in router.router.fleet.servers.values()]
    stage.one.gate.set()
    await asyncio.gather(*asked)
    assert sum(held) == 45
    assert all(abs(each - 15) <= 2 for each in held), held


async def test_a_conversation_goes_on_where_its_history_is(router: Running, stage: Stage) -> None:
    stage.one.gate = stage.two.gate = asyncio.Event()
    stage.plane.servers = [a_routed_server(stage.one, "a", location="a"), a_routed_server(stage.two, "b", location="b")]
    await router.adopted()
    openings = [f"Question {number} is long. " * 40 for number in range(6)]
    asked = [asyncio.create_task(router.ask(json=talk(each))) for each in openings]
    await stage.one.until(lambda: stage.one.held + stage.two.held == 6)
    stage.one.gate.set()
    first = [answer.headers["x-wattshift-location"] for answer in await asyncio.gather(*asked)]
    assert set(first) == {"a", "b"}
    again = [
        (await router.ask(json=talk(each, "An answer.", "What else?"))).headers["x-wattshift-location"]
        for each in openings
    ]
    assert again == first


async def test_a_session_goes_on_where_it_was_and_an_adapter_where_it_is_loaded(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(models=[MODEL, "german", "french"])]
    stage.plane.servers = [a_routed_server(stage.one, "a", location="a"), a_routed_server(stage.two, "b", location="b")]
    await router.adopted()

    async def place_of(headers: dict[str, str] | None = None, **more: Any) -> str:
        body = {**chat("x", max_tokens=1), **more}
        for each in router.router.fleet.servers.values():
            each.costs.read_s = 0.0002  # both are as fast, whoever answers at once more often
        return (await router.ask(json=body, headers=headers or {})).headers["x-wattshift-location"]

    async def with_one_held(place: str, **more: Any) -> str:
        server = next(each for each in router.router.fleet.servers.values() if each.location == place)
        given = server.costs.begin(Work(100, 1.0), -1e6)
        try:
            return await place_of(**more)
        finally:
            server.costs.has_read(given, time.monotonic())  # else the server is thought to read it still
            server.costs.end(given)

    headers = {"x-session-id": "s"}
    ids: dict[str, Any] = {"messages": None, "prompt": list(range(10_000))}  # token ids: no beginning tells them
    for named in ({"headers": headers}, {"user": "u"}, {"prompt_cache_key": "k", "user": "u2"}):
        first = await place_of(**ids, **named)
        assert await with_one_held(first, **ids, **named) == first
    assert await with_one_held("a", **ids) == "b"
    at_b = await with_one_held("a", model="german")
    assert at_b == "b"
    assert await with_one_held("b", model="german") == "b"
    assert await with_one_held("b", model="french") == "a"


async def test_what_waits_inside_a_server_and_fills_its_memory_counts(router: Running, stage: Stage) -> None:
    stage.plane.servers = [
        a_routed_server(server, name, pool=None, models=[MODEL], load_path="/metrics")
        for server, name in ((stage.one, "a"), (stage.two, "b"))
    ]
    await router.adopted()

    async def chosen_of(one: str, two: str) -> str:
        stage.one.metrics, stage.two.metrics = one, two
        await router.router.probe_servers()
        before = len(stage.one.seen)
        await router.ask()
        return "a" if len(stage.one.seen) > before else "b"

    def says(running: int, queued: int, kv_use: float) -> str:
        load = {"num_requests_running": running, "num_requests_waiting": queued, "kv_cache_usage_perc": kv_use}
        return "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in load.items())

    assert await chosen_of(says(0, 0, 0.1), says(0, 0, 0.1)) == "a"
    assert await chosen_of(says(8, 3, 0.5), says(8, 0, 0.5)) == "b"
    assert await chosen_of(says(8, 0, 0.98), says(8, 0, 0.5)) == "b"
    assert await chosen_of(says(9, 0, 0.5), says(0, 0, 0.5)) == "b", "others sent it these"
    assert router.router.fleet.servers["a"].costs.others_tokens
    await chosen_of("no metrics", "")
    assert not router.router.fleet.servers["a"].costs.others_tokens, "nobody says it"


async def test_a_cached_beginning_is_not_worth_a_dirtier_or_a_late_answer(stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(classes=[RoutedClass(name="any", max_latency_s=8.0)], partition="p")]
    far = a_routed_server(stage.one, "a", location="far")
    one, two = (f"Question {number} is long. " * 40 for number in range(2))
    async with stage.router(network_ms={"default": {}, "island": {"far": 9_000.0}}) as router:

        async def place_of(question: str, region: str = "default") -> str:
            body = talk(question, "An answer.", "What else?")
            return (await router.ask(json=body, headers={"x-wattshift-region": region})).headers["x-wattshift-location"]

        stage.plane.servers = [far]
        await router.adopted()
        assert [await place_of(one), await place_of(two)] == ["far", "far"]
        stage.plane.servers = [far, a_routed_server(stage.two, "b", gco2_per_kwh=480.0)]
        await router.adopted()
        assert [await place_of(one), await place_of(two, "island")] == ["far", "here"]
        stage.plane.servers = [far, a_routed_server(stage.two, "b", gco2_per_kwh=400.0)]
        await router.adopted()
        assert await place_of(one) == "here"


async def test_by_weight_servers_share_in_proportion(stage: Stage) -> None:
    stage.plane.servers = [
        a_routed_server(stage.one, "a", weight=3.0),
        a_routed_server(stage.two, "b", weight=1.0, gco2_per_kwh=1.0),
    ]
    async with stage.router(placement="weights") as router:
        await router.adopted()
        for _ in range(12):
            await router.ask()
    assert (len(stage.one.seen), len(stage.two.seen)) == (9, 3)


async def test_laxity_is_passed_on_as_vllms_priority_where_the_pool_says_so(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(passes_priority=True)]
    await router.adopted()
    await router.ask(json=chat("long", max_tokens=190))
    await router.ask(json=chat("short", max_tokens=1))
    await router.ask(json=chat("own", priority=7))
    long, short, own = (json.loads(body)["priority"] for body in stage.one.seen)
    assert isinstance(long, int)
    assert long - short > 1_000  # a longer answer may wait longer: its window is a multiple of its length
    assert own > 1_000_000, "its key may not state one"
    stage.plane.pools = [a_routed_pool()]
    await router.adopted()
    await router.ask()
    assert "priority" not in json.loads(stage.one.seen[-1])
    assert json.loads(stage.one.seen[-1])["model"] == MODEL
