"""Questions to model servers: only a clear answer counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from services.kit.scraping import metric_sum
from services.serving.controller.probes import LARGEST_ANSWER, Prober, new_probe_session
from tests.gateway.peer import a_peer

NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.mark.parametrize(
    ("metrics", "held"),
    [
        ("vllm:num_requests_running 3\n", 3),
        ("# HELP vllm:num_requests_running 7\n# TYPE x gauge\nvllm:num_requests_running 0.0 1395066363000", 0),
        ('vllm:num_requests_running{a="} 9",b="x y"} 2\nvllm:num_requests_running{a="c"} 1e0\n', 3),
        ("vllm:num_requests_running 2\nvllm:num_requests_waiting\t1\nvllm:num_requests_waiting_total 5\n", 3),
        ('vllm:num_requests_running{a="\\"} 9"} 2 1395066363000\n', 2),
        (f'vllm:num_requests_running{{a="{4_000_000 * chr(92)}"}} 2\n', 2),
        ("vllm:num_requests_running 2 soon\n", None),
        ("vllm:num_requests_running{\n", None),
        ("process_cpu_seconds_total 4\n", None),
        ("vllm:num_requests_running NaN\n", None),
        ("vllm:num_requests_running\n", None),
        ("vllm:num_requests_running many\n", None),
        ("", None),
    ],
)
def test_metrics_are_summed_over_labels_and_nothing_is_not_zero(metrics: str, held: float | None) -> None:
    assert metric_sum(metrics, NAMES) == held


@pytest.fixture
async def prober() -> AsyncIterator[Prober]:
    async with new_probe_session() as session:
        yield Prober(session, timeout_s=0.5, at_once=4)


async def test_only_2xx_is_an_answer_and_redirections_are_not_followed(prober: Prober) -> None:
    async def answer(request: web.Request) -> web.Response:
        status = int(request.path[1:])
        return web.Response(status=status, headers={"location": "/200"} if status == 307 else {})

    async with a_peer(answer) as url:
        said = {status: await prober.answers(f"{url}/{status}") for status in (200, 204, 307, 404, 503)}
    assert said == {200: True, 204: True, 307: False, 404: False, 503: False}
    assert not await prober.answers(f"{url}/200"), "it is gone"
    assert not await prober.answers("http://[nonsense/200")


async def test_a_server_that_keeps_still_is_silent_and_keeps_nobody_else_waiting(prober: Prober) -> None:
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/still":
            await never.wait()
        return web.Response(text="vllm:num_requests_running 1\n")

    async with a_peer(answer) as url:
        still = [prober.answers(f"{url}/still") for _ in range(3)]
        *silent, held = await asyncio.gather(*still, prober.held(f"{url}/metrics", NAMES))
        never.set()
    assert (silent, held) == ([False] * 3, 1)


async def test_metrics_without_end_are_not_read_to_it(prober: Prober) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=b"vllm:num_requests_running 0\n" + b"#" * LARGEST_ANSWER)

    async with a_peer(answer) as url:
        assert await prober.held(f"{url}/metrics", NAMES) is None
