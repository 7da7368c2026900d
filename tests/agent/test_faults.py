"""What surrounds the agent fails: Redis forgets, the disk refuses, two agents want one folder, the host shuts down."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from gpu_agent.gangs import Gangs
from gpu_agent.inbox import Inbox
from services.contracts.commands import StopGang, command_document
from services.contracts.nodes import EndedBy
from services.contracts.streams import COMMAND_FIELD, command_stream
from services.kit.redis import connect
from services.kit.release import RELEASE
from tests.agent.conftest import Node, a_launcher, eventually, no_inputs
from tests.agent.stand_in import StandIn
from tests.agent.test_ranks import SAVING, SLEEP
from tests.support.ports import Ports
from tests.support.servers import running, scratch_folder, tcp_valkey, tcp_valkey_url


@pytest.fixture
async def node_on_own_valkey(tmp_path: Path, plane: StandIn) -> AsyncIterator[tuple[Node, Any]]:
    """A node whose Valkey a test may kill; yields it and the server's description."""
    ports = Ports()
    with scratch_folder() as folder:
        server = tcp_valkey(folder / "valkey", port := ports.take(27_500))
        redis = connect(url := tcp_valkey_url(port))
        node = Node(tmp_path, plane, redis, url, ports, 31_500)
        try:
            yield node, server
        finally:
            node.clear()
            await redis.aclose()
            ports.release()


async def test_commands_come_through_after_redis_was_killed(node_on_own_valkey: tuple[Node, Any]) -> None:
    node, server = node_on_own_valkey
    with running(server) as valkey_process:
        await node.start()
        first = await node.run(*SLEEP, devices=[0])
        await eventually(lambda: node.plane.state(first) == "running")
        valkey_process.kill()
        valkey_process.wait()
    await eventually(lambda: node.plane.state(first) == "running")
    with running(server):
        second = await node.run(*SLEEP, devices=[1])
        await eventually(lambda: node.plane.state(second) == "running")
        await node.redis.flushall()  # as a server without persistence would come back
        third = await node.run(*SLEEP, devices=[2])
        await eventually(lambda: node.plane.state(third) == "running")
        assert {rank.state for rank in node.plane.heartbeats[-1].ranks} == {"running"}


async def test_an_agent_starts_without_redis_and_without_a_control_plane(node_on_own_valkey: tuple[Node, Any]) -> None:
    node, server = node_on_own_valkey
    node.plane.is_away = True
    node._spawn(node.environment)
    while not await _answers(node, "/healthz"):
        assert node.process
        assert node.process.poll() is None
    assert (await node.get("/readyz"))[0] == 503
    node.plane.is_away = False
    await eventually(lambda: node.plane.heartbeats)
    with running(server):
        gang = await node.run("true")
        await eventually(lambda: node.plane.state(gang) == "exited")


async def test_a_command_that_cannot_be_written_down_comes_again(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis = connect(redis_url)
    node = f"full-disk-{os.getpid()}"
    gangs = Gangs(tmp_path, a_launcher(tmp_path), fetch=no_inputs)
    gangs.load()
    inbox = Inbox(redis, node, gangs, retry_s=0.02)
    failures = itertools.count()
    real = gangs.stop

    def full(command: StopGang) -> None:
        if next(failures) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(command)

    monkeypatch.setattr(gangs, "stop", full)
    reading = asyncio.create_task(inbox.run())
    command = StopGang(allocation_id="job_1.1", grace_s=1, reason="test")
    await redis.xadd(command_stream(node), {COMMAND_FIELD: command.model_dump_json()})
    await redis.xadd(command_stream(node), {COMMAND_FIELD: "no command at all"})
    await eventually(lambda: gangs.get("job_1.1"))
    while await redis.xlen(command_stream(node)):  # noqa: ASYNC110  the inbox says nothing when it is done
        await asyncio.sleep(0.01)
    reading.cancel()
    assert next(failures) == 4
    await redis.aclose()


async def test_a_command_of_a_newer_release_is_refused_by_the_names_of_its_fields(node: Node) -> None:
    await node.start()
    start = node.gang(*SLEEP)
    node.plane.named.add(start.allocation_id)
    await node.send(json.dumps({**command_document(start), "vault": "a"}))
    await node.send(json.dumps({"type": "reboot_gang", "allocation_id": "job_unknown.1"}))
    running = await node.run(*SLEEP)
    await node.send(json.dumps({**command_document(StopGang(allocation_id=running, grace_s=1, reason="x")), "how": 1}))

    await eventually(lambda: node.plane.state(start.allocation_id) == "exited")
    await eventually(lambda: node.plane.state(running) == "exited")

    refused, stopped = node.plane.rank(start.allocation_id), node.plane.rank(running)
    assert refused is not None
    assert stopped is not None
    assert (refused.ended_by, refused.started_at, stopped.ended_by) == (EndedBy.REFUSED, None, EndedBy.STOP)
    assert refused.detail == (
        f"the job needs vault, which the agent of this node does not know (release {RELEASE}): upgrade the agent"
    )
    assert node.plane.rank("job_unknown.1") is None


async def test_a_full_disk_neither_ends_the_agent_nor_the_lease(node: Node) -> None:
    node.state_dir.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(node.state_dir)):
        pytest.skip("mounting a small file system takes root")
    try:
        node.plane.lease_ttl_s = 3
        await node.start()
        gang = await node.run(*SLEEP)
        await eventually(lambda: node.plane.state(gang) == "running")
        _fill(node.state_dir / "ballast")
        heard = len(node.plane.heartbeats)
        await eventually(lambda: len(node.plane.heartbeats) > heard + 30)
        assert node.plane.state(gang) == "running", "leases are renewed in place"
        refused = await node.run("true", devices=[1])
        assert (await node.get("/readyz"))[0] == 503
        (node.state_dir / "ballast").unlink()
        await eventually(lambda: node.plane.state(refused) == "exited")
        node.plane.named.discard(gang)
        await eventually(lambda: node.plane.rank(gang) is None)
    finally:
        ranks = node.processes()
        node.clear()
        psutil.wait_procs(ranks, 60)
        assert _run("umount", "--lazy", str(node.state_dir))


