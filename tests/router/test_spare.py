"""Requests that only get what others leave: of the tier ``flex``, and lines of batches."""

from __future__ import annotations

import asyncio
import contextlib
import json

import openai
import pytest
from openai import AsyncOpenAI

from services.contracts.batches import BATCH_HEADER, BATCH_MODEL_HEADER
from services.contracts.identity import Identity, KeyLimits, Role
from services.core.policies.freesh.laxity import ServingRequest
from services.core.policies.freesh.server_choice import Work
from services.router.fleet import Pool, Server
from services.router.lanes import LaneRules, Lanes, NoServerError, NoSpareError, Ticket
from tests.router.conftest import Stage, error_of
from tests.support.routers import MODEL, a_key, a_routed_pool, a_routed_server, chat
from tests.support.tokens import headers_for

HELLO = [{"role": "user", "content": "data: {Hello}"}]
CALLER = Identity(tenant_id="acme", role=Role.USER, key_id="key_acme")


async def test_flex_is_named_in_answers_and_streams_and_refused_while_others_leave_nothing(stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=1)]
    async with stage.router(flex_wait_s=0.1) as router:
        await router.adopted()
        async with AsyncOpenAI(base_url=f"{router.url}/v1", api_key=a_key(), max_retries=0) as client:
            create = client.chat.completions.create
            answer = await create(model=MODEL, messages=HELLO, service_tier="flex")
            stream = await create(model=MODEL, messages=HELLO, service_tier="flex", stream=True)
            chunks = [chunk async for chunk in stream]
            assert answer.service_tier == "flex"
            assert {chunk.service_tier for chunk in chunks} == {"flex"}
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one0 one1 one2 one3 one4 "
            assert (await create(model=MODEL, messages=HELLO)).service_tier is None

            stage.one.gate = asyncio.Event()
            others = asyncio.create_task(router.ask())
            await stage.one.until(lambda: stage.one.held == 1)
            with pytest.raises(openai.RateLimitError) as refused:
                await create(model=MODEL, messages=HELLO, service_tier="flex")
            assert refused.value.code == "resource_unavailable"
            assert refused.value.response.headers["retry-after"] == "2"
            stage.one.gate.set()
            assert (await others).status_code == 200


async def test_a_flex_request_waits_until_there_is_room(stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=1)]
    stage.one.gate = asyncio.Event()
    async with stage.router() as router:
        await router.adopted()
        others = asyncio.create_task(router.ask())
        await stage.one.until(lambda: stage.one.held == 1)
        flex = asyncio.create_task(router.ask(json=chat(service_tier="flex")))
        await asyncio.sleep(0)
        stage.one.gate.set()

        assert (await others).status_code == (await flex).status_code == 200


async def test_lines_are_sent_by_serving_alone_and_go_to_the_places_they_name(stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, "one"), a_routed_server(stage.two, "two", location="there")]
    async with stage.router() as router:
        await router.adopted()
        forged = await router.ask(headers={BATCH_HEADER: "here"})
        assert forged.status_code == 401
        serving = headers_for("router", CALLER, issuer="serving")
        for place, server in (("there", stage.two), ("here", stage.one)):
            seen = len(server.seen)
            answer = await router.ask(headers={BATCH_HEADER: place, **serving})
            assert answer.headers["x-wattshift-location"] == place
            assert len(server.seen) == seen + 1
        assert error_of(await router.ask(headers={BATCH_HEADER: "elsewhere", **serving}))[0] == 429


async def test_the_model_that_serving_chose_for_a_line_answers_it_under_the_name_in_its_body(stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(), a_routed_pool("next", models=["next-7b"])]
    stage.plane.servers = [a_routed_server(stage.one, "one"), a_routed_server(stage.two, "two", pool="next")]
    stage.plane.key_limits = KeyLimits(models=["none"], aliases={"gpt-4o": {MODEL: 1}})
    async with stage.router() as router:
        await router.adopted()
        serving = {**headers_for("router", CALLER, issuer="serving"), BATCH_HEADER: ""}
        for name in ("gpt-4o", "no-alias"):
            answer = await router.ask(headers={**serving, BATCH_MODEL_HEADER: "next-7b"}, json=chat(model=name))
            if name == "gpt-4o":
                assert answer.json()["model"] == "gpt-4o"
                assert json.loads(stage.two.seen[0])["model"] == "next-7b"
            else:
                assert error_of(answer) == (404, "model_not_found")
        ours = await router.ask(headers={BATCH_MODEL_HEADER: "next-7b"}, json=chat(model="gpt-4o"))
        assert ours.headers["x-wattshift-model"] == MODEL  # it is serving's alone


