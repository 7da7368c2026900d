"""Twice what a server can do, for a while: who waits for too long is refused, and afterwards all is as before."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.core.policies.freesh.laxity import Order
from tests.router.conftest import Stage
from tests.support.routers import a_key, a_routed_server, chat

PLACES = 8
ANSWER_S = 0.4
LASTS_S = 40.0


@pytest.mark.live
@pytest.mark.parametrize("order", [Order.LLF, Order.FCFS])
async def test_all_places_serve_again_after_an_overload(stage: Stage, order: Order) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=PLACES)]
    stage.one.takes_s = ANSWER_S
    count = int(LASTS_S * 2 * PLACES / ANSWER_S)
    async with stage.router(order=order, queue_timeout_s=1.5) as router:
        await router.adopted()
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {a_key()}"}
        async with httpx.AsyncClient(base_url=router.url, headers=headers, limits=limits, timeout=60) as http:

            async def ask(number: int) -> int:
                await asyncio.sleep(number * LASTS_S / count)
                body = chat(f"Question {number}", max_tokens=1 + number * 37 % 190)
                return (await http.post("/v1/chat/completions", json=body)).status_code

            assert set(await asyncio.gather(*map(ask, range(count)))) == {200, 429}
        await stage.one.until(lambda: stage.one.held == 0)
        assert router.router.fleet.servers["instance_1"].held == 0
        stage.one.gate = asyncio.Event()
        last = [asyncio.create_task(router.ask()) for _ in range(PLACES)]
        await stage.one.until(lambda: stage.one.held == PLACES)
        stage.one.gate.set()
        assert [each.status_code for each in await asyncio.gather(*last)] == [200] * PLACES
