"""Valkey fails over to a replica that lacks what was written last: commands are published again from PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from subprocess import Popen
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from services.contracts.streams import command_stream
from services.kit.redis import connect
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.chaos.links import Link
from tests.integration.conftest import QUICK
from tests.support.control_plane import eventually
from tests.support.ports import Ports
from tests.support.servers import fresh_database, running, scratch_folder, tcp_valkey, tcp_valkey_url

PASSWORD = "secret"
SPEC: dict[str, Any] = {"name": "train", "command": ["true"]}


class Address(Link):
    """One address that leads to whichever server takes writes."""

    def lead_to(self, port: int) -> None:
        """Lead to another server from now on; sessions with the one before end."""
        self.begin("cut")
        self._target = ("127.0.0.1", port)
        self.end("cut")


@dataclass
class Plant:
    """An installation, the master that it writes to, and a replica."""

    stack: Stack
    http: httpx.AsyncClient
    address: Address
    process: Popen[bytes]
    master: Any
    master_port: int
    replica: Any
    replica_port: int

    async def submit(self) -> str:
        answer = await self.http.post("/v1/jobs", json=SPEC)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def has_succeeded(self, job_id: str) -> Callable[[], Awaitable[bool]]:
        async def asked() -> bool:
            return (await self.http.get(f"/v1/jobs/{job_id}")).json()["state"] == "succeeded"

        return asked

    def has_command(self, server: Any, job_id: str) -> Callable[[], Awaitable[bool]]:
        async def asked() -> bool:
            return any(job_id in str(fields) for _, fields in await server.xrange(command_stream("node-1")))

        return asked

    def signal_agent(self, number: signal.Signals) -> None:
        (pid,) = [each.pid for each in self.stack.status().processes if each.name == "agent-node-1"]
        assert pid
        os.kill(pid, number)

    async def promote(self) -> None:
        """Kill the master, and have the address lead to its replica, which takes writes from then on."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.address.lead_to(self.replica_port)


def client_of(stack: Stack) -> httpx.AsyncClient:
    key = (stack.folder.path / "admin.key").read_text().strip()
    return httpx.AsyncClient(base_url=stack.gateway_url, headers={"authorization": f"Bearer {key}"}, timeout=30)


@pytest.fixture
async def plant(postgres_url: str) -> AsyncIterator[Plant]:
    ports = Ports()
    async with AsyncExitStack() as opened:
        folder = opened.enter_context(scratch_folder())
        servers: list[tuple[Popen[bytes], Redis, int]] = []
        for name in ("one", "other"):
            port = ports.take(26_900)
            process = opened.enter_context(running(tcp_valkey(folder / name, port, PASSWORD)))
            redis = connect(tcp_valkey_url(port, PASSWORD))
            opened.push_async_callback(redis.aclose)
            servers.append((process, redis, port))
        (process, master, port), (_, replica, replica_port) = servers
        await replica.config_set("masterauth", PASSWORD)
        await replica.execute_command("REPLICAOF", "127.0.0.1", port)
        address = await opened.enter_async_context(Address("127.0.0.1", port))
        env = {"DATABASE_URL": fresh_database(postgres_url), "REDIS_URL": tcp_valkey_url(address.port, PASSWORD)}
        stack = Stack(folder / "data", nodes="1x2", env=QUICK | env, services=SERVICES, workers=(), watches=False)
        await opened.enter_async_context(stack)
        http = await opened.enter_async_context(client_of(stack))
        yield Plant(stack, http, address, process, master, port, replica, replica_port)
    ports.release()


@pytest.mark.slow
async def test_commands_that_a_promoted_replica_lacks_are_published_again(plant: Plant) -> None:
    first = await plant.submit()
    await eventually(plant.has_succeeded(first), 120)

    async def is_followed() -> bool:
        return await plant.replica.exists(command_stream("node-1")) == 1

    await eventually(is_followed)

    await plant.replica.execute_command("REPLICAOF", "NO", "ONE")  # what is written from here on is lost
    plant.signal_agent(signal.SIGSTOP)
    plant.address.lead_to(plant.master_port)  # the session in which the agent waits for commands ends
    try:
        lost = await plant.submit()
        await eventually(plant.has_command(plant.master, lost))
        assert not await plant.has_command(plant.replica, lost)()
        await plant.promote()
        await eventually(plant.has_command(plant.replica, lost))
    finally:
        plant.signal_agent(signal.SIGCONT)

    await eventually(plant.has_succeeded(lost), 120)
    await eventually(plant.has_succeeded(await plant.submit()), 120)
