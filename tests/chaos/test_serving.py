"""Requests to models in storms: what the model server says, and that whatever cannot be an answer is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpu_agent.devices.simulated import SimulatedDriver
from services.core.domain.mig import SlicePlace
from tests.chaos import server as server_program
from tests.chaos.checks import breaches_of_requests
from tests.chaos.client import Caller
from tests.chaos.models import unlike
from tests.chaos.visitors import Flow, Reply, Visit, Visitors, fault_of
from tests.chaos.watch import Running, device_of, overcommitted
from tests.support.ports import Ports
from tests.support.servers import wait_until


@contextlib.contextmanager
def a_server(notes: Path, allocation: str = "job.1") -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    ports = Ports()
    port = ports.take(29_000)
    environment = {
        "WATTSHIFT_ALLOCATION_ID": allocation,
        "WATTSHIFT_PROGRESS_FILE": f"{notes}/node-1",
        "WATTSHIFT_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    command = [sys.executable, "-I", "-S", server_program.__file__, str(notes)]
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health").status_code == 200
        return False

    try:
        wait_until(answers)
        yield url, process
    finally:
        process.kill()
        process.wait()
        ports.release()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    with a_server(tmp_path) as (url, _):
        yield url


async def test_what_the_server_answers_is_right_and_what_reached_it_twice_is_told(served: str, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=served) as http:
        visitors = Visitors(http, random.Random(1), "storm")
        assert await visitors.are_served("before") == []
        assert await visitors.pay(Visit("long", "stream", 20, once=True)) == 200
        assert visitors.faults == []
        assert visitors.repeated(tmp_path) == []
        assert await visitors.pay(Visit("long", "whole", 2, once=True)) == 200
        assert set(visitors.repeated(tmp_path)) == {"long reached servers 2 times"}
    assert visitors.count() == {"chat": 4, "photos": 2}


async def test_a_server_that_is_killed_on_the_way_leaves_an_answer_that_is_cut(tmp_path: Path) -> None:
    with a_server(tmp_path) as (url, process):
        async with httpx.AsyncClient(base_url=url) as http:
            visitors = Visitors(http, random.Random(1), "storm")
            paying = asyncio.create_task(visitors.pay(Visit("v", "stream", 500)))
            while not any(path.read_text() for path in tmp_path.glob("arrived-*")):  # noqa: ASYNC110, of another process
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.2)
            process.kill()
            assert await paying is None
    assert visitors.replies == {"stream 200 cut": 1}
    assert visitors.faults == []


def test_a_server_notices_that_its_device_is_held(tmp_path: Path) -> None:
    with a_server(tmp_path), a_server(tmp_path, "other.1"):
        assert "other.1" in (tmp_path / "device-held-twice").read_text()


def a_stream(*pieces: str, end: str = "[DONE]") -> bytes:
    events = [json.dumps({"choices": [{"text": text}]}) for text in pieces] + ([end] if end else [])
    return b"".join(b"data: %s\n\n" % event.encode() for event in events)


ERROR = '{"error": {"code": "upstream_broke_off"}}'


@pytest.mark.parametrize(
    ("flow", "reply", "fault"),
    [
        ("stream", Reply(200, a_stream("v s 0/2", "v s 1/2")), ""),
        ("stream", Reply(200, a_stream("v s 0/2", end=ERROR)), ""),
        ("stream", Reply(200, a_stream("v s 0/2", end="") + b'data: {"cho', is_cut=True), ""),
        ("stream", Reply(200, is_cut=True), ""),
        ("stream", Reply(200, a_stream("v s 0/2")), "1 of 2"),
        ("stream", Reply(200, a_stream("v s 0/2", end="")), "without a word"),
        ("stream", Reply(200, a_stream("v s 0/2", "v t 1/2")), "two answers in one"),
        ("stream", Reply(200, a_stream("v s 0/2", "v s 0/2", "v s 1/2")), "3 of 2"),
        ("stream", Reply(200, a_stream("v s 1/2", end=ERROR)), "1 of 2"),
        ("stream", Reply(200, a_stream("w s 0/2", "w s 1/2")), "w s 0/2"),
        ("stream", Reply(200, a_stream("v s 0/2", end=ERROR) + a_stream("v s 1/2")), "after its end"),
        ("whole", Reply(200, json.dumps({"choices": [{"text": "v s 0/2\nv s 1/2"}]}).encode()), ""),
        ("whole", Reply(200, json.dumps({"choices": [{"text": "v s 0/2"}]}).encode()), "1 of 2"),
        ("whole", Reply(200, b'{"choices"', is_cut=True), ""),
        ("whole", Reply(200, b'{"choices"'), "no answer of a model server"),
        ("plain", Reply(200, b'{"visit": "v"}'), ""),
        ("plain", Reply(200, b'{"visit": "w"}'), "the answer to ['w']"),
        ("infer", Reply(200, b'{"id": "v", "outputs": [{"data": ["v"]}]}'), ""),
        ("infer", Reply(200, b'{"id": "v", "outputs": [{"data": ["w"]}]}'), "the answer to"),
        ("infer", Reply(None), ""),
        ("infer", Reply(503), ""),
        ("infer", Reply(404, b"no such model"), "no such model"),
        ("infer", Reply(500), "500"),
    ],
)
def test_what_cannot_be_an_answer_is_told(flow: Flow, reply: Reply, fault: str) -> None:
    found = fault_of(Visit("v", flow, 2), reply)
    assert fault in found if fault else found == ""


def test_a_simulated_slice_is_known_by_its_uuid(tmp_path: Path) -> None:
    driver = SimulatedDriver("H200-SXM-141GB", 2, lambda _: 0.0, tmp_path / "state.json", "node-4")
    driver.cut(1, (SlicePlace(3, 0), SlicePlace(1, 4)))
    slices = [device for device in driver.devices() if device.parent is not None]
    assert [device_of("node-4", device.uuid) for device in slices] == [(1, 3, 0), (1, 1, 4)]
    with pytest.raises(ValueError, match="no slice"):
        device_of("node-3", slices[0].uuid)


def running(allocation: str, *devices: tuple[int, int, int]) -> Running:
    return Running(1, allocation, "node-4", devices)


@pytest.mark.parametrize(
    ("second", "told"),
    [((0, 1, 1), False), ((1, 7, 0), False), ((0, 1, 0), True), ((0, 7, 0), True), ((0, 3, 4), False)],
)
def test_what_is_given_away_twice_is_told(second: tuple[int, int, int], told: bool) -> None:
    found = overcommitted([running("a.1", (0, 1, 0)), running("b.1", second)])
    assert bool(found) is told


def test_the_memory_of_slices_counts_too() -> None:
    three = [running(f"{at}.1", (0, sevenths, at)) for at, sevenths in ((0, 3), (4, 3), (7, 1))]
    assert overcommitted(three[:2]) == {}
    assert overcommitted(three).keys() == {"GPU 0 of node-4"}


def test_pool_and_application_are_as_planned_or_it_is_told() -> None:
    servers = [Running(1, "a.1", "node-1", ((0, 7, 0),), "chat", "2")]
    ready = [{"state": "ready"}]
    assert unlike("pool", {"one": 1}, ready, servers, terms=2) == []
    assert unlike("pool", {}, [], [], terms=2) == ["the pool has no plan for its last terms"]
    found = unlike("pool", {"one": 2}, [{"state": "draining", "detail": None}], [*servers * 3], terms=3)
    assert [line[:40] for line in found] == [
        "the pool has instances that are draining",
        "the pool has 1 instances of planned {'on",
        "the pool has 3 servers of planned {'one'",
        "the pool has servers with earlier terms ",
    ]


async def test_requests_that_count_twice_are_told() -> None:
    lines = [{"group": "chat", "requests": 3}, {"group": "photos", "requests": 1}]
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"lines": lines}))
    async with httpx.AsyncClient(transport=transport, base_url="http://world") as http:
        assert await breaches_of_requests(Caller(http), {"chat": 3, "photos": 2}) == []
        found = await breaches_of_requests(Caller(http), {"chat": 2, "photos": 2})
    assert found == ["the ledger has 3 requests to chat, 2 were made"]
