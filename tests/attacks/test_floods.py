"""Clients that nobody knows, as many as a host allows, on each kind of port: others are answered, and memory is spared.

Half heads are of 8 KB: 5,000 that were kept would take 80 MB, once as they came and once as they were parsed.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from services.kit.sockets import LISTEN_AT
from services.standalone import stack
from tests.integration.conftest import Installation
from tests.support.floods import SIZES, Flood, files_for
from tests.support.forked import Forked
from tests.support.servers import ROOT, scratch_folder, wait_until
from tests.support.tokens import TOKEN

MOST_GROWTH_BYTES = 50 * 2**20
NOWHERE = "http://127.0.0.1:1"
FLOOD_S = 300.0
"""At most; it ends once each of its clients has had its connection, and others some answers."""


@dataclass
class Port:
    """A process, and where it listens."""

    pid: int
    address: str
    path: str

    def client(self) -> httpx.AsyncClient:
        if self.address.startswith("/"):
            return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=self.address), base_url="http://x")
        return httpx.AsyncClient(base_url=f"http://{self.address}")

    def memory(self) -> int:
        return psutil.Process(self.pid).memory_info().rss


@contextmanager
def a_port(folder: Path, module: str, path: str, *, is_local: bool) -> Iterator[Port]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "WATTSHIFT_SERVICE_TOKEN": TOKEN,
        "WATTSHIFT_NODE_JOIN_TOKEN": TOKEN,
        "WATTSHIFT_DATA_DIR": str(folder / "data"),
        "REDIS_URL": "redis://127.0.0.1:1/0",
        **{f"WATTSHIFT_{name}_URL": NOWHERE for name in ("ADMISSION", "SERVING", "TELEMETRY")},
        "GPU_AGENT_STATE_DIR": str(folder / "state"),
        "GPU_AGENT_DRIVER": "simulated",
        "GPU_AGENT_CONTAINERS": "off",
    }
    sockets: list[socket.socket] = []
    if is_local:
        address = environment[LISTEN_AT] = str(folder / "x.sock")
    else:
        sockets.append(socket.create_server(("127.0.0.1", 0), backlog=2_048))
        address = f"127.0.0.1:{sockets[0].getsockname()[1]}"
    log = folder / "log"
    process = Forked(module, env=environment, cwd=ROOT, output=log, sockets=sockets)
    for each in sockets:
        each.close()
    found = Port(process.pid, address, path)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()[-3_000:]
        try:
            kind, to = (socket.AF_UNIX, address) if is_local else (socket.AF_INET, ("127.0.0.1", _port(address)))
            with socket.socket(kind) as asking:
                asking.settimeout(5)
                asking.connect(to)
                asking.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return b" 200 " in asking.recv(100)
        except OSError:
            return False

    try:
        wait_until(is_up)
        yield found
        assert process.poll() is None, "it is the same process that answers"
    finally:
        process.kill()
        process.wait()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


async def is_answered(client: httpx.AsyncClient, tries: int) -> bool:
    """Ask again where the connection is closed: at a Unix socket all are one peer, whose oldest idle one goes first."""
    for left in reversed(range(tries)):
        try:
            return (await client.get("/healthz", timeout=60)).status_code == 200
        except httpx.RemoteProtocolError:
            if not left:
                raise
    return False


@pytest.mark.skipif(not files_for(sum(SIZES.values())), reason="this process may not open that many files")
@pytest.mark.parametrize(
    ("module", "path", "is_local"),
    [
        ("gateway.app", "/sign-in", False),
        ("services.router.app", "/v1/chat/completions", False),
        ("gpu_agent.app", "/v1/nodes", True),  # made and served as internal services are
        ("gpu_agent.app", "/v1/progress/x", False),
    ],
    ids=["gateway", "router", "service", "agent"],
)
async def test_floods_of_unknown_clients_take_little_memory_and_nobody_elses_answers(
    module: str, path: str, is_local: bool
) -> None:
    with scratch_folder() as folder, a_port(folder, module, path, is_local=is_local) as port:
        async with port.client() as kept:
            assert (await kept.get("/healthz")).status_code == 200
            before, most, answers = port.memory(), 0, 0
            flood = Flood(port.address, FLOOD_S, path)
            flooding = asyncio.create_task(flood.run())
            while not (flood.is_whole and answers > 3) and not flooding.done():
                async with port.client() as new:
                    for client in (kept, new):
                        assert await is_answered(client, tries=5 if is_local else 1)
                        answers += 1
                most = max(most, port.memory())
                await asyncio.sleep(0.2)
            flood.seconds = 0
            await flooding
        assert flood.is_whole
        assert most - before < MOST_GROWTH_BYTES, f"{(most - before) / 2**20:.0f} MiB"


@pytest.mark.live
@pytest.mark.skipif(not files_for(sum(SIZES.values())), reason="this process may not open that many files")
async def test_floods_of_every_port_of_an_installation_cost_no_process_and_no_lease(installation: Installation) -> None:
    made = await asyncio.to_thread(
        installation.gateway.call, "POST", "/v1/jobs", body={"name": "long", "command": ["sleep", "3600"]}
    )
    await asyncio.to_thread(installation.wait_for, made["id"], lambda job: job["state"] == "running")
    before = await asyncio.to_thread(stack.read_status, installation.folder)
    places = {
        each.socket or f"127.0.0.1:{each.port}": each
        for each in before.processes
        if (each.port or each.socket) and each.name not in ("postgres", "valkey")
    }
    assert len(places) > 8, "gateway, router, two agents, and services"
    generation = (await asyncio.to_thread(installation.job, made["id"]))["generation"]
    for address, process in places.items():
        assert process.pid
        memory, most = psutil.Process(process.pid).memory_info().rss, 0
        flood = Flood(address, FLOOD_S)
        flooding = asyncio.create_task(flood.run())
        answers = 0
        while not (flood.is_whole and answers > 3) and not flooding.done():
            assert await asyncio.to_thread(installation.job, made["id"])
            answers += 1
            most = max(most, psutil.Process(process.pid).memory_info().rss)
        flood.seconds = 0
        await flooding
        assert most - memory < MOST_GROWTH_BYTES, f"{process.name}: {(most - memory) / 2**20:.0f} MiB"
    after = await asyncio.to_thread(stack.read_status, installation.folder)
    assert {each.name: each.pid for each in after.processes} == {each.name: each.pid for each in before.processes}
    job = await asyncio.to_thread(installation.job, made["id"])
    assert (job["state"], job["generation"]) == ("running", generation)
    assert len(await asyncio.to_thread(installation.nodes)) == 2
    await asyncio.to_thread(installation.gateway.call, "POST", f"/v1/jobs/{made['id']}/cancel")
