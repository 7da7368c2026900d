"""Nodes that really go away and come back: the standalone's hook stops and starts their agents."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from services.core.domain.jobs import JobState
from tests.integration.conftest import UNUSED, Installation
from tests.support.servers import ROOT, scratch_folder, wait_until

POWERED = {
    "SCHEDULER_NODE_POWER": "command",
    "SCHEDULER_NODE_MIN_ON_S": "0",
    "SCHEDULER_NODE_MIN_OFF_S": "0",
    "SCHEDULER_NODE_BOOT_W": "200",
    "SCHEDULER_NODE_STANDBY_W": "10",
    "TELEMETRY_LEASE_TTL_S": "4",
    "GPU_AGENT_HOST_POWER": "modelled",
    "GPU_AGENT_STATIC_W": "50",
}


@pytest.fixture
def powered() -> Iterator[Installation]:
    """An installation of two nodes that can be powered down."""
    with scratch_folder() as folder:
        made = Installation(folder / "data", without=(*UNUSED, "worker"), **POWERED)
        made.up()
        yield made
        made.down()


def node(installation: Installation, name: str) -> Any:
    return installation.gateway.get(f"/v1/nodes/{name}")


def power(installation: Installation, name: str) -> str:
    return node(installation, name)["power"]["state"]


def submit(installation: Installation, gpus: int, steps: int) -> str:
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", str(steps), "--step-seconds", "0.05"]
    spec = {
        "name": "wide",
        "command": train,
        "gpus": {"min": gpus},
        "processes": "per_node",
        "work": {"total": steps},
        "grace_s": 1,
    }
    return installation.gateway.call("POST", "/v1/jobs", body=spec)["id"]


def test_idle_nodes_go_down_and_a_wide_gang_brings_them_back(powered: Installation) -> None:
    body = {"name": "powerflow", "parameters": {"profiling": "never", "spare_nodes": 1, "migration": False}}
    powered.gateway.call("PUT", "/v1/policies/active", body=body)
    wait_until(lambda: power(powered, "node-2") == "off", 60)
    seen = node(powered, "node-2")
    assert (seen["state"], seen["power_w"], seen["power"]["reason"]) == ("asleep", 0, "unused")
    assert powered.process("agent-node-2").pid is None
    assert powered.process("agent-node-1").pid is not None

    job = submit(powered, 8, 60)
    powered.wait_for(job, lambda job: job["reason"] == "waiting_for_node", 30)
    done = powered.wait_for(job, lambda job: job["state"] in (JobState.SUCCEEDED, JobState.FAILED), 90)
    assert done["state"] == JobState.SUCCEEDED
    made = node(powered, "node-2")["power"]
    assert made["wakes"] == 1
    assert made["waking_s"] > 0
    estimated_j = 200 * made["waking_s"] + 10 * made["off_s"]
    assert made["estimated_energy_j"] == pytest.approx(estimated_j)

    def idle_j() -> float:
        return powered.gateway.get("/v1/reports/footprint", group_by="node")["idle"]["energy_j"]

    wait_until(lambda: idle_j() >= estimated_j, 30)
    assert powered.gateway.get("/v1/invariants")["holds"]


@pytest.mark.slow
def test_a_scheduler_killed_while_the_hook_runs_has_it_done_all_the_same(powered: Installation) -> None:
    powered.gateway.call("POST", "/v1/nodes/node-1/sleep")
    powered.kill("scheduler")
    wait_until(lambda: power(powered, "node-1") == "off", 60)
    powered.gateway.call("POST", "/v1/nodes/node-1/wake")
    powered.kill("scheduler")
    wait_until(lambda: power(powered, "node-1") == "on", 60)
    assert node(powered, "node-1")["state"] == "up"
    made = node(powered, "node-1")["power"]
    assert made["wakes"] == 1
    assert powered.gateway.get("/v1/invariants")["holds"]
