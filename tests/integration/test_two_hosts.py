"""Two hosts in network namespaces of their own: the control plane on one, a node on the other, TLS in between.

What goes between them is what docs/operating.md says for a node on another host: an own authority, a one-time token, a
Valkey over TLS. That is the embedded one behind a relay which ends TLS, as the embedded one is built without.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from typer.testing import CliRunner

from services.cli.main import app as cli
from services.standalone.processes import SERVICES
from services.standalone.stack import Stack
from tests.support.control_plane import eventually
from tests.support.servers import ROOT, fresh_database, scratch_folder

pytestmark = pytest.mark.slow
CONTROL, NODE = "10.231.77.1", "10.231.77.2"
AGENT_PORT = 8_070
NAMES = {"gateway", "admission", "carbon", "scheduler", "telemetry"}


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[str, ...]]:
    """The words that run a command on the other host, which a cable joins to this one."""
    name, here, there = f"wattshift-{os.getpid()}", f"ws{os.getpid() % 10**6}a", f"ws{os.getpid() % 10**6}b"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and Debian's package iproute2")
    made = ip("netns", "add", name, check=False)
    if made.returncode != 0:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        made = ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name, check=False)
        if made.returncode != 0:
            pytest.skip(f"virtual cables are not permitted here: {made.stderr.strip()}")
        ip("addr", "add", f"{CONTROL}/30", "dev", here)
        ip("link", "set", here, "up")
        for words in (
            ("addr", "add", f"{NODE}/30", "dev", there),
            ("link", "set", there, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", name, *words)
        yield ("ip", "netns", "exec", name)
    finally:
        ip("netns", "del", name, check=False)  # and the cable with it


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Certificates of both hosts by an own authority, and another authority."""
    with scratch_folder() as found:
        for authority in ("ours", "others"):
            for words in (["init"], ["issue", "control", "--host", CONTROL], ["issue", "node", "--host", NODE]):
                done = CliRunner().invoke(cli, ["ca", *words, "--folder", str(found / authority)])
                assert done.exit_code == 0, done.output
        yield found


def certificates(folder: Path, name: str) -> dict[str, str]:
    place = folder / "ours"
    return {
        "WATTSHIFT_TLS_CERT": str(place / f"{name}.crt"),
        "WATTSHIFT_TLS_KEY": str(place / f"{name}.key"),
        "WATTSHIFT_TLS_CA": str(place / "ca.crt"),
    }


@asynccontextmanager
async def over_tls(url: str, folder: Path) -> AsyncIterator[str]:
    """Yield an address of a Valkey that other hosts reach over TLS alone."""
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.load_cert_chain(folder / "ours" / "control.crt", folder / "ours" / "control.key")
    parts = urlsplit(url)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(parts.hostname, parts.port)

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while content := await source.read(65_536):
                    target.write(content)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, onward_writer), copy(onward_reader, writer))

    server = await asyncio.start_server(relay, CONTROL, 0, ssl=shown)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"rediss://:{parts.password}@{CONTROL}:{port}/0"
    finally:
        server.close()


@dataclass
class Site:
    """The control plane on its host."""

    stack: Stack
    http: httpx.AsyncClient
    folder: Path
    host: tuple[str, ...]

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).raise_for_status().json()

    async def post(self, path: str, body: Any) -> Any:
        return (await self.http.post(path, json=body)).raise_for_status().json()

    async def node(self) -> dict[str, Any]:
        return next(iter((await self.get("/v1/nodes"))["items"]), {})

    @contextmanager
    def agent(self, state: Path, token: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the node's agent on the other host, with what deploy/systemd/agent.env.example has."""
        state.mkdir(exist_ok=True)
        settings = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            **certificates(self.folder, "node"),
            "WATTSHIFT_TELEMETRY_URL": self.stack.urls["telemetry"],
            "GPU_AGENT_NODE_ID": "gpu-17",
            "GPU_AGENT_HOST": "0.0.0.0",
            "GPU_AGENT_PORT": str(AGENT_PORT),
            "GPU_AGENT_ADDRESS": NODE,
            "GPU_AGENT_ENROLL_TOKEN": token,
            "GPU_AGENT_STATE_DIR": str(state),
            "GPU_AGENT_CHECKPOINTS": "local",
            "GPU_AGENT_DRIVER": "simulated",
            "GPU_AGENT_SIMULATED_GPUS": "1",
            "GPU_AGENT_STOP_RANKS_ON_EXIT": "true",
        }
        command = [*self.host, sys.executable, "-P", "-m", "gpu_agent.app"]
        with (state / "agent.log").open("ab") as log:
            running = subprocess.Popen(command, cwd=ROOT, env=settings, stdout=log, stderr=log)
        try:
            yield running
        finally:
            running.terminate()
            running.wait()


