"""Anything may be killed at any moment: the agent, a shim, Redis, the control plane's answers."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import redis

from gpu_agent import app as agent_app
from gpu_agent import shim
from gpu_agent.ranks import Launch, RankFolder
from gpu_agent.settings import AgentSettings
from services.contracts.commands import StopGang
from services.contracts.nodes import EndedBy
from services.contracts.streams import command_stream
from tests.agent.conftest import Node, eventually
from tests.agent.test_ranks import SLEEP

COUNTING = (
    *("sh", "-c"),
    "echo started >> $WATTSHIFT_CHECKPOINT_DIR/starts; while [ ! -e $GO ]; do sleep 0.05; done; exit 9",
)


async def test_a_killed_agent_finds_its_ranks_again_and_learns_their_exit_codes(node: Node) -> None:
    await node.start()
    go = node.folder / "go"
    first = await node.run(*COUNTING, environment={"GO": str(go)}, devices=[0])
    second = await node.run(*SLEEP, devices=[1])
    await eventually(lambda: {node.plane.state(first), node.plane.state(second)} == {"running"})
    before = {process.pid for process in node.processes()}
    node.kill()
    go.touch()  # the first ends while there is no agent
    await eventually(lambda: (node.rank_dir(first) / "exited").exists())
    await node.start()
    await eventually(lambda: node.plane.state(first) == "exited")
    rank = node.plane.rank(first)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (9, EndedBy.ITSELF)
    assert node.plane.state(second) == "running"
    # The same processes, no twin; what the agent itself starts as it begins is gone again soon.
    await eventually(lambda: {process.pid for process in node.processes()} <= before)
    assert _starts(node, first) == 1
    node.plane.named.discard(second)
    await eventually(lambda: node.plane.rank(second) is None)


async def test_an_agent_whose_port_is_taken_leaves_its_gangs_alone_and_waits_for_it(node: Node) -> None:
    ends_its_ranks = {"GPU_AGENT_STOP_RANKS_ON_EXIT": "true"}
    await node.start(**ends_its_ranks)
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    before = {process.pid for process in node.processes()}
    node.kill()
    log = node.folder / "agent.log"

    def agents_heard() -> int:
        return len({beat.boot_id for beat in node.plane.heartbeats})

    with socket.create_server(("127.0.0.1", node.port)):
        node._spawn(node.environment | ends_its_ranks)  # pyright: ignore[reportPrivateUsage]
        await eventually(lambda: log.read_text().count("port.in_use") > 1)
        assert node.process
        assert node.process.poll() is None
        assert agents_heard() == 1
    await eventually(lambda: agents_heard() == 2)
    await eventually(lambda: node.plane.state(gang) == "running")
    # Nothing was ended or begun; what the agent itself starts as it begins is gone again soon.
    await eventually(lambda: {process.pid for process in node.processes()} == before)


@pytest.mark.parametrize("starts", [False, True])
async def test_only_an_agent_that_has_started_ends_its_gangs(
    starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    class StandIn:
        def __init__(self, *_: object) -> None: ...

        async def start(self) -> None:
            did.append("start")
            if not starts:
                raise OSError("No space left on device")

        async def stop(self) -> None:
            did.append("stop")

    monkeypatch.setattr(agent_app, "Agent", StandIn)
    monkeypatch.setattr(agent_app, "show_figures", lambda *_: None)
    app = agent_app.create_app(AgentSettings(state_dir=tmp_path, data_dir=tmp_path, stop_ranks_on_exit=True))
    with nullcontext() if starts else pytest.raises(OSError, match="No space left"):
        async with app.router.lifespan_context(app):
            pass
    assert did == ["start"] + ["stop"] * starts


async def test_an_agent_killed_at_once_after_a_command_starts_one_gang(node: Node) -> None:
    await node.start()
    go = node.folder / "go"
    gang = node.gang(*COUNTING, environment={"GO": str(go)})
    node.plane.named.add(gang.allocation_id)
    for _ in range(4):
        await node.send(gang)
        await eventually(lambda: node.rank_dir(gang.allocation_id).exists())
        node.kill()
        await node.start()
    await eventually(lambda: node.plane.state(gang.allocation_id) == "running")
    go.touch()
    await eventually(lambda: node.plane.state(gang.allocation_id) == "exited")
    assert _starts(node, gang.allocation_id) == 1


async def test_a_killed_shim_takes_the_rank_with_it(node: Node) -> None:
    await node.start()
    gang = await node.run("sh", "-c", "setsid sleep 604 & sleep 605")
    await eventually(lambda: sum(p.name() == "sleep" for p in node.processes()) == 2)
    started = shim.read_facts(str(node.rank_dir(gang) / "started"))
    assert started is not None
    psutil.Process(int(started["shim"])).kill()
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (-signal.SIGKILL, EndedBy.HOST)
    assert not node.processes(), "neither the command nor what it had put into another session"


async def test_ranks_end_with_their_lease_when_the_agent_is_dead(node: Node) -> None:
    node.plane.lease_ttl_s = 1.5
    await node.start()
    saving = await node.run("sh", "-c", "trap 'exit 7' TERM; while :; do sleep 0.05; done", devices=[0], grace_s=30)
    stubborn = await node.run("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done", devices=[1], grace_s=30)
    await eventually(lambda: {node.plane.state(saving), node.plane.state(stubborn)} == {"running"})
    node.kill()
    await eventually(lambda: not node.processes(), 20)
    await node.start()
    for gang, code in ((saving, 7), (stubborn, -signal.SIGKILL)):
        await eventually(lambda gang=gang: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        assert (rank.exit_code, rank.ended_by) == (code, EndedBy.LEASE)


async def test_ranks_end_with_their_lease_when_the_control_plane_is_away(node: Node) -> None:
    node.plane.lease_ttl_s = 1.0
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    node.plane.is_away = True
    await eventually(lambda: not node.processes(), 20)
    node.plane.is_away = False
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert rank.ended_by is EndedBy.LEASE


async def test_nothing_starts_on_a_lease_that_is_over(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    folder = RankFolder(tmp_path / "rank")
    launch = Launch(["touch", str(tmp_path / "ran")], {}, "/", 1.0)
    folder.launch(launch, shim.clock() - 0.1, 5.0).wait()
    ended = folder.exit()
    assert ended is not None
    assert ended.ended_by is EndedBy.LEASE
    assert not (tmp_path / "ran").exists()


async def test_only_one_shim_runs_a_rank(tmp_path: Path) -> None:
    (tmp_path / "rank").mkdir()
    folder = RankFolder(tmp_path / "rank")
    launch = Launch(["sh", "-c", f"echo ran >> {tmp_path}/runs; sleep 0.3"], {"PATH": "/usr/bin:/bin"}, "/", 1.0)
    shims = [folder.launch(launch, shim.clock() + 30, 30) for _ in range(5)]
    assert sorted(process.wait() for process in shims) == [0, *[shim.TWIN_STATUS] * 4]
    assert folder.launch(launch, shim.clock() + 30, 30).wait() == shim.TWIN_STATUS, "nor runs it again"
    assert (tmp_path / "runs").read_text() == "ran\n"


@pytest.mark.parametrize("code", ["import os; os.kill(os.getppid(), 15)", "import os; os.kill(os.getpid(), 15)"])
async def test_signals_from_elsewhere_end_the_rank(tmp_path: Path, code: str) -> None:
    (tmp_path / "rank").mkdir()
    folder = RankFolder(tmp_path / "rank")
    command = [sys.executable, "-I", "-c", code + "; import time; time.sleep(60)"]
    folder.launch(Launch(command, {}, "/", 1.0), shim.clock() + 30, 30).wait()
    ended = folder.exit()
    assert ended is not None
    assert ended.code == -signal.SIGTERM
    assert ended.ended_by is (EndedBy.HOST if "getppid" in code else EndedBy.ITSELF)


async def test_repeated_and_late_commands_change_nothing(node: Node) -> None:
    await node.start()
    newer = node.gang(*SLEEP, job="job_x", generation=3)
    older = node.gang(*SLEEP, job="job_x", generation=2)
    node.plane.named |= {newer.allocation_id, older.allocation_id}
    for command in (newer, newer, older, newer):
        await node.send(command)
    await eventually(lambda: node.plane.state(newer.allocation_id) == "running")
    await node.send(newer)
    await eventually(lambda: _pending(node) == 0)
    assert node.plane.states(older.allocation_id) == []
    await eventually(lambda: len(node.processes("shim")) == 1)  # what it forks has its name until it is the rank


async def test_a_gang_stopped_before_its_start_never_starts(node: Node) -> None:
    await node.start()
    gang = node.gang(*SLEEP)
    node.plane.named.add(gang.allocation_id)
    await node.send(StopGang(allocation_id=gang.allocation_id, grace_s=1, reason="test"))
    await eventually(lambda: node.plane.state(gang.allocation_id) == "exited")
    node.kill()
    await node.send(gang)
    await node.start()
    await eventually(lambda: _pending(node) == 0)
    rank = node.plane.rank(gang.allocation_id)
    assert rank is not None
    assert (rank.state, rank.ended_by, rank.started_at) == ("exited", EndedBy.STOP, None)


async def test_a_node_whose_token_is_refused_registers_again(node: Node) -> None:
    await node.start()
    node.plane.forget_tokens()
    heard = len(node.plane.heartbeats)
    await eventually(lambda: len(node.plane.heartbeats) > heard)
    assert len(node.plane.registrations) == 2
    registered = node.plane.registrations[-1]
    assert registered.driver == "simulated"
    assert [device.index for device in registered.devices] == [0, 1, 2, 3]
    assert registered.agent_url == f"http://127.0.0.1:{node.port}"


def _pending(node: Node) -> int:
    """Commands not carried out yet."""
    client = redis.Redis.from_url(node.environment["REDIS_URL"], decode_responses=True)
    return client.xlen(command_stream(node.id))


def _starts(node: Node, gang: str) -> int:
    folder = node.folder / "data" / "checkpoints" / gang.rpartition(".")[0]
    return len((folder / "starts").read_text().splitlines())
