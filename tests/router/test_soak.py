"""A long time at the door: memory stays flat, connections are returned, nothing is held for ever."""

from __future__ import annotations

import asyncio
import gc
import random

import httpx
import psutil
import pytest

from tests.router.conftest import Stage
from tests.support.routers import MODEL, Running, a_key, a_routed_pool, a_routed_server, chat

pytestmark = pytest.mark.slow

ROUND = 1_000
ROUNDS = 5
MOST_GROWTH_MB = 25


async def test_memory_is_flat_over_thousands_of_requests_of_all_kinds(router: Running, stage: Stage) -> None:
    stage.plane.pools = [a_routed_pool(fallback=["other"]), a_routed_pool("other", models=["other"])]
    stage.plane.servers = [
        a_routed_server(stage.one, "a", capacity=8),
        a_routed_server(stage.two, "b", capacity=8),
        a_routed_server(stage.one, "c", url="http://127.0.0.1:1"),
    ]
    await router.adopted()
    stage.one.tokens = stage.two.tokens = 3
    rng = random.Random(7)
    resident_mb: list[float] = []
    for _ in range(ROUNDS):
        turns = asyncio.Semaphore(64)
        await asyncio.gather(*(one_of_many(router, rng, turns) for _ in range(ROUND)))
        stage.one.seen.clear(), stage.two.seen.clear()
        stage.one.headers.clear(), stage.two.headers.clear()
        gc.collect()
        resident_mb.append(psutil.Process().memory_info().rss / 2**20)
    assert resident_mb[-1] - resident_mb[1] < MOST_GROWTH_MB, resident_mb
    await stage.one.until(lambda: router.router.gate.in_flight == 0)
    fleet = router.router.fleet
    assert [server.held for server in fleet.servers.values()] == [0, 0, 0]
    assert all(not server.origin.busy for server in fleet.servers.values())
    assert [(len(lane.queue), lane.in_service) for lane in router.router.lanes.all()] == [(0, {})] * len(
        router.router.lanes.all()
    )


async def one_of_many(router: Running, rng: random.Random, turns: asyncio.Semaphore) -> None:
    kind = rng.random()
    text = f"question {rng.randrange(10**9)} " * rng.randrange(1, 60)
    async with turns:
        if kind < 0.4:
            assert (await router.ask(json=chat(text))).status_code == 200
        elif kind < 0.7:
            assert "[DONE]" in (await router.ask(json=chat(text, stream=True))).text
        elif kind < 0.8:
            assert (await router.ask(json=chat(text, model=f"model-{rng.randrange(10**9)}"))).status_code == 404
        elif kind < 0.9:
            try:
                async with asyncio.timeout(rng.random() * 0.02):
                    await router.ask(json=chat(text, stream=True))
            except TimeoutError:
                pass
        else:
            answer = await router.ask(key=a_key(rng.choice(["acme", "umbra"])), json={"model": MODEL, "messages": text})
            assert answer.status_code in (200, 404)


async def test_two_thousand_streams_are_open_at_once_and_none_is_lost(stage: Stage) -> None:
    stage.plane.servers = [a_routed_server(stage.one, capacity=4_096)]
    stage.one.stream_gate = asyncio.Event()
    # The first stream is silent until the last one is open, and all share one event loop with the clients.
    async with stage.router(silence_timeout_s=3_600, connect_timeout_s=600) as router:
        await router.adopted()
        limits = httpx.Limits(max_connections=None)
        headers = {"authorization": f"Bearer {a_key()}"}
        async with httpx.AsyncClient(base_url=router.url, headers=headers, limits=limits, timeout=None) as http:
            asking = [
                asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=True))) for _ in range(2_000)
            ]
            await stage.one.until(lambda: stage.one.held == 2_000, timeout_s=900)
            assert router.router.gate.in_flight == 2_000
            stage.one.stream_gate.set()
            answers = await asyncio.gather(*asking)
    assert sum("data: [DONE]" in answer.text for answer in answers) == 2_000