@pytest.fixture(scope="module")
async def site(host: tuple[str, ...], folder: Path, postgres_url: str, redis_url: str) -> AsyncIterator[Site]:
    services = [service for service in SERVICES if service.name in NAMES]
    async with over_tls(redis_url, folder) as redis:
        env = {
            **certificates(folder, "control"),
            "DATABASE_URL": fresh_database(postgres_url),
            "REDIS_URL": redis,
            "GATEWAY_HOST": CONTROL,
            "TELEMETRY_HOST": CONTROL,
            "SCHEDULER_LEASE_MARGIN_S": "1",
            "TELEMETRY_LEASE_TTL_S": "4",
            "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5",
        }
        with scratch_folder() as data:
            async with Stack(data / "data", nodes="", env=env, services=services, workers=()) as stack:
                key = (data / "data" / "admin.key").read_text().strip()
                trusted = ssl.create_default_context(cafile=folder / "ours" / "ca.crt")
                headers = {"authorization": f"Bearer {key}"}
                async with httpx.AsyncClient(base_url=stack.gateway_url, headers=headers, verify=trusted) as http:
                    yield Site(stack, http, folder, host)


async def test_a_node_on_another_host_enrols_runs_a_job_and_outlives_a_cut(site: Site) -> None:
    token = (await site.post("/v1/nodes/gpu-17/enrollments", {}))["token"]
    state = site.folder / "state"

    async def is_up() -> bool:
        return (await site.node()).get("state") == "up"

    async def has(job: str, *states: str) -> bool:
        return (await site.get(f"/v1/jobs/{job}"))["state"] in states

    with site.agent(state, token):
        await eventually(is_up)
        node = await site.node()
        assert (node["credential"], node["agent_url"]) == ("own", f"https://{NODE}:{AGENT_PORT}")
        job = (await site.post("/v1/jobs", {"name": "hello", "command": ["echo", "from", "afar"]}))["id"]
        await eventually(lambda: has(job, "succeeded", "failed"))
        output = await site.http.get(f"/v1/jobs/{job}/logs")
        assert output.text == "from afar\n", await site.get(f"/v1/jobs/{job}")

        job = (await site.post("/v1/jobs", {"name": "long", "command": ["sleep", "600"]}))["id"]
        await eventually(lambda: has(job, "running"))
        cable = ip("-o", "addr", "show", "to", CONTROL).stdout.split()[1]
        ip("link", "set", cable, "down")
        await eventually(lambda: has(job, "queued"))
        ip("link", "set", cable, "up")
        await eventually(lambda: has(job, "running"))
        assert (await site.get(f"/v1/jobs/{job}"))["generation"] == 2


async def test_a_token_is_of_use_once_and_a_certificate_of_others_of_none(site: Site) -> None:
    token = (await site.post("/v1/nodes/gpu-17/enrollments", {}))["token"]

    def says(state: Path, text: str) -> Any:
        async def look() -> bool:
            return text in (state / "agent.log").read_text()

        return look

    with site.agent(site.folder / "first", token):
        await eventually(says(site.folder / "first", "enrolled"))
    with site.agent(site.folder / "second", token):
        await eventually(says(site.folder / "second", "401"))
    known = {"verify": ssl.create_default_context(cafile=site.folder / "others" / "ca.crt")}
    for url in (site.stack.gateway_url, site.stack.urls["telemetry"]):
        for options in ({}, known):
            async with httpx.AsyncClient(**options) as http:
                with pytest.raises(httpx.ConnectError):
                    await http.get(f"{url}/healthz")
