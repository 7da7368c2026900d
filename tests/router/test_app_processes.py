"""Several router processes before one application: one queue, and no instance has more than it may."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
import pytest

from services.contracts.identity import KeyLimits
from services.contracts.routing import RouterState
from services.kit.credentials import Credential, roots_of
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
from tests.support.routers import Running
from tests.support.tokens import TOKEN

PEERS_SECRET = Credential.derived("router", roots_of(TOKEN)).peers_secret().encode()


@dataclass
class Pair:
    """Two routers, the first of which assigns instances for both."""

    stage: Stage
    first: Running
    second: Running
    one: InstanceServer
    two: InstanceServer

    async def together(self) -> None:
        """Have both see each other, and read the table."""
        for router in (self.first, self.second, self.first):
            await router.router.peers.look()
            await router.adopted()
        await until(lambda: self.second.router.coordinator.assigned_by == self.first.router.name)

    def waiting(self, router: Running) -> int:
        return router.router.assigner.queues[APP].waiting


@pytest.fixture
async def pair(stage: Stage) -> AsyncIterator[Pair]:
    stage.plane.apps = [a_routed_app()]
    async with AsyncExitStack() as stack:
        one, two = await stack.enter_async_context(instance_servers("one", "two"))
        stage.plane.app_servers = [a_routed_instance(one)]
        first = await stack.enter_async_context(stage.router())
        second = await stack.enter_async_context(stage.router())
        found = Pair(stage, first, second, one, two)
        await found.together()
        yield found


def ask(router: Running, number: int) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(router.ask(INFER, json=an_inference(number)))


async def test_requests_through_two_processes_are_served_in_the_order_of_their_arrival(pair: Pair) -> None:
    pair.one.gate = asyncio.Event()
    asked: list[asyncio.Task[httpx.Response]] = []
    for number in range(8):
        asked.append(ask((pair.first, pair.second)[number % 2], number))
        await until(lambda number=number: pair.waiting(pair.first) + len(pair.one.seen) == number + 1)
    assert pair.waiting(pair.second) == 0
    pair.one.gate.set()
    assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 8
    assert pair.one.numbers == list(range(8))
    assert pair.one.most_held == 1


async def test_an_instance_never_has_two_requests_under_load_from_both(pair: Pair) -> None:
    pair.stage.plane.app_servers = [a_routed_instance(pair.one), a_routed_instance(pair.two, variant="b7")]
    await pair.together()
    asked = [ask((pair.first, pair.second)[number % 2], number) for number in range(60)]
    assert {each.status_code for each in await asyncio.gather(*asked)} == {200}
    assert (pair.one.most_held, pair.two.most_held) == (1, 1)
    assert sorted(pair.one.numbers + pair.two.numbers) == list(range(60))


async def test_a_client_that_leaves_the_second_process_frees_its_place(pair: Pair) -> None:
    pair.one.gate = asyncio.Event()
    held = ask(pair.second, 0)
    await until(lambda: pair.one.held == 1)
    waits, last = ask(pair.second, 1), ask(pair.second, 2)
    await until(lambda: pair.waiting(pair.first) == 2)
    waits.cancel()
    await until(lambda: pair.waiting(pair.first) == 1)
    held.cancel()
    pair.one.gate.set()
    assert (await last).status_code == 200
    assert pair.one.numbers == [0, 2]


async def test_what_another_process_holds_at_an_instance_that_drains_is_reported(pair: Pair) -> None:
    pair.one.gate = asyncio.Event()
    asked = ask(pair.second, 0)
    await until(lambda: pair.one.held == 1)
    pair.stage.plane.app_servers = [a_routed_instance(pair.one, state="draining")]
    await pair.first.adopted()
    assert pair.stage.plane.held[-1].held == {"instance_one": 1}
    pair.one.gate.set()
    assert (await asked).status_code == 200


async def test_a_full_queue_is_full_for_both(stage: Stage) -> None:
    stage.plane.apps = [a_routed_app()]
    async with (
        instance_servers("one", "two") as (one, two),
        stage.router(max_queue=1) as first,
        stage.router(max_queue=1) as second,
    ):
        stage.plane.app_servers = [a_routed_instance(one, service_ms=2_000.0)]
        pair = Pair(stage, first, second, one, two)
        await pair.together()
        one.gate = asyncio.Event()
        asked = [ask(first, 0)]
        await until(lambda: one.held == 1)
        asked.append(ask(first, 1))
        await until(lambda: pair.waiting(first) == 1)
        refused = await ask(second, 2)
        assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "4"
        assert second.router.coordinator.assigned_by == first.router.name
        one.gate.set()
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200, 200]


async def test_when_the_assigning_process_goes_the_other_serves_what_waits_and_still_one_at_a_time(pair: Pair) -> None:
    pair.one.gate = asyncio.Event()
    asked = [ask(pair.second, 0)]
    await until(lambda: pair.one.held == 1)
    asked += [ask(pair.second, number) for number in (1, 2)]
    await until(lambda: pair.waiting(pair.first) == 2)
    await pair.first.router.coordinator.stop()
    await until(lambda: pair.second.router.coordinator.assigned_by == pair.second.router.name)
    assert pair.waiting(pair.second) == 2
    assert len(pair.one.seen) == 1  # the new queue knows of the request that is there
    pair.one.gate.set()
    assert [each.status_code for each in await asyncio.gather(*asked)] == [200] * 3
    assert pair.one.numbers == [0, 1, 2]
    assert pair.one.most_held == 1


async def test_an_instance_that_only_the_assigning_process_has_read_of_is_used(pair: Pair) -> None:
    pair.second.router.fleet.adopt = lambda table, processes=1: None  # type: ignore[method-assign]  # it reads no newer table
    pair.stage.plane.app_servers = [a_routed_instance(pair.two)]
    await pair.first.adopted()
    assert (await ask(pair.second, 0)).json()["outputs"][0]["data"] == ["two"]


async def test_a_process_that_cannot_be_reached_is_named_once_and_done_without(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = pair.first.router.coordinator
    gone = RouterState(at_s=time.time() + 60, started_at_s=1.0, address="127.0.0.1:1")
    for _ in range(3):
        coordinator.choose({"router-gone": gone.model_copy(update={"at_s": time.time() + 60})})
        connecting = coordinator._connecting
        assert connecting is not None
        await connecting
    assert caplog.text.count("router_peer.not_reached") == 1
    assert coordinator.assigned_by == pair.first.router.name
    assert (await ask(pair.first, 0)).status_code == 200


@pytest.mark.parametrize(
    "line",
    [
        b'["take",1,"images","acme",null,[]]\n',
        b'["hello","a wrong token","x","%s"]\n',
        b'["hello","%b","x","another process"]\n' % PEERS_SECRET,
        b"not json\n",
        b"x" * 100_000,
    ],
)
async def test_strangers_are_not_listened_to(pair: Pair, line: bytes) -> None:
    address = pair.first.router.coordinator.address
    assert address is not None
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(line.replace(b"%s", pair.first.router.name.encode()))
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    assert (await ask(pair.second, 0)).status_code == 200


async def test_a_key_or_a_request_may_ask_for_an_accuracy_whichever_process_assigns(pair: Pair) -> None:
    accurate = a_routed_instance(pair.one).model_copy(update={"accuracy_pct": 90.0})
    pair.stage.plane.app_servers = [a_routed_instance(pair.two).model_copy(update={"accuracy_pct": 70.0}), accurate]
    pair.stage.plane.key_limits = KeyLimits(least_accuracy_pct=80.0)
    await pair.together()
    for router in (pair.first, pair.second):
        for headers in ({}, {"x-wattshift-least-accuracy": "60"}, {"x-wattshift-least-accuracy": "85"}):
            answer = await router.http.post(INFER, json=an_inference(), headers=headers)
            assert (answer.status_code, answer.headers["x-wattshift-accuracy"]) == (200, "90")
        refused = await router.http.post(INFER, json=an_inference(), headers={"x-wattshift-least-accuracy": "95"})
        assert (refused.status_code, refused.json()["code"]) == (503, "no_instance")
        assert "with an accuracy of 95 %" in refused.json()["error"]
        wrong = await router.http.post(INFER, json=an_inference(), headers={"x-wattshift-least-accuracy": "all"})
        assert wrong.status_code == 400
    assert not pair.two.seen
