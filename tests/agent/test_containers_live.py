"""A job's image through an engine's client: a script stands for the client and notes how it is called."""

from __future__ import annotations

from services.contracts.commands import StopGang
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually

CLIENT = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" = run ] || exit 0
while [ "$1" != --env-file ]; do shift; done
cat "$2"
trap 'exit 143' TERM
while :; do sleep 0.05; done
"""


async def test_an_image_runs_in_the_foreground_and_its_container_is_removed(node: Node) -> None:
    calls, client = node.folder / "calls", node.folder / "bin" / "docker"
    client.parent.mkdir()
    client.write_text(CLIENT.format(calls=calls))
    client.chmod(0o755)
    path = f"{client.parent}:{node.environment['PATH']}"
    await node.start(GPU_AGENT_CONTAINERS="auto", PATH=path)
    assert node.plane.registrations[-1].containers
    gang = await node.run("train", image="example.org/t:1", environment={"PATH": "/in/the/image", "A": "1"})
    stdout = node.rank_dir(gang) / "stdout"
    await eventually(lambda: stdout.exists() and "WORLD_SIZE=1\n" in stdout.read_text())
    assert "A=1\n" in stdout.read_text()
    assert "PATH=/in/the/image\n" in stdout.read_text()
    await node.send(StopGang(allocation_id=gang, grace_s=10, reason="test"))
    await eventually(lambda: node.plane.state(gang) == "exited")
    rank = node.plane.rank(gang)
    assert rank is not None
    assert (rank.exit_code, rank.ended_by) == (143, EndedBy.STOP)
    probe, run, remove = calls.read_text().splitlines()
    assert probe == "info"
    assert run.startswith(f"run --rm --init --name wattshift-{gang}-0 ")
    assert run.endswith(" example.org/t:1 train")
    assert remove == f"rm --force wattshift-{gang}-0"
