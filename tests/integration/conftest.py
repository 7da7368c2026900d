"""The whole installation, as `wattshift up` starts it, and the command line's way to it."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.client import Gateway
from services.cli.jobs.names import ENDED
from services.standalone import stack
from services.standalone.data_folder import ProcessStatus
from tests.support import slurm
from tests.support.servers import scratch_folder, wait_until
from tests.support.slurm import SlurmLab
from tests.support.slurm_bridge import Site, a_site

QUICK = {
    "CARBON_REPLAY_SPEED": "600",
    "SCHEDULER_ROUND_INTERVAL_S": "4",
    "SCHEDULER_MIN_PROFILE_S": "2",
    "SCHEDULER_LEASE_MARGIN_S": "1",
    "SCHEDULER_REPUBLISH_AFTER_S": "2",
    "TELEMETRY_HEARTBEAT_INTERVAL_S": "0.5",
    "TELEMETRY_LEASE_TTL_S": "12",
    "GPU_AGENT_ENERGY_INTERVAL_S": "1",
}
"""Seconds instead of minutes, so that a test sees rounds, leases and repeats."""
RARE_ROUNDS = {
    "SCHEDULER_ROUND_INTERVAL_S": "3600",
    # The models of job lengths learn from every two jobs that end.
    "OPTIMIZER_TRAIN_INTERVAL_S": "1",
    "OPTIMIZER_TRAIN_LOOK_S": "0.3",
    "OPTIMIZER_TRAIN_MIN_JOBS": "2",
    # The draw is looked at every second, and hosts draw nothing: the nodes' GPUs are all that is limited.
    "SCHEDULER_POWER_INTERVAL_S": "1",
    "SCHEDULER_POWER_SETTLE_S": "2",
    "SCHEDULER_MEASURED_SETTINGS": "4",
    "GPU_AGENT_HOST_POWER": "modelled",
    "GPU_AGENT_CPU_POWER_CURVE": "0:0,1:0",
    "GPU_AGENT_STATIC_W": "0",
}
"""Active rounds come only when a policy is put in force: for tests that count on what happens between them."""
UNUSED = ("simulator-worker", "plan-solver")
"""Workers that the tests of jobs on nodes do not need; each costs two CPU seconds to start."""


class Installation:
    """One installation of this machine, started and stopped by the commands a person would use."""

    def __init__(self, folder: Path, two_nodes: str = "2x4", *, without: Collection[str] = (), **env: str) -> None:
        self.folder = folder
        self._without = without
        self.gateway: Gateway
        self._two_nodes = two_nodes
        self._env = env

    def up(self) -> None:
        started = stack.up(self.folder, nodes=self._two_nodes, env=QUICK | self._env, without=self._without)
        self.gateway = Gateway(started.gateway_url, (self.folder / "admin.key").read_text().strip())
        wait_until(lambda: len(self.nodes()) >= 2)

    def down(self) -> None:
        self.gateway.close()
        stack.down(self.folder)

    def process(self, name: str) -> ProcessStatus:
        return next(process for process in stack.read_status(self.folder).processes if process.name == name)

    def kill(self, name: str) -> None:
        """Kill a process with -9, unless it sleeps, and return once another has taken its place."""
        before = self.process(name)
        if before.state == "asleep":
            return
        assert before.pid
        os.kill(before.pid, signal.SIGKILL)
        wait_until(lambda: self.process(name).pid != before.pid and self.process(name).state == "running", 60)

    def kill_supervisor(self) -> None:
        """Kill the supervisor with -9, which takes its children along, and start the installation again."""
        pid = stack.read_status(self.folder).pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: stack.read_status(self.folder).state == "stopped")
        self.gateway.close()
        self.up()

    def nodes(self) -> list[Any]:
        return [node for node in self.gateway.get("/v1/nodes")["items"] if node["state"] == "up"]

    def job(self, job_id: str) -> Any:
        return self.gateway.get(f"/v1/jobs/{job_id}")

    def wait_for(self, job_id: str, is_so: Callable[[Any], bool], within_s: float = 60) -> Any:
        wait_until(lambda: is_so(self.job(job_id)), within_s)
        return self.job(job_id)

    def wait_for_ends(self, job_ids: list[str], within_s: float) -> list[Any]:
        wait_until(lambda: all(self.job(job_id)["state"] in ENDED for job_id in job_ids), within_s)
        return [self.job(job_id) for job_id in job_ids]


@pytest.fixture(scope="package")
def installation() -> Iterator[Installation]:
    """An installation that the tests of this folder share; each leaves it running."""
    with scratch_folder() as folder:
        made = Installation(folder / "data")
        made.up()
        yield made
        made.down()


@pytest.fixture(scope="package")
def rare_rounds() -> Iterator[Installation]:
    """A second one, whose active rounds come only when a policy is put in force."""
    with scratch_folder() as folder:
        made = Installation(folder / "data", without=UNUSED, **RARE_ROUNDS)
        made.up()
        yield made
        made.down()


@pytest.fixture(scope="module")
def lab() -> Iterator[SlurmLab]:
    """A Slurm of two nodes, for one module of tests."""
    with slurm.a_slurm(nodes=2) as made:
        yield made


@pytest.fixture
async def site(lab: SlurmLab, postgres_url: str, redis_url: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A control plane for that Slurm; its bridge is the test's to start. No job of a user is left after it."""
    async with a_site(lab, postgres_url, redis_url, tmp_path) as made:
        yield made
    lab.run("scancel", "--user=nobody", check=False)
    lab.run("scancel", "--user=daemon", check=False)
    lab.wait(lambda: not lab.run("squeue", "-h"), 30, "no job is left")