async def test_what_a_job_prints_does_not_fill_the_disk(node: Node) -> None:
    node.state_dir.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", "size=400m", "none", str(node.state_dir)):
        pytest.skip("mounting a small file system takes root")
    try:
        await node.start(GPU_AGENT_JOB_OUTPUT_BYTES=str(2**40))
        quiet = await node.run("sh", "-c", "echo so far; exec sleep 600", devices=[1])
        loud = await node.run("sh", "-c", "trap '' TERM; while :; do head -c 1M /dev/zero; done", grace_s=30)
        await eventually(lambda: node.plane.state(loud) == "exited")
        rank = node.plane.rank(loud)
        assert rank is not None
        assert (rank.exit_code, rank.ended_by) == (-25, EndedBy.ITSELF)
        assert rank.detail is not None
        assert "of a disk on which" in rank.detail
        free = os.statvfs(node.state_dir).f_bavail * os.statvfs(node.state_dir).f_frsize
        assert free > 40 * 2**20, "the reserve is untouched, although the job ignores the signal and goes on"
        assert node.plane.state(quiet) == "running"

        _fill(node.state_dir / "ballast")
        await eventually(lambda: "nearly full" in (node.plane.heartbeats[-1].closed or ""))
        (node.state_dir / "ballast").unlink()
        await eventually(lambda: node.plane.heartbeats[-1].closed is None)
    finally:
        node.clear()
        assert _run("umount", "--lazy", str(node.state_dir))


async def test_how_a_job_ended_survives_a_full_disk_and_killed_agents(node: Node) -> None:
    node.state_dir.mkdir()
    if not _run("mount", "-t", "tmpfs", "-o", "size=1m", "none", str(node.state_dir)):
        pytest.skip("mounting a small file system takes root")
    try:
        await node.start()
        go = node.folder / "go"
        gang = await node.run("sh", "-c", "while [ ! -e $GO ]; do sleep 0.05; done", environment={"GO": str(go)})
        await eventually(lambda: node.plane.state(gang) == "running")
        _fill(node.state_dir / "ballast")
        node.kill()
        go.touch()  # it ends while no agent runs, and there is not a block left
        await eventually(lambda: (node.rank_dir(gang) / "exited").exists())
        await node.start()
        node.kill()
        await node.start()
        await eventually(lambda: node.plane.state(gang) == "exited")
        rank = node.plane.rank(gang)
        assert rank is not None
        assert (rank.exit_code, rank.ended_by) == (0, EndedBy.ITSELF)
        heard = len(node.plane.heartbeats)
        await eventually(lambda: len(node.plane.heartbeats) > heard + 5)
        assert node.plane.state(gang) == "exited", "it is said until the control plane has heard it"
    finally:
        node.clear()
        assert _run("umount", "--lazy", str(node.state_dir))


async def test_an_upgrade_leaves_the_ranks_running(node: Node) -> None:
    await node.start()
    gang = await node.run(*SLEEP)
    await eventually(lambda: node.plane.state(gang) == "running")
    before = {process.pid for process in node.processes()}
    await node.stop()
    await node.start()
    await eventually(lambda: node.plane.state(gang) == "running")
    await eventually(lambda: {process.pid for process in node.processes()} == before)  # a fork of the agent may pass


async def test_an_agent_may_take_its_ranks_with_it_and_says_so(node: Node) -> None:
    node.plane.heartbeat_interval_s = 10
    await node.start(GPU_AGENT_STOP_RANKS_ON_EXIT="true", GPU_AGENT_EXIT_GRACE_S="5")
    saving = await node.run(*SAVING, devices=[0], grace_s=120)
    waiting = node.gang(*SLEEP, devices=[0])
    node.plane.named.add(waiting.allocation_id)
    await node.send(waiting)
    stdout = node.rank_dir(saving) / "stdout"
    await eventually(lambda: stdout.exists() and "ready" in stdout.read_text())
    await eventually(lambda: node.plane.state(waiting.allocation_id) == "starting")
    await node.stop()
    rank = node.plane.rank(saving)
    assert rank is not None
    assert (rank.state, rank.exit_code, rank.ended_by) == ("exited", 7, EndedBy.AGENT)
    assert not node.processes()
    assert node.plane.gpu_energy_j(saving) > 0


async def test_two_agents_never_share_a_folder(node: Node) -> None:
    await node.start()
    assert not _run(sys.executable, "-c", _TAKE_FOLDER, str(node.state_dir))
    assert "another agent" in (node.folder / "refusal").read_text()


_TAKE_FOLDER = """
import sys, pathlib, gpu_agent.reporting as agent
agent._LOCK_PATIENCE_S = 0.2
folder = pathlib.Path(sys.argv[1])
try:
    agent._take_state_folder(folder)
except agent.StateFolderTakenError as error:
    (folder.parent / "refusal").write_text(str(error))
    sys.exit(1)
"""


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 512)


async def _answers(node: Node, path: str) -> bool:
    await asyncio.sleep(0.02)
    try:
        return (await node.get(path))[0] == 200
    except aiohttp.ClientError:
        return False
