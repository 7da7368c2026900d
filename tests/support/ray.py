"""A real Ray on this machine: a head and a node that join as raylets of their own, with GPUs that are none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.ports import Ports
from tests.support.servers import ROOT, wait_until
from tests.support.slurm_bridge import ControlPlane, a_control_plane, until

CLIENT = ROOT / "clients" / "python" / "src"
ZONES = {"head": "DE", "worker": "SE"}
"""The grid zone of each node, where a test does not say otherwise; each has two GPUs."""


class RayLab:
    """A Ray cluster of two nodes."""

    def __init__(self, programs: Path, folder: Path, zones: Mapping[str, str] = ZONES) -> None:
        self.programs, self._folder, self._zones = programs, folder, zones
        self._ports = Ports()
        self.port, dashboard = self._ports.take(26_379), self._ports.take(28_265)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.url = f"http://127.0.0.1:{dashboard}"
        self._dashboard = str(dashboard)
        self.bridge = f"http://127.0.0.1:{self._ports.take(28_267)}"

    def start(self) -> None:
        """Start both nodes and return once they are known."""
        self._node("head", "--head", f"--port={self.port}", f"--dashboard-port={self._dashboard}")
        wait_until(lambda: self._alive() == 1, 90)
        self._node("worker", f"--address=127.0.0.1:{self.port}")
        wait_until(lambda: self._alive() == 2, 90)

    def kill(self) -> None:
        """Kill every process of Ray as a crash would."""
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(node.pid)
                for each in [*tree.children(recursive=True), tree]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
            node.wait()
        self._nodes = []

    def stop(self) -> None:
        """End it."""
        self.kill()
        self._ports.release()

    def submit(self, name: str, *words: str, wrapped: bool = True) -> None:
        """Submit a job as ``ray job submit`` does; ``words`` are options of ``wattshift.ray``, ``--`` and a command."""
        python = str(self.programs / "python")
        line = " ".join([python, "-m", "wattshift.ray", *words] if wrapped else [python, *words])
        body = {"entrypoint": line, "submission_id": name, "metadata": {"user": "ann"}}
        httpx.post(f"{self.url}/api/jobs/", json=body, timeout=60).raise_for_status()

    def job(self, name: str) -> dict[str, Any]:
        """Return a job as Ray has it."""
        return httpx.get(f"{self.url}/api/jobs/{name}", timeout=30).json()

    def groups(self) -> list[dict[str, Any]]:
        """Return the placement groups that are there."""
        found = httpx.get(f"{self.url}/api/v0/placement_groups", params={"detail": "true"}, timeout=30).json()
        return [each for each in found["data"]["result"]["result"] if each["state"] == "CREATED"]

    def logs(self, name: str) -> str:
        """Return what a job printed."""
        return httpx.get(f"{self.url}/api/jobs/{name}/logs", timeout=30).json().get("logs", "")

    def _node(self, name: str, *options: str) -> None:
        command = [str(self.programs / "ray"), "start", "--block", *options, "--num-cpus=8", "--num-gpus=2"]
        resources = f'--resources={{"zone:{self._zones[name]}": 1}}'
        environment = {
            **os.environ,
            "PYTHONPATH": str(CLIENT),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "WATTSHIFT_RAY_BRIDGE": self.bridge,
        }
        place = [f"--temp-dir={self._folder}"] if name == "head" else []
        with (self._folder / f"{name}.log").open("ab") as log:
            self._nodes.append(
                subprocess.Popen(
                    [*command, resources, f"--node-name={name}", *place],
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _alive(self) -> int:
        try:
            found = httpx.get(f"{self.url}/api/v0/nodes", timeout=5).json()["data"]["result"]["result"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return 0
        return sum(node["state"] == "ALIVE" for node in found)


class RaySite:
    """A Ray, its bridge, and a scheduler that turns by itself."""

    def __init__(self, lab: RayLab, plane: ControlPlane) -> None:
        self.lab, self.plane = lab, plane
        self._bridge: subprocess.Popen[bytes] | None = None

    def start_bridge(self, **settings: str) -> None:
        """Start the bridge; settings are those of ``ENGINE_RAY_...``."""
        wanted = {
            **{"mode": "control", "interval_s": "0.5", "nodes_interval_s": "1", "missing_after_s": "2"},
            **{"address": self.lab.url, "listen_address": self.lab.bridge.removeprefix("http://"), **settings},
        }
        own = {f"ENGINE_RAY_{name.upper()}": value for name, value in wanted.items()}
        with (self.plane.folder / "bridge.log").open("ab") as log:
            self._bridge = subprocess.Popen(
                [sys.executable, "-m", "services.engines.ray.app"],
                env={**os.environ, **self.plane.environment, **own},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def kill_bridge(self) -> None:
        """Kill the bridge as a crash would."""
        if self._bridge is not None:
            self._bridge.send_signal(signal.SIGKILL)
            self._bridge.wait()

    async def steered(self, **settings: str) -> None:
        """Start the bridge and return once the control plane knows the nodes."""
        self.start_bridge(**settings)
        known = "SELECT 1 FROM nodes WHERE id = 'ray.worker'"
        await self.until(lambda: self.plane.rows(known), "the nodes are known")

    async def job(self, name: str) -> dict[str, Any]:
        """Return our job for one of Ray's; empty while there is none."""
        query = "SELECT * FROM jobs WHERE external_id LIKE $1 || '@%' ORDER BY id DESC LIMIT 1"
        return next((dict(row) for row in await self.plane.rows(query, name)), {})

    async def until(self, condition: Callable[[], Awaitable[object]], what: str, within_s: float = 60) -> None:
        """Return once something is so; what the bridge and the jobs say is part of the error if it is not in time."""

        async def words() -> str:
            jobs = await self.plane.rows("SELECT external_id, state, reason, detail FROM jobs ORDER BY id DESC LIMIT 9")
            return f"{jobs}\n{(self.plane.folder / 'bridge.log').read_text()[-3000:]}"

        await until(condition, what, within_s, words)

    async def until_state(self, name: str, state: str, within_s: float = 60) -> dict[str, Any]:
        """Return our job for one of Ray's once it is in this state."""

        async def is_so() -> bool:
            return (await self.job(name)).get("state") == state

        await self.until(is_so, f"{name} is {state}", within_s)
        return await self.job(name)


@contextlib.asynccontextmanager
async def a_ray_site(
    lab: RayLab, postgres_url: str, redis_url: str, folder: Path, **options: Any
) -> AsyncIterator[RaySite]:
    """Yield a site with an empty database; ``options`` are settings of the scheduler."""
    async with a_control_plane(postgres_url, redis_url, folder, **options) as plane:
        site = RaySite(lab, plane)
        try:
            yield site
        finally:
            site.kill_bridge()
