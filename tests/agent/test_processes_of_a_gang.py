"""How the processes of a gang start: one on each node or one for each GPU; their variables, their ends, their limit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from gpu_agent.containers import Engine
from gpu_agent.environment import hostfile_text, job_variables, launcher_variables, with_options
from gpu_agent.ranks import RankFolder
from services.contracts.commands import StartGang, StopGang
from services.contracts.jobs import JobSpec
from services.contracts.nodes import EndedBy, RankStatus
from tests.agent.conftest import Node, a_launcher, eventually

PATHS = RankFolder(Path("/r")), "/c", "http://127.0.0.1:1"


def a_start(*command: str, devices: tuple[int, ...] = (2, 3), nnodes: int = 2, **spec: Any) -> StartGang:
    """The second node's part of a gang that has as many devices on each node."""
    rank = nnodes - 1
    return StartGang(
        allocation_id="job_1.2",
        job_id="job_1",
        generation=2,
        tenant_id="t",
        spec=JobSpec.model_validate({"name": "x", "command": list(command or ("train",)), **spec}),
        devices=list(devices),
        node_rank=rank,
        nnodes=nnodes,
        world_size=nnodes * len(devices),
        rank_offset=rank * len(devices),
        master_addr="10.0.0.1",
        master_port=29_511,
    )


async def ended(node: Node, gang: str) -> RankStatus:
    await eventually(lambda: node.plane.state(gang) == "exited", 30)
    rank = node.plane.rank(gang)
    assert rank is not None
    return rank


def printed(node: Node, gang: str, stream: str = "stdout") -> list[str]:
    path = node.rank_dir(gang) / stream
    return path.read_text().splitlines() if path.exists() else []


async def test_each_gpu_has_a_process_with_its_own_rank(node: Node) -> None:
    await node.start()
    script = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $GROUP_RANK $CUDA_VISIBLE_DEVICES $MINE"
    own = {"MINE": "own", "RANK": "9", "LOCAL_RANK": "9"}
    gang = await node.run("sh", "-c", script, devices=[0, 1, 3], processes="per_gpu", environment=own)
    assert (await ended(node, gang)).exit_code == 0
    assert sorted(printed(node, gang)) == [f"{rank} {rank} 3 3 0 0,1,3 own" for rank in range(3)]


async def test_the_first_process_that_fails_ends_the_others_and_decides(node: Node) -> None:
    await node.start()
    script = """
    trap 'echo saved $RANK; exit 0' TERM; echo up $RANK
    [ $RANK = 2 ] && { while [ ! -e go ]; do sleep 0.02; done; exit 7; }
    while :; do sleep 0.02; done"""
    gang = await node.run(
        "sh", "-c", script, devices=[0, 1, 2], processes="per_gpu", grace_s=20, working_dir=str(node.folder)
    )
    await eventually(lambda: len(printed(node, gang)) == 3)
    (node.folder / "go").touch()
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.ended_by) == (7, EndedBy.ITSELF)
    assert rank.detail == "The process of rank 2 exited with status 7."
    assert {"saved 0", "saved 1"} <= set(printed(node, gang))
    await eventually(lambda: not node.processes())


async def test_peers_that_do_not_end_are_killed_after_the_grace(node: Node) -> None:
    await node.start()
    script = (
        "[ $RANK = 0 ] && { while [ ! -e go ]; do sleep 0.02; done; kill -9 $$; }; trap '' TERM; echo up; sleep 600"
    )
    gang = await node.run(
        "sh", "-c", script, devices=[0, 1], processes="per_gpu", grace_s=0.3, working_dir=str(node.folder)
    )
    await eventually(lambda: printed(node, gang) == ["up"])
    (node.folder / "go").touch()
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.ended_by) == (-signal.SIGKILL, EndedBy.ITSELF)
    assert rank.detail == "The process of rank 0 was ended by SIGKILL."
    await eventually(lambda: not node.processes())


async def test_processes_that_end_well_wait_for_each_other_and_a_stop_reaches_all(node: Node) -> None:
    await node.start()
    script = "[ $RANK = 0 ] && exit 0; trap 'exit 5' TERM; echo up; while :; do sleep 0.02; done"
    gang = await node.run("sh", "-c", script, devices=[0, 1, 2], processes="per_gpu", grace_s=20)
    await eventually(lambda: printed(node, gang) == ["up"] * 2)
    await eventually(lambda: node.plane.state(gang) == "running")
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.ended_by) == (5, EndedBy.STOP)


async def test_all_processes_of_a_killed_shim_are_killed(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "echo up; sleep 600 & wait", devices=[0, 1, 2], processes="per_gpu")
    await eventually(lambda: printed(node, gang) == ["up"] * 3)
    for process in node.processes("shim"):
        process.kill()
    assert (await ended(node, gang)).ended_by is EndedBy.HOST
    await eventually(lambda: not node.processes())


async def test_a_command_that_cannot_run_says_so_once(node: Node) -> None:
    await node.start()
    gang = await node.run("no-such-program", devices=[0, 1], processes="per_gpu")
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.detail) == (127, "cannot run no-such-program: No such file or directory")