async def test_a_flex_request_may_name_an_alias(stage: Stage) -> None:
    stage.plane.key_limits = KeyLimits(aliases={"gpt-4o": {MODEL: 1}})
    async with stage.router() as router:
        await router.adopted()
        answer = await router.ask(json=chat(model="gpt-4o", service_tier="flex"))
        assert (answer.json()["model"], answer.json()["service_tier"]) == ("gpt-4o", "flex")


def a_ticket(name: str, tokens: int = 200) -> Ticket:
    return Ticket(ServingRequest(name, 0.0, tokens, 100), 1e6, {}, Work(100, tokens))


async def test_some_places_stay_free_and_others_tokens_stay_within_their_limit(stage: Stage) -> None:
    classes = [{"name": "SS", "max_tbt_ms": 100.0}]
    made = Server(a_routed_server(stage.one, capacity=10, ttft_ms=100.0, tbt_ms=50.0), ())
    lane = Lanes(LaneRules()).of(Pool(a_routed_pool(classes=classes), servers=[made]), "SS")

    for name in range(9):
        await lane.take_spare(a_ticket(f"spare {name}"), 0.0, ())
    with pytest.raises(NoSpareError):
        await lane.take_spare(a_ticket("one too many"), 0.0, ())
    assert lane.in_service == {}

    for ticket in list(made.spare):
        lane.leave(ticket, made)
    assert made.held == 0
    await lane.take(a_ticket("interactive"), 1.0)
    for number in range(8):
        with contextlib.suppress(NoSpareError):
            await lane.take_spare(a_ticket(f"beside {number}", 10_000), 0.0, ())
    assert 0 < len(made.spare) < 8
    assert made.costs.tbt_s <= 0.1 * 0.8


async def test_a_lane_without_servers_says_so(stage: Stage) -> None:
    lane = Lanes(LaneRules()).of(Pool(a_routed_pool(), servers=[]), "")
    with pytest.raises(NoServerError):
        await lane.take_spare(a_ticket("a"), 0.0, ())


@pytest.mark.parametrize("may_repeat", [True, False])
async def test_who_waits_is_given_a_place_by_those_that_may_be_sent_again(stage: Stage, may_repeat: bool) -> None:
    made = Server(a_routed_server(stage.one, capacity=1), ())
    lane = Lanes(LaneRules()).of(Pool(a_routed_pool(), servers=[made]), "")
    spare = a_ticket("spare")
    spare.may_repeat = may_repeat
    await lane.take_spare(spare, 0.0, ())

    waiting = asyncio.create_task(lane.take(a_ticket("interactive"), 60.0))
    await asyncio.sleep(0)

    assert spare.is_preempted == may_repeat
    lane.leave(spare, made)
    lane.pump()
    assert await waiting is made


async def test_a_server_that_comes_back_has_no_place_for_spare_requests_beside_who_waits(stage: Stage) -> None:
    one, two = (Server(a_routed_server(each, capacity=1), ()) for each in (stage.one, stage.two))
    lane = Lanes(LaneRules()).of(Pool(a_routed_pool(), servers=[one, two]), "")
    one.breaker.opened_s = asyncio.get_running_loop().time()
    await lane.take(a_ticket("first"), 1.0)
    spare = a_ticket("spare")
    one.breaker.opened_s = None
    await lane.take_spare(spare, 0.0, ())
    one.breaker.opened_s = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(lane.take(a_ticket("second"), 60.0))
    await asyncio.sleep(0)
    assert not spare.is_preempted

    one.breaker.opened_s = None
    lane.pump()

    assert spare.is_preempted
    lane.leave(spare, one)
    lane.pump()
    assert await waiting is one
