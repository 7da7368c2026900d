"""Two nodes that keep checkpoints to themselves: a stopped job goes back to its own, or waits until it is let go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.conftest import UNUSED, Installation
from tests.support.servers import scratch_folder, wait_until

SAVES = 'f=$WATTSHIFT_CHECKPOINT_DIR/step; echo "found $(cat $f 2>/dev/null)."; echo saved > $f; sleep 600'


@pytest.fixture
def pair() -> Iterator[Installation]:
    with scratch_folder() as folder:
        without = (*UNUSED, "simulator", "optimizer", "worker", "router", "serving")
        made = Installation(folder / "data", "2x2", without=without, GPU_AGENT_CHECKPOINTS="local")
        made.up()
        yield made
        made.down()


def node_of(job: Any) -> str:
    [share] = job["placement"]
    return share["node_id"]


def begins(pair: Installation, job_id: str, says: str) -> str:
    """Wait until the job's present gang has said this; return its node."""
    path = f"/v1/jobs/{job_id}/logs"
    job = pair.wait_for(job_id, lambda job: job["state"] == "running")
    wait_until(lambda: pair.gateway.text(path).text == says, 30)
    return node_of(job)


def test_a_stopped_job_goes_back_to_its_checkpoint_and_nowhere_else(pair: Installation) -> None:
    first, second = sorted(node["id"] for node in pair.nodes())
    call = pair.gateway.call
    call("PUT", "/v1/policies/active", body={"name": "fifo", "parameters": {}})
    call("POST", f"/v1/nodes/{first}/drain")
    spec = {"name": "saves", "command": ["sh", "-c", SAVES], "gpus": {"min": 1}, "grace_s": 1}
    job = call("POST", "/v1/jobs", body=spec)["id"]
    assert begins(pair, job, "found .\n") == second
    call("POST", f"/v1/nodes/{first}/resume")

    call("POST", f"/v1/jobs/{job}/hold")
    held = pair.wait_for(job, lambda job: job["state"] == "held")
    assert held["checkpoint_nodes"] == [second]
    call("POST", f"/v1/jobs/{job}/release")
    assert begins(pair, job, "found saved.\n") == second, "though the other one is free, too, and comes first"

    call("POST", f"/v1/nodes/{second}/drain")
    call("POST", f"/v1/jobs/{job}/hold")
    pair.wait_for(job, lambda job: job["state"] == "held")
    call("POST", f"/v1/jobs/{job}/release")
    waits = pair.wait_for(job, lambda job: job["reason"] == "checkpoint_node_closed")
    assert f"It waits for {second};" in waits["detail"]

    assert call("POST", f"/v1/jobs/{job}/forget-checkpoint")["checkpoint_nodes"] == []
    assert begins(pair, job, "found .\n") == first
