"""An elastic job in plain PyTorch, grown over two nodes and shrunk again by the policy in force."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.agent.test_distributed import TORCH, assert_went_on, losses
from tests.integration.conftest import UNUSED, Installation
from tests.support.environments import torch_programs
from tests.support.servers import ROOT, scratch_folder, wait_until


@pytest.fixture
def programs() -> Path:
    """The programs of a Python with PyTorch; first, so that nothing is started in vain."""
    return torch_programs()


@pytest.fixture
def pair(programs: Path) -> Iterator[Installation]:
    """Two nodes of two GPUs whose jobs may read the program and its Python."""
    shown = f"{Path(TORCH).parent},{programs.parent}"
    with scratch_folder() as folder:
        made = Installation(folder / "data", "2x2", without=UNUSED, GPU_AGENT_SHOWN_FOLDERS=shown)
        made.up()
        yield made
        made.down()


def submit_rival(pair: Installation) -> str:
    """Submit what needs three of the four GPUs, and is more urgent."""
    train = [sys.executable, str(ROOT / "examples" / "train.py"), "--steps", "1000000"]
    spec = {"name": "rival", "command": train, "gpus": {"min": 3}, "priority": 9, "grace_s": 1}
    return pair.gateway.call("POST", "/v1/jobs", body=spec)["id"]


@pytest.mark.slow
def test_the_policy_grows_a_torch_job_over_both_nodes_and_shrinks_it_again(
    pair: Installation, programs: Path, tmp_path: Path
) -> None:
    parameters = {"resize_gain": 0}
    pair.gateway.call("PUT", "/v1/policies/active", body={"name": "afs", "parameters": parameters})
    rival = submit_rival(pair)
    spec = {
        "name": "elastic",
        "command": [str(programs / "torchrun"), TORCH],
        "gpus": {"min": 1, "max": 4},
        "environment": {"OMP_NUM_THREADS": "1"},
        "grace_s": 60,
    }
    job = pair.gateway.call("POST", "/v1/jobs", body=spec)["id"]

    def found() -> list[dict[str, float]]:
        folders = [path.parent for path in pair.folder.rglob("losses.jsonl")]
        assert len(folders) <= 1, "both nodes have one folder for its checkpoints"
        return losses(folders[0]) if folders else []

    def runs_on(gpus: int) -> None:
        """Return once the job has made ten steps on so many GPUs."""

        def made_steps() -> bool:
            last = found()[-10:]
            return len(last) == 10 and all(line["world_size"] == gpus for line in last)

        wait_until(made_steps, 120)

    runs_on(1)
    pair.gateway.call("POST", f"/v1/jobs/{rival}/cancel")
    runs_on(4)
    assert {share["node_id"] for share in pair.job(job)["placement"]} == {"node-1", "node-2"}
    rival = submit_rival(pair)
    runs_on(1)
    for each in (job, rival):
        pair.gateway.call("POST", f"/v1/jobs/{each}/cancel")
    pair.wait_for_ends([job, rival], 90)

    made = found()
    runs = [
        (int(size), [int(line["step"]) for line in lines])
        for size, lines in groupby(made, lambda each: each["world_size"])
    ]
    assert [size for size, _ in runs] == [1, 4, 1]
    whole = {"PATH": os.environ["PATH"], "WATTSHIFT_CHECKPOINT_DIR": str(tmp_path / "whole"), "OMP_NUM_THREADS": "1"}
    command = (str(programs / "torchrun"), "--standalone", TORCH, str(len(made)))
    subprocess.run(command, env=whole, check=True)
    expected = [line["loss"] for line in losses(tmp_path / "whole")]
    assert_went_on(made, [steps[-1] for _, steps in runs], [[size] for size, _ in runs], expected, 1e-6)
    assert pair.gateway.get("/v1/invariants")["holds"]
