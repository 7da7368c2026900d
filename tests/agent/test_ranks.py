"""A gang's life on one node: started once named, reported, ended."""

from __future__ import annotations

import sys

from services.contracts.commands import StopGang
from services.contracts.nodes import EndedBy
from tests.agent.conftest import Node, eventually


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
    await eventually(lambda: node.plane.state(gang.allocation_id) == "starting")
    node.plane.heartbeats.clear()
    await eventually(lambda: len(node.plane.heartbeats) > 3)
    assert node.plane.rank(gang.allocation_id) is None
    assert not (node.rank_dir(gang.allocation_id) / "stdout").exists()
