"""Sick GPUs: what counts, for how long, and how they come back."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_agent import processes
from gpu_agent.agent import Agent
from gpu_agent.devices.driver import DeadDevice, DeviceError, DeviceEvent, DeviceLostError, Health
from gpu_agent.devices.simulated import SimulatedDriver
from gpu_agent.health import GpuHealth
from gpu_agent.reporting import ReportingAgent
from gpu_agent.settings import AgentSettings
from services.contracts.nodes import GpuFault, GpuFaultCause
from tests.agent.conftest import Node, eventually

RULES: dict[str, Any] = {
    "health_xids": [79],
    "health_allowed_processes": [],
    "health_lasts_s": 10,
    "health_return_s": 60,
    "health_probe_timeout_s": 10,
}
WELL = Health(temperature_c=50, slowdown_c=90, too_hot=False, uncorrected_errors=0, pids=())


@dataclass
class Gpus:
    """Three GPUs, and what a test says of them."""

    said: dict[int, Health | DeviceError] = field(default_factory=dict[int, "Health | DeviceError"])
    xids: list[DeviceEvent] = field(default_factory=list[DeviceEvent])
    gone: list[DeadDevice] = field(default_factory=list[DeadDevice])


class SickDriver(SimulatedDriver):
    """A driver that says what a test wants it to."""

    def __init__(self, folder: Path, gpus: Gpus) -> None:
        super().__init__("L4", 3, lambda _: 0.0, folder / "simulated.json", "n")
        self._said = gpus

    def health(self, index: int) -> Health:
        said = self._said.said.get(index, WELL)
        if isinstance(said, DeviceError):
            raise said
        return said

    def events(self) -> list[DeviceEvent]:
        found, self._said.xids = self._said.xids, []
        return found

    def dead(self) -> list[DeadDevice]:
        return self._said.gone


def a_watch(folder: Path, gpus: Gpus, shims: tuple[int, ...] = (), **rules: object) -> GpuHealth:
    chosen = RULES | {f"health_{name}": value for name, value in rules.items()}
    return GpuHealth(SickDriver(folder, gpus), AgentSettings(state_dir=folder, **chosen), lambda: shims)


def causes(health: GpuHealth) -> dict[int, str]:
    return {fault.gpu: fault.cause.value for fault in health.faults()}


def test_a_lost_gpu_counts_at_once_and_recovers_after_a_while(tmp_path: Path) -> None:
    gpus = Gpus({1: DeviceLostError("GPU is lost")})
    health = a_watch(tmp_path, gpus)
    assert health.look(0)
    (fault,) = health.faults()
    assert (fault.gpu, fault.cause, fault.ends_gangs, fault.lasts) == (1, GpuFaultCause.LOST, True, True)
    assert not health.look(1)
    gpus.said = {}
    assert health.look(2)
    assert not health.faults()[0].lasts
    health.look(61)
    assert causes(health) == {1: "lost"}
    health.look(62)
    assert causes(health) == {}


def test_a_gpu_that_does_not_answer_once_is_not_lost(tmp_path: Path) -> None:
    gpus = Gpus({1: DeviceError("Unknown Error")})
    health = a_watch(tmp_path, gpus)
    for at in (0, 2):
        health.look(at)
        assert causes(health) == {}
    health.look(4)
    assert causes(health) == {1: "lost"}


def test_heat_has_to_last_and_does_not_end_gangs(tmp_path: Path) -> None:
    gpus = Gpus(
        {0: replace(WELL, temperature_c=91), 1: replace(WELL, too_hot=True), 2: replace(WELL, temperature_c=89)}
    )
    health = a_watch(tmp_path, gpus)
    health.look(0)
    health.look(9)
    assert causes(health) == {}
    health.look(10)
    assert causes(health) == {0: "temperature", 1: "temperature"}
    assert not any(fault.ends_gangs for fault in health.faults())
    strict = a_watch(tmp_path, gpus, temperature_c=80, lasts_s=0)
    strict.look(0)
    assert causes(strict) == {0: "temperature", 1: "temperature", 2: "temperature"}


@pytest.mark.parametrize("shown", [math.nan, -1e6, 1e6])
def test_a_temperature_that_no_gpu_has_is_none(tmp_path: Path, shown: float) -> None:
    gpus = Gpus({0: replace(WELL, temperature_c=shown)})
    health = a_watch(tmp_path, gpus)
    for now_s in (0, 20):
        health.look(now_s)
    assert (health.temperatures_c[0], health.temperatures_c[1], health.faults()) == (None, 50, [])


def test_events_stay_until_an_operator_returns_the_gpu_also_when_the_agent_restarts(tmp_path: Path) -> None:
    gpus = Gpus({2: replace(WELL, uncorrected_errors=3)}, [DeviceEvent(0, 79), DeviceEvent(1, 13)])
    health = a_watch(tmp_path, gpus)
    health.look(0)
    assert causes(health) == {0: "xid", 2: "ecc"}, "Xid 13 is an error of a program"
    health.look(1_000)
    again = a_watch(tmp_path, gpus)
    assert again.faults() == health.faults()
    again.returned([fault.id for fault in again.faults()])
    again.look(1_001)
    assert causes(again) == {}, "the three errors are known"
    gpus.said = {2: replace(WELL, uncorrected_errors=4)}
    assert causes(a_watch(tmp_path, gpus)) == {}
    again.look(1_002)
    assert [fault.detail for fault in again.faults()] == ["Its memory has had 1 error that could not be corrected."]


def test_events_are_over_when_the_host_has_booted(tmp_path: Path) -> None:
    gpus = Gpus(xids=[DeviceEvent(0, 79)])
    a_watch(tmp_path, gpus).look(0)
    kept = json.loads((tmp_path / "health.json").read_text())
    (tmp_path / "health.json").write_text(json.dumps(kept | {"kernel_boot": "another"}))
    assert a_watch(tmp_path, gpus).faults() == []


def test_a_dead_card_keeps_the_name_that_it_had(tmp_path: Path) -> None:
    gpus = Gpus()
    before = a_watch(tmp_path, gpus)
    before.look(0)
    gpus.gone = [DeadDevice(7, "", "GPU is lost"), DeadDevice(2, "", "GPU is lost")]
    health = a_watch(tmp_path, gpus)
    health.look(0)
    uuid = SickDriver(tmp_path, gpus).devices()[2].uuid
    assert [(fault.gpu, fault.uuid) for fault in health.faults()] == [(2, uuid), (7, "unknown-7")]


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process of nobody's job."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


def test_processes_that_belong_to_no_job_are_seen(tmp_path: Path, stranger: int) -> None:
    gpus = Gpus({0: replace(WELL, pids=(stranger, 2**22 + 1))})
    for shims, rules, found in (
        ((), {}, {0: "foreign_process"}),
        ((stranger,), {}, {}),
        ((os.getpid(),), {}, {}),  # its parent
        ((), {"allowed_processes": ["sleep"]}, {}),
        ((), {"foreign": "off"}, {}),
    ):
        health = a_watch(tmp_path, gpus, shims, lasts_s=0, **rules)
        health.look(0)
        assert causes(health) == found
    gpus.said = {0: replace(WELL, pids=(2**22 + 1,))}
    health = a_watch(tmp_path, gpus, lasts_s=0)
    health.look(0)
    assert causes(health) == {}, "a process that is not to be seen from here is nobody's"


async def test_with_a_probe_gpus_return_when_it_passes(tmp_path: Path) -> None:
    gpus = Gpus({1: DeviceLostError("GPU is lost")}, [DeviceEvent(0, 79)])
    verdict = tmp_path / "verdict"
    probe = ["sh", "-c", f"echo checking {{gpu}} {{uuid}}; echo it is broken; test -e {verdict}"]
    health = a_watch(tmp_path, gpus, probe=probe)
    health.look(0)
    assert health.due_probes(59) == []
    (fault,) = health.due_probes(119)
    assert fault.gpu == 0, "the other one is lost still"
    await health.probe(fault, 119)
    assert health.faults()[0].detail == "Its driver reported Xid 79. Its probe failed: it is broken"
    assert health.due_probes(178) == []
    verdict.touch()
    await health.probe(health.due_probes(179)[0], 179)
    assert causes(health) == {1: "lost"}
    health.look(1_000)
    gpus.said = {}
    health.look(1_001)
    health.look(2_000)
    assert causes(health) == {1: "lost"}, "its probe has not passed"


async def test_a_slow_probe_of_one_gpu_keeps_no_other_from_its_own(tmp_path: Path) -> None:
    health = a_watch(tmp_path, Gpus({}, [DeviceEvent(gpu, 79) for gpu in range(3)]), probe=["true"], return_s=0)
    health.look(0)
    assert sorted(causes(health)) == [0, 1, 2]
    both, probed = asyncio.Barrier(2), list[int]()

    async def slow(fault: GpuFault, _: float) -> None:
        async with asyncio.timeout(60):
            await both.wait()
        probed.append(fault.gpu)

    agent: Any = SimpleNamespace(health=health, _is_held=lambda gpu: gpu == 1)
    health.probe = slow
    await ReportingAgent._probe_due(agent)
    assert sorted(probed) == [0, 2], "what a gang holds is not probed"


async def test_a_rank_that_fails_with_its_gpu_is_reported_with_the_fault(node: Node) -> None:
    await node.start(GPU_AGENT_HEALTH_INTERVAL_S="600", GPU_AGENT_HEALTH_RETURN_S="0")
    go = node.folder / "go"
    gang = await node.run("sh", "-c", "while [ ! -e $GO ]; do sleep 0.05; done; exit 1", environment={"GO": str(go)})
    await eventually(lambda: node.plane.state(gang) == "running")
    (node.state_dir / "simulated_health.json").write_text('{"0": {"lost": true}}')
    go.touch()
    await eventually(lambda: node.plane.state(gang) == "exited")
    first = next(beat for beat in node.plane.heartbeats if any(rank.state == "exited" for rank in beat.ranks))
    assert [(fault.gpu, fault.cause) for fault in first.gpu_faults or []] == [(0, GpuFaultCause.LOST)]


async def test_a_look_that_cannot_begin_is_left_to_the_next() -> None:
    async def fails() -> bool:
        raise RuntimeError("can't start new thread")

    agent: Any = Agent.__new__(Agent)
    agent.settings, agent._failed, agent._look_at_health = SimpleNamespace(health="on"), set(), fails
    agent.gangs, agent._looks = [SimpleNamespace(allocation_id="a", is_over=True, exit_code=1)], set()
    await agent._look_after_failures()
    await agent._look_once()  # whose own failure nobody would see


async def test_the_gpus_of_a_node_with_a_lost_one_are_named_by_uuid(node: Node) -> None:
    await node.start(GPU_AGENT_HEALTH_INTERVAL_S="0.1")
    uuids = {device.index: device.uuid for device in node.plane.registrations[-1].devices}
    shown = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    before = await node.run(*shown, devices=[1, 2])
    await eventually(lambda: node.plane.state(before) == "exited")
    (node.state_dir / "simulated_health.json").write_text('{"0": {"lost": true}}')
    await eventually(lambda: node.plane.heartbeats[-1].gpu_faults)
    after = await node.run(*shown, devices=[1, 2])
    await eventually(lambda: node.plane.state(after) == "exited")
    printed = [(node.rank_dir(gang) / "stdout").read_text().strip() for gang in (before, after)]
    assert printed == ["1,2", f"{uuids[1]},{uuids[2]}"], "CUDA leaves the lost one out, and numbers the others anew"


async def test_other_braces_in_a_probe_are_its_own(tmp_path: Path) -> None:
    gpus = Gpus({}, [DeviceEvent(0, 79)])
    health = a_watch(tmp_path, gpus, probe=["sh", "-c", "echo {gpu} | awk '{ exit $1 }'"])
    health.look(0)
    (fault,) = health.faults()
    await health.probe(fault, 60)
    assert causes(health) == {}


async def test_nothing_of_a_probe_is_left_if_it_is_cancelled_or_takes_too_long(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    probe = ["sh", "-c", f"sleep 300 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"]
    for is_cancelled, timeout_s in ((True, 300), (False, 1)):
        health = a_watch(tmp_path, Gpus({}, [DeviceEvent(0, 79)]), probe=probe, probe_timeout_s=timeout_s)
        health.look(0)
        (fault,) = health.faults()
        probing = asyncio.create_task(health.probe(fault, 60))
        if is_cancelled:
            await eventually(pids.exists)
            probing.cancel()
        await asyncio.wait([probing])
        while not pids.exists():  # a busy machine took longer than the probe may
            await health.probe(fault, 60)
        started = pids.read_text().split()
        pids.unlink()
        await eventually(lambda started=started: not any(Path(f"/proc/{pid}/exe").exists() for pid in started))


async def test_a_probe_that_cannot_be_killed_does_not_end_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_KILL_S", 0.1, raising=False)
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: killed.append(pid))  # as if it waited for its device
    monkeypatch.setattr(asyncio.subprocess.Process, "kill", lambda _: None)
    gpus = Gpus({}, [DeviceEvent(0, 79)])
    health = a_watch(tmp_path, gpus, probe=["sleep", "5"], probe_timeout_s=0.1)
    health.look(0)
    (fault,) = health.faults()
    async with asyncio.timeout(3):
        await health.probe(fault, 60)
    assert health.faults()[0].detail.endswith("Its probe failed: it took longer than 0.1 s")
    os.kill(killed[0], signal.SIGKILL)
    await eventually(lambda: not Path(f"/proc/{killed[0]}").exists())


async def test_a_probe_that_prints_without_end_does_not_fill_the_agents_memory(tmp_path: Path) -> None:
    talk = "head -c 50000000 /dev/zero | tr '\\0' x; echo; echo it is broken; exit 1"
    health = a_watch(tmp_path, Gpus({}, [DeviceEvent(0, 79)]), probe=["sh", "-c", talk])
    health.look(0)
    (fault,) = health.faults()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await health.probe(fault, 60)
    assert health.faults()[0].detail.endswith("Its probe failed: it is broken")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000
