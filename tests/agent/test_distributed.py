"""Programs that meet as ``torch.distributed`` does, as gangs of two nodes: started both ways, scaled 1 -> 4 -> 2."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.contracts.commands import StopGang
from tests.agent.conftest import Node, eventually, states
from tests.support.environments import torch_programs
from tests.support.ports import Ports
from tests.support.servers import ROOT

NUMPY = (sys.executable, str(ROOT / "examples" / "train_ddp.py"))
TORCH = str(Path(__file__).with_name("torch_program.py"))
ENDLESS = ("--steps", "1000000")
SIZES = [[1, 0], [2, 2], [1, 1]]
"""GPUs on each of two nodes, one generation after the other."""


def losses(folder: Path) -> list[dict[str, float]]:
    path = folder / "losses.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def start(
    nodes: list[Node], generation: int, gpus: list[int], port: int, command: tuple[str, ...], **spec: Any
) -> str:
    """Start a generation of the job on so many devices of each node."""
    used = [(node, count) for node, count in zip(nodes, gpus, strict=True) if count]
    offset = 0
    for node_rank, (node, count) in enumerate(used):
        place = {"node_rank": node_rank, "nnodes": len(used), "rank_offset": offset, "world_size": sum(gpus)}
        devices = list(range(count))
        gang = node.gang(
            *command,
            job="job_ddp",
            generation=generation,
            devices=devices,
            master_port=port,
            grace_s=60,
            **place,
            **spec,
        )
        node.plane.named.add(gang.allocation_id)
        await node.send(gang)
        offset += count
    return f"job_ddp.{generation}"


async def scale(
    nodes: list[Node], folder: Path, ports: Ports, sizes: list[list[int]], command: tuple[str, ...], **spec: Any
) -> list[int]:
    """Run the job at one size after the other, ten steps each at least; return the last step of each."""
    last: list[int] = []
    for generation, gpus in enumerate(sizes, start=1):
        port = ports.take(29_720 + 10 * generation)
        gang = await start(nodes, generation, gpus, port, command, **spec)
        enough = (last[-1] if last else 0) + 10
        await eventually(lambda gang=gang, enough=enough: died(nodes, gang) or len(losses(folder)) >= enough, 120)
        for node, count in zip(nodes, gpus, strict=True):
            if count:
                await node.send(StopGang(allocation_id=gang, grace_s=60, reason="preempted"))
        ends = sum(map(bool, gpus))
        await eventually(lambda gang=gang, ends=ends: ended(nodes, gang) == ends, 60)
        nodes[0].plane.named.clear()
        last.append(len(losses(folder)))
    return last


def ended(nodes: list[Node], gang: str) -> int:
    return sum(state == "exited" for state, _ in states(nodes, gang))


def died(nodes: list[Node], gang: str) -> bool:
    """Fail with the job's own words if it ended by itself."""
    if ended(nodes, gang):
        words = [
            path.read_text()[-2_000:] for node in nodes for path in node.state_dir.glob(f"allocations/{gang}/std*")
        ]
        pytest.fail("\n".join(words))
    return False


def assert_went_on(
    found: list[dict[str, float]], last: list[int], sizes: list[list[int]], expected: list[float], tolerance: float
) -> None:
    """No step is missing or made twice, and each loss is that of a job that nobody interrupted."""
    assert [line["step"] for line in found] == list(range(1, last[-1] + 1))
    ends = list(zip([0, *last], last, sizes, strict=False))
    assert [line["world_size"] for line in found] == [sum(size) for first, end, size in ends for _ in range(first, end)]
    assert [line["loss"] for line in found] == pytest.approx(expected, rel=tolerance)


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Ports for the gangs to meet at."""
    made = Ports()
    yield made
    made.release()


@pytest.mark.parametrize("processes", ["per_gpu", "per_node"])
async def test_a_scaled_job_goes_on_where_it_stopped(
    nodes: list[Node], ports: Ports, tmp_path: Path, processes: str
) -> None:
    folder = tmp_path / "shared" / "checkpoints" / "job_ddp"
    last = await scale(nodes, folder, ports, SIZES, (*NUMPY, *ENDLESS), processes=processes)
    whole = {"PATH": os.environ["PATH"], "WATTSHIFT_CHECKPOINT_DIR": str(tmp_path / "whole")}
    command = [*NUMPY, "--steps", str(last[-1]), "--step-seconds", "0"]
    await asyncio.to_thread(subprocess.run, command, env=whole, check=True, stdout=subprocess.DEVNULL)
    assert_went_on(losses(folder), last, SIZES, [line["loss"] for line in losses(tmp_path / "whole")], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "python"])
async def test_a_scaled_torch_job_goes_on_where_it_stopped(
    nodes: list[Node], ports: Ports, tmp_path: Path, launcher: str
) -> None:
    programs = torch_programs()
    folder = tmp_path / "shared" / "checkpoints" / "job_ddp"
    sizes = SIZES[1:] if launcher == "accelerate" else SIZES  # without a GPU, it does not choose --multi_gpu by itself
    command, processes = {
        "torchrun": ((str(programs / "torchrun"), TORCH), "per_node"),
        "accelerate": ((str(programs / "accelerate"), "launch", "--multi_gpu", TORCH), "per_node"),
        "python": ((str(programs / "python"), TORCH), "per_gpu"),
    }[launcher]
    last = await scale(nodes, folder, ports, sizes, command, processes=processes, environment={"OMP_NUM_THREADS": "1"})
    whole = {"PATH": os.environ["PATH"], "WATTSHIFT_CHECKPOINT_DIR": str(tmp_path / "whole"), "OMP_NUM_THREADS": "1"}
    command = (str(programs / "torchrun"), "--standalone", TORCH, str(last[-1]))
    await asyncio.to_thread(subprocess.run, command, env=whole, check=True)
    assert_went_on(losses(folder), last, sizes, [line["loss"] for line in losses(tmp_path / "whole")], 1e-6)
