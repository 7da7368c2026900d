"""A second host joins by one command; kill -9 of its agent and of telemetry loses no command; it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.integration.test_two_hosts import CONTROL, NODE, host
from tests.support.control_plane import eventually
from tests.support.ports import Ports
from tests.support.servers import ROOT, scratch_folder

NAMES = {"gateway", "admission", "carbon", "scheduler", "telemetry"}
COMMAND = (sys.executable, "-P", "-m", "services.cli.main")

__all__ = ["host"]  # the fixture


@dataclass
class Site:
    """An installation with its own stores, and the folder of a host that joins."""

    stack: Stack
    http: httpx.AsyncClient
    folder: Path
    port: int
    other: tuple[str, ...] = ()

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).raise_for_status().json()

    async def post(self, path: str, body: Any) -> Any:
        return (await self.http.post(path, json=body)).raise_for_status().json()

    def process(self, *words: str, **options: Any) -> subprocess.Popen[Any]:
        """Run the command line on the other host."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        settings = kept | {
            "GPU_AGENT_DRIVER": "simulated",
            "GPU_AGENT_SIMULATED_GPUS": "4",
            "GPU_AGENT_PORT": str(self.port),
            "GPU_AGENT_OWNER_TENANTS": "default",
            "WATTSHIFT_DATA_DIR": str(self.folder / "box"),
        }
        return subprocess.Popen([*self.other, *COMMAND, *words], cwd=ROOT, env=settings, **options)

    def said(self, *words: str) -> tuple[int, str]:
        with self.process(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as done:
            assert done.stdout
            text = done.stdout.read()
        return done.returncode, text

    @contextmanager
    def joined(self, *words: str) -> Iterator[subprocess.Popen[Any]]:
        with (self.folder / "join.log").open("ab") as log:
            running = self.process("join", *words, stdout=log, stderr=log)
        try:
            yield running
        finally:
            running.terminate()
            running.wait()

    async def is_up(self, name: str = "box") -> bool:
        return any(node["id"] == name and node["state"] == "up" for node in (await self.get("/v1/nodes"))["items"])

    async def job(self, name: str, command: str) -> str:
        body = {"name": name, "command": ["sh", "-c", command], "working_dir": "/tmp"}
        return (await self.post("/v1/jobs", body))["id"]

    async def has(self, job: str, *states: str) -> bool:
        found = await self.get(f"/v1/jobs/{job}")
        assert found["state"] not in ("failed", "cancelled"), found
        return found["state"] in states


async def a_site(listen: str, agent_port: int, other: tuple[str, ...] = ()) -> AsyncIterator[Site]:
    services = [service for service in SERVICES if service.name in NAMES]
    env = {"DATABASE_URL": "", "REDIS_URL": "", "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5"}
    with scratch_folder() as data:
        async with Stack(data / "a", nodes="", env=env, listen=listen, services=services, workers=()) as stack:
            key = (data / "a" / "admin.key").read_text().strip()
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=stack.gateway_url, headers=headers, timeout=30) as http:
                yield Site(stack, http, data, agent_port, other)


@pytest.fixture(scope="module")
async def site() -> AsyncIterator[Site]:
    ports = Ports()
    try:
        async for found in a_site(f"127.0.0.1:{ports.take(23_840)}", ports.take(23_870)):
            yield found
    finally:
        ports.release()


async def check_a_job_runs(site: Site) -> None:
    job = await site.job("hello", "echo from afar")
    await eventually(lambda: site.has(job, "succeeded"))
    assert (await site.http.get(f"/v1/jobs/{job}/logs")).text == "from afar\n"


async def test_a_host_joins_runs_jobs_outlives_kills_and_leaves(site: Site) -> None:
    assert site.stack.urls["telemetry"].startswith("unix://")
    assert all(each.socket for each in site.stack.status().processes if each.name in ("postgres", "valkey"))
    invited = await site.post("/v1/nodes/invitations", {})
    words = invited["url"], invited["token"], "--name", "box"
    with site.joined(*words) as agent:
        await eventually(site.is_up)
        await check_a_job_runs(site)
        status, text = site.said("join", *words)
        assert (status, "already" in text) == (2, True)

        counts = site.folder / "counts"
        counts.mkdir(mode=0o777)
        counts.chmod(0o777)
        jobs = [await site.job(f"j{number}", f"echo x >> {counts}/{number}; sleep 1") for number in range(6)]
        agent.kill()
        agent.wait()
        telemetry = next(each.pid for each in site.stack.status().processes if each.name == "telemetry")
        assert telemetry
        os.kill(telemetry, signal.SIGKILL)
    with site.joined():
        for number, job in enumerate(jobs):
            await eventually(lambda job=job: site.has(job, "succeeded"), 120)
            assert (await site.get(f"/v1/jobs/{job}"))["generation"] == 1
            assert (counts / str(number)).read_text() == "x\n", "each ran once"
        status, text = site.said("leave")
        assert (status, "stop it first" in text) == (1, True)
    status, text = site.said("leave")
    assert (status, "box has left" in text) == (0, True), text
    node = await site.get("/v1/nodes/box")
    assert node["credential"] == "revoked"


async def test_a_node_that_is_replaced_or_revoked_is_out(site: Site) -> None:
    invited = await site.post("/v1/nodes/invitations", {})
    with site.joined(invited["url"], invited["token"], "--name", "second"):
        await eventually(lambda: site.is_up("second"))
        await site.http.post("/v1/nodes/second/revoke")

        async def is_refused() -> bool:
            return "401" in (site.folder / "join.log").read_text()

        await eventually(is_refused)
    again = site.said("leave")
    assert again[0] == 0, again
    used = site.said("join", invited["url"], invited["token"], "--name", "third")
    assert (used[0], "This token" in used[1]) == (4, True), used


@pytest.mark.slow
async def test_hosts_in_network_namespaces_of_their_own_join(host: tuple[str, ...]) -> None:
    async for site in a_site(f"{CONTROL}:8443", 8_070, host):
        invited = await site.post("/v1/nodes/invitations", {})
        with site.joined(invited["url"], invited["token"], "--name", "box"):
            await eventually(site.is_up)
            assert (await site.get("/v1/nodes/box"))["agent_url"] == f"https://{NODE}:8070"
            await check_a_job_runs(site)
