"""Variants of different accuracy behind one name: chosen by grid, time and the accuracy that a request asks for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.contracts.identity import KeyLimits
from tests.router.conftest import Stage, error_of
from tests.support.routers import Running, a_routed_pool, a_routed_server

LEAST = "x-wattshift-least-accuracy"
LARGE = {"max_qps": 1.0, "latency_s": 10.0, "ttft_ms": 200.0, "tbt_ms": 30.0, "full_power_w": 1_000.0}
SMALL = {**LARGE, "full_power_w": 200.0, "idle_w": 20.0}


async def at(stage: Stage, router: Running, gco2_per_kwh: float, **of_large: Any) -> None:
    """Have a large and a small variant in a place of that intensity."""
    stage.plane.pools = [a_routed_pool(accuracy_gco2_per_kwh=10.0)]
    stage.plane.servers = [
        a_routed_server(stage.one, "large", accuracy_pct=80.0, **{**LARGE, "gco2_per_kwh": gco2_per_kwh, **of_large}),
        a_routed_server(stage.two, "small", accuracy_pct=65.0, **{**SMALL, "gco2_per_kwh": gco2_per_kwh}),
    ]
    await router.adopted()


async def accuracy(router: Running, **headers: str) -> str:
    answer = await router.ask(headers={name.replace("_", "-"): value for name, value in headers.items()})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-wattshift-accuracy"]


async def test_the_large_variant_answers_while_the_grid_is_clean_and_the_small_one_at_the_peak(
    stage: Stage, router: Running
) -> None:
    await at(stage, router, 100.0)
    assert await accuracy(router) == "80"
    await at(stage, router, 400.0)
    assert await accuracy(router) == "65"


async def test_nothing_below_the_floor_of_a_request_or_its_key_ever_answers(stage: Stage, router: Running) -> None:
    await at(stage, router, 400.0)
    assert await accuracy(router, x_wattshift_least_accuracy="70") == "80"
    assert error_of(await router.ask(headers={LEAST: "many"})) == (400, "invalid_value")
    assert error_of(await router.ask(headers={LEAST: "100.5"})) == (400, "invalid_value")
    assert error_of(await router.ask(headers={LEAST: "90"})) == (503, "no_server")
    stage.plane.key_limits = KeyLimits(least_accuracy_pct=75.0)
    async with stage.router() as other:
        await other.adopted()
        assert await accuracy(other, x_wattshift_least_accuracy="10") == "80", "a key's floor is none to go below"
        stage.one.status = 503
        assert error_of(await other.ask())[0] == 503
    assert stage.two.seen == []


async def test_who_waits_for_an_accurate_server_holds_up_nobody_and_is_not_given_another(
    stage: Stage, router: Running
) -> None:
    await at(stage, router, 400.0, capacity=1)
    stage.one.gate = asyncio.Event()
    first, second = (asyncio.create_task(router.ask(headers={LEAST: "70"})) for _ in range(2))
    await stage.one.until(lambda: stage.one.held == 1)
    assert await accuracy(router) == "65"
    assert not second.done()
    stage.one.gate.set()
    answers = await asyncio.gather(first, second)
    assert [answer.headers["x-wattshift-accuracy"] for answer in answers] == ["80", "80"]
    assert stage.one.most_held == 1


async def test_a_variant_that_would_be_late_gives_way_to_one_in_time(stage: Stage, router: Running) -> None:
    await at(stage, router, 100.0, ttft_ms=200_000.0)
    stage.plane.pools = [
        a_routed_pool(accuracy_gco2_per_kwh=10.0, classes=[{"name": "all", "max_latency_s": 20.0}], partition="p")
    ]
    await router.adopted()
    assert await accuracy(router) == "65"
    assert await accuracy(router, x_wattshift_least_accuracy="70") == "80"


@pytest.mark.parametrize("worth", [None, 0.0])
async def test_without_a_worth_the_cleanest_above_the_floor_answers(
    stage: Stage, router: Running, worth: float | None
) -> None:
    await at(stage, router, 10.0)
    stage.plane.pools = [a_routed_pool(accuracy_gco2_per_kwh=worth)]
    await router.adopted()
    assert await accuracy(router) == "65"
