"""An agent that only measures: it reports its GPUs and what they use, and does nothing else."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from gpu_agent.settings import AgentSettings
from services.contracts.nodes import NodeRegistration
from services.contracts.streams import command_stream
from tests.agent.conftest import Node, eventually
from tests.agent.stand_in import JOIN_TOKEN
from tests.agent.test_energy import assert_gapless, split_error
from tests.agent.test_ranks import SLEEP

MEASURES = {"GPU_AGENT_MEASURE_ONLY": "true", "GPU_AGENT_SIMULATED_GPUS": "2", "GPU_AGENT_STATIC_W": "80"}


async def test_it_reports_devices_and_their_energy_one_by_one_and_survives_being_killed(node: Node) -> None:
    await node.start(**MEASURES)
    await eventually(lambda: len(node.plane.intervals) >= 3)
    registration = node.plane.registrations[-1]
    assert registration.measures_only
    assert not any(
        each.can_set_clock or each.can_set_power_limit or each.can_partition for each in registration.devices
    )
    assert [len(beat.devices) for beat in node.plane.heartbeats[-1:]] == [2]
    node.kill()
    await node.start(**MEASURES)
    known = len(node.plane.intervals)
    await eventually(lambda: len(node.plane.intervals) >= known + 3)
    for interval in node.plane.intervals[1:]:
        assert [usage.devices for usage in interval.usages] == [[0], [1]]
        assert interval.usages[0].static_energy_j == pytest.approx(interval.usages[1].static_energy_j)
    assert split_error(node.plane) < 0.001
    assert_gapless(node.plane)


async def test_it_starts_nothing_and_makes_no_folders_for_jobs(node: Node) -> None:
    await node.start(**MEASURES)
    start = node.gang(*SLEEP)
    node.plane.named.add(start.allocation_id)
    await node.send(start)
    beats = len(node.plane.heartbeats)
    await eventually(lambda: len(node.plane.heartbeats) >= beats + 10)
    assert not node.plane.heartbeats[-1].ranks
    assert await node.redis.xlen(command_stream(node.id)) == 1, "nobody has read it"
    made = {path.name for path in node.state_dir.iterdir()}
    assert not made & {"allocations", "checkpoints", "homes", "sources", "generations", "controls.json"}


async def test_what_belongs_to_an_engine_is_delivered_when_the_engine_has_been_heard(node: Node) -> None:
    await node.start(**MEASURES, GPU_AGENT_ENGINE_NODE=f"slurm.{node.id}", GPU_AGENT_ENGINE_DELAY_S="2")
    await eventually(lambda: len(node.plane.intervals) >= 2)
    assert node.plane.registrations[-1].engine_node == f"slurm.{node.id}"
    _, _, body = await node.get("/v1/state")
    waiting = json.loads(body)["energy_intervals_waiting"]
    assert waiting >= 5, "two seconds of intervals of 0.2 s are kept back"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"engine_node": "slurm.gpu-2"}, "must be ENGINE.gpu-1"),
        ({"engine_node": "slurm.gpu-1", "measure_only": False}, "our jobs run on this node"),
        ({"zeusd": "/run/zeusd.sock"}, "sets clocks and limits"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], complaint: str) -> None:
    document = {"node_id": "gpu-1", "measure_only": True, "join_token": JOIN_TOKEN, **settings}
    with pytest.raises(ValidationError, match=complaint):
        AgentSettings.model_validate(document)


def test_a_node_speaks_for_its_own_host_alone() -> None:
    document = {"node_id": "gpu-1", "address": "", "agent_url": "", "devices": [], "driver": "nvml"}
    document |= {"host_power": "modelled", "measures_only": True}
    assert NodeRegistration.model_validate(document | {"engine_node": "slurm.gpu-1"}).engine_node == "slurm.gpu-1"
    with pytest.raises(ValidationError, match="its own host"):
        NodeRegistration.model_validate(document | {"engine_node": "slurm.gpu-2"})
