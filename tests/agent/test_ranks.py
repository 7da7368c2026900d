"""A gang's life on one node: started once named, reported, ended."""

from __future__ import annotations

import os
import signal
import stat
import sys

import pytest

from services.contracts.commands import StopGang
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
STUBBORN = ("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
SAVING = ("sh", "-c", "trap 'echo saved; exit 7' TERM; echo ready; while :; do sleep 0.05; done")


async def test_a_gang_runs_and_its_exit_code_is_reported_until_nobody_asks(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "echo out; echo err >&2; exit 3")
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (3, EndedBy.ITSELF)
    assert rank.started_at is not None
    assert rank.ended_at is not None
    assert (node.rank_dir(gang) / "stdout").read_text() == "out\n"
    assert (node.rank_dir(gang) / "stderr").read_text() == "err\n"
    node.plane.named.clear()
    await eventually(lambda: node.plane.rank(gang) is None)
    assert node.plane.gpu_energy_j(gang) > 0


async def test_nothing_starts_before_an_answer_names_it(node: Node) -> None:
    await node.start()
    gang = node.gang("sh", "-c", "true")
    await node.send(gang)
    await eventually(lambda: "starting" in node.plane.states(gang.allocation_id))
    await eventually(lambda: node.plane.rank(gang.allocation_id) is None)
    assert "running" not in node.plane.states(gang.allocation_id)
    assert not (node.rank_dir(gang.allocation_id) / "stdout").exists()


async def test_a_stop_lets_the_rank_save_its_work(node: Node) -> None:
    await node.start()
    gang = await node.run(*SAVING)
    await eventually(lambda: _has_printed(node, gang, "ready"))
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (7, EndedBy.STOP)
    assert "stopping" in node.plane.states(gang)
    assert _has_printed(node, gang, "saved")


async def test_a_rank_that_will_not_stop_is_killed_after_its_grace(node: Node) -> None:
    await node.start()
    gang = await node.run(*STUBBORN)
    await eventually(lambda: _has_printed(node, gang, "ready"))
    await node.send(StopGang(allocation_id=gang, grace_s=600, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "stopping")
    await node.send(StopGang(allocation_id=gang, grace_s=0.3, reason="hurry"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (-signal.SIGKILL, EndedBy.STOP)
    await eventually(lambda: not node.processes())


async def test_a_gang_that_the_answers_no_longer_name_is_stopped(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    node.plane.named.clear()
    await eventually(lambda: "exited" in node.plane.states(gang))
    await eventually(lambda: node.plane.rank(gang) is None)


async def test_what_a_rank_leaves_behind_is_killed(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "setsid sleep 601 & sleep 602 & (setsid sh -c 'trap : TERM; sleep 603') & exit 4")
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.exit_code == 4
    assert not [p for p in node.processes() if p.name() in ("sleep", "sh")]


async def test_a_command_that_cannot_run_says_why(node: Node) -> None:
    (node.folder / "tool").write_text("#!/bin/sh\n")
    await node.start()
    for command, working_dir, code, words in (
        ("no-such-program", None, 127, "cannot run no-such-program: No such file or directory"),
        ("./tool", str(node.folder), 126, "cannot run ./tool: Permission denied"),
        (("true", *["x" * 32_768] * 250), None, 126, "(arguments, variables and secrets together)"),
        ("true", "/no/such/folder", 127, "cannot enter the working directory /no/such/folder"),
    ):
        gang = await node.run(*((command,) if isinstance(command, str) else command), working_dir=working_dir)
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        assert (rank.exit_code, rank.ended_by) == (code, EndedBy.CANNOT_START)
        assert words in (rank.detail or "")


async def test_a_command_this_node_cannot_carry_out_is_refused(node: Node) -> None:
    await node.start()
    missing = await node.run("true", devices=[9])
    image = await node.run(image="example.org/train:1")
    await node.send('{"type": "start_gang", "allocation_id": "later.1", "of": "a newer version"}')
    node.plane.named.add("later.1")
    for gang, words in ((missing, "no device 9"), (image, "no container engine"), ("later.1", "cannot read")):
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        assert rank.ended_by is EndedBy.REFUSED
        assert words in (rank.detail or "")


async def test_two_gangs_never_hold_a_device_together(node: Node) -> None:
    await node.start()
    first = await node.run(*SLEEP, devices=[0, 1])
    await eventually(lambda: node.plane.state(first) == "running")
    second = await node.run(*SLEEP, devices=[1, 2])
    await eventually(lambda: node.plane.state(second) == "starting")
    node.plane.named.discard(first)
    await eventually(lambda: node.plane.state(second) == "running")
    started, ended = (
        node.plane.rank(second),
        [
            rank
            for beat in node.plane.heartbeats
            for rank in beat.ranks
            if rank.allocation_id == first and rank.ended_at
        ],
    )
    assert started is not None
    assert started.started_at is not None
    assert ended[0].ended_at is not None
    assert ended[0].ended_at <= started.started_at


async def test_the_environment_tells_the_gang_and_no_secret(node: Node) -> None:
    await node.start(GPU_AGENT_PASS_ENVIRONMENT="SITE_SCRATCH", SITE_SCRATCH="/scratch", DATABASE_URL="db-password")
    own = {"WATTSHIFT_JOB_ID": "forged", "MINE": "a b\nc", "CUDA_VISIBLE_DEVICES": "7"}
    gang = await node.run("env", "-0", environment=own, devices=[1, 3], generation=2)
    await eventually(lambda: node.plane.state(gang) == "exited")
    printed = (node.rank_dir(gang) / "stdout").read_text()
    told = dict(entry.split("=", 1) for entry in printed.split("\0") if entry)
    assert told["MINE"] == "a b\nc"
    assert told["SITE_SCRATCH"] == "/scratch"
    assert told["WATTSHIFT_JOB_ID"] == gang.removesuffix(".2")
    assert (told["CUDA_VISIBLE_DEVICES"], told["WATTSHIFT_LOCAL_WORLD_SIZE"]) == ("1,3", "2")
    assert (told["WATTSHIFT_GENERATION"], told["WORLD_SIZE"], told["NODE_RANK"]) == ("2", "2", "0")
    assert os.path.isdir(told["WATTSHIFT_CHECKPOINT_DIR"])
    secrets = [node.environment[name] for name in node.environment if "TOKEN" in name or name == "REDIS_URL"]
    assert not [secret for secret in [*secrets, "db-password"] if secret in printed]
    sleeping = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(sleeping) == "running")
    shims = [shim for shim in node.processes("shim") if sleeping in " ".join(shim.cmdline())]
    assert shims
    assert not [shim for shim in shims if set(shim.environ()) - {"PATH", "LC_CTYPE"}]


async def test_the_state_folder_is_nobody_elses_to_read(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    # The accounts of jobs pass through an agent's folder that may change accounts; they can list nothing there.
    assert stat.S_IMODE(node.state_dir.stat().st_mode) == (0o711 if os.geteuid() == 0 else 0o700)
    assert stat.S_IMODE((node.rank_dir(gang) / "spec").stat().st_mode) == 0o600


def _has_printed(node: Node, gang: str, text: str) -> bool:
    stdout = node.rank_dir(gang) / "stdout"
    return stdout.exists() and text in stdout.read_text()


SAVES_LATER = (
    "while [ ! -e go ]; do sleep 0.05; done; "
    """printf '{"done": 1, "saved_at": %s}\\n' $(date +%s.%N) >> $WATTSHIFT_PROGRESS_FILE; exec sleep 600"""
)


async def test_a_stop_that_may_wait_comes_with_the_next_save_whatever_agents_die(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", SAVES_LATER, working_dir=str(node.folder))
    await eventually(lambda: node.plane.state(gang) == "running")
    await node.send(StopGang(allocation_id=gang, grace_s=5, reason="test", wait_s=600))
    await eventually(lambda: (node.rank_dir(gang) / "leaves").exists())
    node.kill()
    await node.start()
    assert node.plane.state(gang) == "running"
    (node.folder / "go").touch()
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.ended_by is EndedBy.STOP
    assert rank.saved_at is not None


@pytest.mark.parametrize("says", ['{"done": 1, "saves_when_asked": true}', '{"done": 1}'])
async def test_a_job_that_saves_when_asked_is_asked_at_once_and_others_when_their_time_is_over(
    node: Node, says: str
) -> None:
    await node.start()
    gang = await node.run("sh", "-c", f"echo '{says}' >> $WATTSHIFT_PROGRESS_FILE; exec sleep 600")
    await eventually(lambda: (rank := node.plane.rank(gang)) is not None and rank.progress_done == 1)
    await node.send(StopGang(allocation_id=gang, grace_s=5, reason="test", wait_s=600 if "when" in says else 0.5))
    await eventually(lambda: node.plane.state(gang) == "exited")


async def test_a_stop_that_presses_ends_the_wait(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    await node.send(StopGang(allocation_id=gang, grace_s=5, reason="test", wait_s=600))
    await eventually(lambda: (node.rank_dir(gang) / "leaves").exists())
    await node.send(StopGang(allocation_id=gang, grace_s=5, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")
