"""The example program: elastic, exact, and quick to notice a twin. Alone, and as jobs on two nodes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from services.cli.jobs.specs import read_specs
from services.contracts.commands import StopGang
from tests.agent.conftest import Node, eventually, states
from tests.support.ports import Ports
from tests.support.servers import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = (sys.executable, str(EXAMPLES / "train.py"))


class Train:
    """Starts gangs of one node by hand; at its end they have ended, and their pipes are closed."""

    def __init__(self, until_end: ExitStack) -> None:
        self._until_end = until_end

    def __call__(
        self, folder: Path, *arguments: str, generation: int = 1, world: int = 4, **environment: str
    ) -> subprocess.Popen[str]:
        """Start one."""
        command = [*TRAIN, "--steps", "300", "--step-seconds", "0.02", "--checkpoint-dir", str(folder), *arguments]
        variables = {"WATTSHIFT_GENERATION": str(generation), "WORLD_SIZE": str(world), **environment}
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True)
        self._until_end.enter_context(process)
        self._until_end.callback(process.kill)
        return process


@pytest.fixture
def train() -> Iterator[Train]:
    """Start example programs by hand."""
    with ExitStack() as until_end:
        yield Train(until_end)


def ledger(folder: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def assert_each_step_once(folder: Path, steps: int) -> None:
    """The ledger's lives follow each other without a gap or an overlap."""
    lives = ledger(folder)
    assert [life["first"] for life in lives] == [0, *(life["last"] for life in lives[:-1])]
    assert lives[-1]["last"] == steps
    assert len({life["generation"] for life in lives}) == len(lives)


def first_line(process: Any) -> str:
    """Wait until the program has begun to work."""
    return process.stdout.readline()


def test_however_it_is_interrupted_the_result_is_the_same(train: Train, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert train(whole, world=8).wait() == 0
    for generation, (world, end) in enumerate([(2, signal.SIGTERM), (8, signal.SIGKILL), (1, signal.SIGTERM)], start=1):
        process = train(pieces, "--checkpoint-every", "0.1", generation=generation, world=world)
        first_line(process)
        began = ledger(pieces)[-1]["last"] if generation > 1 else 0
        wait_until(lambda began=began: (pieces / "steps.jsonl").exists() and ledger(pieces)[-1]["last"] > began)
        process.send_signal(end)
        assert process.wait() == (143 if end == signal.SIGTERM else -signal.SIGKILL)
    assert train(pieces, generation=4, world=16).wait() == 0
    assert result(pieces) == result(whole)
    assert_each_step_once(pieces, 300)
    assert [life["world_size"] for life in ledger(pieces)] == [2, 8, 1, 16]
    assert not (pieces / "twins.log").exists()


def test_more_gpus_are_faster_by_the_scaling_curve(train: Train, tmp_path: Path) -> None:
    seconds: dict[int, float] = {}
    for world in (1, 4):
        process = train(tmp_path / str(world), "--steps", "60", "--scaling", "0.8", world=world)
        first_line(process)
        began = time.monotonic()
        assert process.wait() == 0
        seconds[world] = time.monotonic() - began
    assert seconds[1] == pytest.approx(60 * 0.02, rel=0.25)
    assert seconds[1] / seconds[4] == pytest.approx(4 * 0.8**2, rel=0.4)


def test_a_twin_is_noticed_and_noted(train: Train, tmp_path: Path) -> None:
    first = train(tmp_path, "--steps", "100000")
    first_line(first)
    assert train(tmp_path).wait() == 97, "while the first runs"
    first.terminate()
    assert first.wait() == 143
    assert train(tmp_path).wait() == 97, "the same generation again"
    assert train(tmp_path, generation=3).wait() == 0
    assert train(tmp_path, generation=2).wait() == 98, "an older generation"
    notes = [json.loads(line) for line in (tmp_path / "twins.log").read_text().splitlines()]
    assert [note["status"] for note in notes] == [97, 97, 98]


def test_slow_devices_are_slow_and_progress_is_told(train: Train, tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text('{"relative_speed": 0.5, "clock_mhz": 700}')
    files = {
        "WATTSHIFT_DEVICE_FILE": str(tmp_path / "device.json"),
        "WATTSHIFT_PROGRESS_FILE": str(tmp_path / "progress"),
    }
    process = train(tmp_path / "c", "--steps", "50", "--gpu-load", "0.4", world=1, **files)
    first_line(process)
    began = time.monotonic()
    assert process.wait() == 0
    assert time.monotonic() - began == pytest.approx(2 * 50 * 0.02, rel=0.25)
    told = [json.loads(line) for line in (tmp_path / "progress").read_text().splitlines()]
    assert (told[0]["done"], told[-1]["done"], told[-1]["total"], told[-1]["gpu_load"]) == (0, 50, 50, 0.4)
    assert told[-1]["loss"] < told[0]["loss"]


def test_the_workload_is_a_batch_of_such_jobs() -> None:
    specs = read_specs(EXAMPLES / "workload.json")
    assert 10 <= len(specs) <= 14
    assert all(Path(word).exists() for spec in specs for word in spec.command[:2])
    for spec in specs:
        assert spec.work is not None
        assert spec.command[spec.command.index("--steps") + 1] == str(int(spec.work.total))
    assert any(spec.gpus.min > 4 for spec in specs), "one gang spans nodes"


async def start_gang(nodes: list[Node], generation: int, port: int) -> str:
    """Start one generation of a gang of all nodes' devices."""
    command = (*TRAIN, "--steps", "400", "--step-seconds", "0.04", "--checkpoint-every", "0.3")
    for rank, node in enumerate(nodes):
        options = {"node_rank": rank, "nnodes": len(nodes), "master_port": port, "world_size": 4, "grace_s": 10}
        gang = node.gang(*command, job="job_span", generation=generation, devices=[0, 1], **options)
        node.plane.named.add(gang.allocation_id)
        await node.send(gang)
    return f"job_span.{generation}"


async def test_a_gang_on_two_nodes_meets_stops_and_goes_on(nodes: list[Node], tmp_path: Path) -> None:
    checkpoints = tmp_path / "shared" / "checkpoints" / "job_span"
    ports = Ports()
    first = await start_gang(nodes, 1, ports.take(29_700))
    await eventually(lambda: (checkpoints / "steps.jsonl").exists())
    assert states(nodes, first) == [("running", None)] * 2
    await nodes[1].send(StopGang(allocation_id=first, grace_s=10, reason="preempted"))
    await eventually(lambda: states(nodes, first) == [("exited", 143)] * 2)
    saved = ledger(checkpoints)[-1]["last"]
    nodes[0].plane.named.clear()
    second = await start_gang(nodes, 2, ports.take(29_701))
    await eventually(lambda: states(nodes, second) == [("exited", 0)] * 2, 90)
    assert_each_step_once(checkpoints, 400)
    assert ledger(checkpoints)[0] == {"generation": 1, "world_size": 4, "first": 0, "last": saved}
    assert not (checkpoints / "twins.log").exists()
    ports.release()


async def test_a_gang_that_loses_a_node_ends_everywhere(nodes: list[Node], tmp_path: Path) -> None:
    ports = Ports()
    gang = await start_gang(nodes, 1, ports.take(29_710))
    await eventually(lambda: (tmp_path / "shared" / "checkpoints" / "job_span" / "steps.jsonl").exists())
    nodes[1].processes("train.py")[0].kill()
    await eventually(lambda: sorted(states(nodes, gang)) == [("exited", -signal.SIGKILL), ("exited", 1)])
    ports.release()