async def test_a_run_ends_at_its_time_limit_even_without_an_agent(node: Node) -> None:
    await node.start()
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.02; done"
    gang = await node.run("sh", "-c", script, devices=[0, 1], processes="per_gpu", time_limit_s=1.5, grace_s=30)
    await eventually(lambda: printed(node, gang) == ["up"] * 2)
    node.kill()
    await eventually(lambda: (node.rank_dir(gang) / "exited").exists())
    await node.start()
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.ended_by) == (0, EndedBy.TIME_LIMIT)
    assert rank.detail == "It reached its time limit of 1.5 s."
    assert printed(node, gang).count("saved") == 2


async def test_a_run_that_ignores_its_time_limit_is_killed_after_the_grace(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "trap '' TERM; sleep 600 & wait; wait", time_limit_s=0.3, grace_s=0.3)
    rank = await ended(node, gang)
    assert (rank.exit_code, rank.ended_by) == (-signal.SIGKILL, EndedBy.TIME_LIMIT)


def test_one_process_with_one_device_is_a_rank_and_one_with_several_is_none() -> None:
    assert job_variables(a_start(devices=(2,)), *PATHS, ["2"])["RANK"] == "1"
    assert job_variables(a_start(devices=(2,)), *PATHS, ["2"])["LOCAL_RANK"] == "0"
    assert not {"RANK", "LOCAL_RANK"} & set(job_variables(a_start(), *PATHS, []))
    assert not {"RANK", "LOCAL_RANK"} & set(job_variables(a_start(processes="per_gpu"), *PATHS, []))


def test_torchrun_finds_its_options_in_its_variables() -> None:
    assert launcher_variables(a_start()) == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "29511",
        "PET_RDZV_BACKEND": "static",
        "PET_RDZV_ENDPOINT": "10.0.0.1:29511",
        "PET_RDZV_ID": "job_1.2",
    }


GANG = "--num_processes 4 --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29511"
NODES = "--hostfile /h --no_ssh --node_rank 1 --master_addr 10.0.0.1 --include node-0@node-1:2,3"


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("python train.py", "python train.py"),
        ("torchrun train.py", "torchrun train.py"),
        ("accelerate config", "accelerate config"),
        ("accelerate launch train.py --a", f"accelerate launch {GANG} train.py --a"),
        (
            "env A=1 python -m accelerate.commands.launch train.py",
            f"env A=1 python -m accelerate.commands.launch {GANG} train.py",
        ),
        (
            "accelerate launch --num-processes=8 --machine_rank 0 train.py --num_machines 3",
            "accelerate launch --num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 29511 "
            "--num-processes=8 --machine_rank 0 train.py --num_machines 3",
        ),
        ("/opt/bin/deepspeed train.py", f"/opt/bin/deepspeed --master_port 29511 {NODES} train.py"),
        ("deepspeed -H hosts train.py", "deepspeed --master_port 29511 -H hosts train.py"),
    ],
)
def test_launchers_without_variables_get_options(command: str, started: str) -> None:
    assert " ".join(with_options(a_start(*command.split()), "/h", (2, 3))) == started


def test_options_on_one_node_and_with_one_device_on_each() -> None:
    alone = a_start("deepspeed", "train.py", nnodes=1)
    assert with_options(alone, "/h", (2, 3)) == ["deepspeed", "--master_port", "29511", "train.py"]
    single = a_start("accelerate", "launch", "train.py", devices=(2,))
    assert with_options(single, "/h", (2,))[-2:] == ["--multi_gpu", "train.py"]


def test_deepspeeds_nodes_have_as_many_slots_as_devices() -> None:
    uneven = a_start("deepspeed", "train.py").model_copy(update={"gpus_per_node": [1, 2]})
    assert hostfile_text(uneven, (2, 3)) == "node-0 slots=1\nnode-1 slots=4\n"
    assert hostfile_text(a_start(), (0, 1)) == "node-0 slots=2\nnode-1 slots=2\n"


def test_in_containers_each_gpu_has_a_container(tmp_path: Path) -> None:
    launcher = a_launcher(tmp_path, 4, Engine("docker", "docker", "nvidia"))
    folder = RankFolder(tmp_path / "rank")
    folder.path.mkdir()
    launch = launcher.prepare(a_start(image="example.org/train:1", processes="per_gpu"), folder, "token")
    names = [f"wattshift-job_1.2-1-{local_rank}" for local_rank in range(2)]
    assert [process.argv[process.argv.index("--name") + 1] for process in launch.processes] == names
    assert launch.cleanup == ["docker", "rm", "--force", *names]
    for local_rank, process in enumerate(launch.processes):
        inside = Path(process.argv[process.argv.index("--env-file") + 1]).read_text().splitlines()
        assert {f"RANK={2 + local_rank}", f"LOCAL_RANK={local_rank}", "CUDA_VISIBLE_DEVICES=0,1"} <= set(inside)
        assert "PET_NODE_RANK=1" in inside
    folder.release()
    assert not list(folder.path.glob("*.env*")), "they may have the job's secrets"

    start = a_start("deepspeed", "train.py", image="example.org/train:1", processes="per_node")
    launch = launcher.prepare(start, folder, "token")
    assert launch.processes == []
    assert "node-0@node-1:0,1" in launch.argv, "a container counts its own devices from 0"
    assert str(folder.path / "hostfile") in launch.argv
