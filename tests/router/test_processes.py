"""Routers as processes of their own: several on one port, killed, stopped, and started with wrong settings."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from services.kit.sockets import LISTEN
from services.standalone.doors import Doors
from tests.router.conftest import Stage
from tests.support.ports import Ports
from tests.support.routers import MODEL, OPERATOR, a_key, chat
from tests.support.servers import ROOT, as_service, wait_until
from tests.support.services import TOKEN

HEADERS = {"authorization": f"Bearer {a_key()}"}


def environment(stage: Stage, port: int, **settings: str) -> dict[str, str]:
    urls = {f"WATTSHIFT_{name}_URL": stage.plane_url for name in ("ADMISSION", "SERVING", "TELEMETRY")}
    own = {
        "REDIS_URL": as_service(stage.redis_url, "router"),
        "WATTSHIFT_DATA_DIR": str(stage.folder),
        "WATTSHIFT_SERVICE_TOKEN": TOKEN,
    }
    return {**os.environ, **urls, **own, "ROUTER_PORT": str(port), **settings}


def start(environment: dict[str, str], held: Sequence[socket.socket] = ()) -> subprocess.Popen[bytes]:
    numbers = [each.fileno() for each in held]
    environment = environment | ({LISTEN: ",".join(map(str, numbers))} if held else {})
    command = [sys.executable, "-m", "services.router.app"]
    return subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=numbers)


@asynccontextmanager
async def running(stage: Stage, *, is_held: bool = False, **settings: str) -> AsyncIterator[tuple[psutil.Process, str]]:
    """Run a router that listens itself, or gets the sockets of who started it."""
    ports, doors = Ports(), Doors()
    port, held = doors.open("127.0.0.1", 28_050) if is_held else (ports.take(28_050), ())
    with start(environment(stage, port, **settings), held) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            await until(lambda: ready(url))
            yield psutil.Process(process.pid), url
        finally:
            process.terminate()
            process.wait(20)
            ports.release()
            doors.close()


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


async def until(is_so: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, is_so)


def workers_of(process: psutil.Process) -> list[int]:
    """Return the workers that run; one that was killed is a zombie until its parent has looked."""
    found: list[int] = []
    for child in process.children():
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


@pytest.mark.parametrize("is_held", [False, True])
async def test_processes_share_a_port_and_one_that_dies_is_replaced(stage: Stage, is_held: bool) -> None:
    router = running(stage, is_held=is_held, ROUTER_WORKERS="2")
    async with router as (process, url), httpx.AsyncClient(headers=HEADERS) as http:
        await until(lambda: len(workers_of(process)) == 2)
        await until(lambda: "wattshift_router_processes 2" in httpx.get(f"{url}/metrics", headers=OPERATOR).text)
        before = workers_of(process)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(set(workers_of(process)) - set(before)) == 1)
        await until(lambda: ready(url))
        answer = await http.post(f"{url}/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)


async def test_metrics_are_of_all_processes_and_a_killed_one_takes_none_along(stage: Stage) -> None:
    async with running(stage, ROUTER_WORKERS="2") as (process, url):
        await until(lambda: "wattshift_router_processes 2" in httpx.get(f"{url}/metrics", headers=OPERATOR).text)
        for _ in range(20):
            async with httpx.AsyncClient(headers=HEADERS) as http:  # a connection of its own, to either process
                assert (await http.post(f"{url}/v1/chat/completions", json=chat())).status_code == 200
        await until(lambda: requests_in(url) == 20)
        first = workers_of(process)
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: len(set(workers_of(process)) - set(first)) == 1)
        await until(lambda: ready(url))
        assert await asyncio.to_thread(requests_in, url) == 20  # in a thread: a new worker asks this loop about the key


def requests_in(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", headers=OPERATOR).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("wattshift_router_requests_total{"))


async def test_a_router_that_is_stopped_finishes_what_it_has_and_takes_nothing_new(stage: Stage) -> None:
    stage.one.gate = asyncio.Event()
    async with running(stage) as (process, url), httpx.AsyncClient(headers=HEADERS, timeout=30) as http:
        asking = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=chat()))
        await stage.one.until(lambda: stage.one.held == 1)
        process.terminate()
        await until(lambda: not ready(url))
        stage.one.gate.set()
        assert (await asking).status_code == 200
        await asyncio.to_thread(process.wait, 20)


async def test_a_router_that_is_killed_starts_again_with_the_last_table(stage: Stage) -> None:
    async with running(stage) as (process, url):
        await until(lambda: ready(url))
        process.kill()
    stage.plane.is_serving_up = False
    async with running(stage) as (_, url), httpx.AsyncClient(headers=HEADERS) as http:
        assert (await http.post(f"{url}/v1/chat/completions", json=chat())).status_code == 200


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("ROUTER_ORDER", "random", "ROUTER_ORDER=random"),
        ("ROUTER_WORKERS", "0", "ROUTER_WORKERS=0"),
        ("ROUTER_NETWORK_MS", '{"eu": {"x": -1}}', "eu.x must be milliseconds"),
        ("WATTSHIFT_ENDPOINT_NETWORKS", "example.org", "WATTSHIFT_ENDPOINT_NETWORKS"),
    ],
)
async def test_a_wrong_setting_is_named_in_one_line(
    stage: Stage, tmp_path: Path, setting: str, value: str, said: str
) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "services.router.app"],
        cwd=ROOT,
        env=environment(stage, 0, **{setting: value}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
