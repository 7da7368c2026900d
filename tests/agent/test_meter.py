"""The meter's arithmetic, on devices and a host that a test makes up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest

from gpu_agent import meter
from gpu_agent.devices.driver import DeviceLostError, Sample
from gpu_agent.host_power import HostEnergy
from gpu_agent.meter import Meter
from gpu_agent.spool import Spool
from services.contracts.nodes import DeviceInfo, EnergyInterval, EnergySource
from services.core.accounting.meters import Fault
from services.core.domain.gpus import gpu_model
from services.kit.ids import utc_now
from tests.agent.conftest import gpus

TWO_GPUS = gpus(2)
V100S = [each.model_copy(update={"model": "V100"}) for each in TWO_GPUS]


class World:
    """Time, two devices of 100 W and 200 W, and a host of 60 W of which a CPU second costs 5 J."""

    name: Literal["nvml", "simulated"] = "nvml"
    source = EnergySource.MODELLED

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.at = utc_now()
        self.power_w = [100.0, 200.0]
        self.counter_j: list[float] = [0.0, 0.0]
        self.has_counter = True
        self.lost: set[int] = set()
        self.cpu_s: dict[str, float] = {}
        self.faults: tuple[Fault, ...] = ()

    def pass_time(self, seconds: float, *, set_clock_by_s: float = 0) -> None:
        self.now_s += seconds
        self.at += timedelta(seconds=seconds + set_clock_by_s)
        self.counter_j = [j + w * seconds for j, w in zip(self.counter_j, self.power_w, strict=True)]

    def read(self, index: int) -> Sample:
        if index in self.lost:
            raise DeviceLostError("gone")
        counter_j = self.counter_j[index] if self.has_counter else None
        return Sample(self.power_w[index], 0.5, 1_000, 1.0, counter_j)

    def advance(self, elapsed_s: float, ranks_cpu_s: float) -> HostEnergy:
        return HostEnergy(60 * elapsed_s + 5 * ranks_cpu_s, 5.0, self.faults)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose time the meter lives in."""
    made = World()
    monkeypatch.setattr(meter, "clock", lambda: made.now_s)
    monkeypatch.setattr(meter, "utc_now", lambda: made.at)
    monkeypatch.setattr(meter, "cpu_seconds", lambda _: dict(made.cpu_s))
    return made


async def a_meter(
    world: World,
    folder: Path,
    owners: dict[int, str] | None = None,
    ended: Any = None,
    devices: Sequence[DeviceInfo] = TWO_GPUS,
    busy: dict[str, float] | None = None,
) -> Meter:
    made: Any = world
    measuring = Meter(
        made,
        devices,
        made,
        Spool(folder),
        static_w=40,
        boot_id="b",
        shim_pids=lambda: {},
        progress_of=lambda _: 7.0,
        lock=asyncio.Lock(),
        activity_of=(busy or {}).get,
    )
    await measuring.begin(owners or {}, lambda _: ended)
    return measuring


def last(folder: Path) -> EnergyInterval:
    return Spool(folder).batch(1_000)[-1]


def energies(interval: EnergyInterval) -> dict[str | None, tuple[float, float, float]]:
    return {u.allocation_id: (u.gpu_energy_j, u.cpu_energy_j, u.static_energy_j) for u in interval.usages}


async def test_each_joule_has_one_owner(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    await measuring.switch({1: "a"})
    world.pass_time(10)
    world.cpu_s = {"a": 4.0}
    await measuring.close()
    interval = last(tmp_path)
    assert energies(interval) == {"a": (2_000, 20, 200), None: (1_000, 600, 200)}
    assert interval.metered_gpu_energy_j == 3_000
    assert [(u.devices, u.source, u.progress_done) for u in interval.usages] == [
        ([1], EnergySource.COUNTER, 7.0),
        ([0], EnergySource.COUNTER, None),
    ]


async def test_two_gangs_on_one_device_pay_for_it_together(world: World, tmp_path: Path) -> None:
    """What it draws idle in halves, the rest as busy as each is, also across a restart of the agent."""
    idle_j = 10 * gpu_model("V100").idle_w
    measuring = await a_meter(world, tmp_path, devices=V100S, busy={"a": 0.9, "b": 0.3})
    world.pass_time(1)
    await measuring.switch({1: "a"}, {1: "b"})
    world.pass_time(10)
    await a_meter(world, tmp_path, devices=V100S, busy={"a": 0.9, "b": 0.3})

    interval = last(tmp_path)

    assert energies(interval) == {
        "a": (pytest.approx(idle_j / 2 + (2_000 - idle_j) * 3 / 4), 0, 100),
        "b": (pytest.approx(idle_j / 2 + (2_000 - idle_j) / 4), 0, 100),
        None: (1_000, 600, 200),
    }
    assert sum(usage.gpu_energy_j for usage in interval.usages) == pytest.approx(interval.metered_gpu_energy_j)
    assert {usage.source for usage in interval.usages if usage.allocation_id} == {EnergySource.ESTIMATED}


async def test_two_gangs_of_unknown_load_pay_halves(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    await measuring.switch({1: "a"}, {1: "b"})
    world.pass_time(10)
    await measuring.switch({1: "b"})

    assert [energies(last(tmp_path))[name][0] for name in ("a", "b")] == [1_000, 1_000]


async def test_samples_belong_to_the_owner_of_their_time(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(3)
    await measuring.switch({0: "a", 1: "a"})
    assert energies(last(tmp_path))[None][0] == 900
    world.pass_time(2)
    await measuring.sample()
    world.pass_time(2)
    await measuring.switch({0: "b"})
    assert energies(last(tmp_path)) == {"a": (1_200, 0, 160), None: (0, 240, 0)}
    world.pass_time(1)
    await measuring.close()
    assert energies(last(tmp_path))["b"][0] == 100
    assert energies(last(tmp_path))[None][0] == 200


async def test_a_counter_that_starts_over_loses_nothing_it_shows(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(10)
    await measuring.close()
    world.counter_j = [0.0, 0.0]
    world.pass_time(5)
    await measuring.close()
    assert last(tmp_path).metered_gpu_energy_j == 1_500
    assert energies(last(tmp_path))[None][0] == 1_500


async def test_without_counters_samples_are_integrated(world: World, tmp_path: Path) -> None:
    world.has_counter = False
    measuring = await a_meter(world, tmp_path)
    world.pass_time(10)
    world.power_w = [300.0, 200.0]
    await measuring.close()
    assert energies(last(tmp_path))[None][0] == 200 * 10 + 200 * 10
    assert last(tmp_path).usages[0].source is EnergySource.SAMPLED
    assert last(tmp_path).metered_gpu_energy_j == 4_000
    world.pass_time(1_000)
    await measuring.close()
    assert last(tmp_path).usages[0].source is EnergySource.MODELLED, "nobody looked for a quarter of an hour"


async def test_a_lost_device_costs_its_reading_and_nothing_else(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path, {0: "a", 1: "a"})
    world.lost = {0}
    world.pass_time(10)
    await measuring.close()
    assert energies(last(tmp_path))["a"][0] == 2_000
    assert [reading.index for reading in measuring.readings()] == [1]
    world.lost = set()
    world.pass_time(1)
    await measuring.close()
    assert energies(last(tmp_path))["a"][0] == 100 * 11 + 200, "its counter has gone on"


async def test_the_time_without_an_agent_belongs_to_what_ran(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(1)
    await measuring.switch({0: "a"})
    world.pass_time(60)
    await a_meter(world, tmp_path, {0: "a"})
    interval = last(tmp_path)
    assert energies(interval)["a"] == (6_000, 0, 1_200)
    assert energies(interval)[None] == (12_000, 3_600, 1_200)
    assert (interval.end_at - interval.start_at).total_seconds() == pytest.approx(60)


async def test_a_rank_that_ended_meanwhile_pays_until_its_end(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(1)
    await measuring.switch({1: "a"})
    ended_at = world.at + timedelta(seconds=15)
    world.pass_time(60)
    await a_meter(world, tmp_path, {}, ended_at)
    interval = last(tmp_path)
    assert energies(interval)["a"][0] == pytest.approx(200 * 15)
    assert energies(interval)["a"][2] == pytest.approx(40 * 60 / 2 / 4)
    assert energies(interval)[None][0] == pytest.approx(100 * 60 + 200 * 45)
    assert interval.usages[0].source is EnergySource.MODELLED
    assert interval.metered_gpu_energy_j == pytest.approx(300 * 60)


async def test_a_rank_that_ended_while_its_agent_stood_still_pays_until_its_end(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path, ended=world.at + timedelta(seconds=17))
    world.pass_time(1)
    await measuring.switch({1: "a"})
    world.pass_time(1)
    await measuring.sample()
    world.pass_time(60)
    await measuring.sample()
    world.pass_time(1)
    await measuring.switch({})
    intervals = Spool(tmp_path).batch(1_000)
    paid = [each.gpu_energy_j for interval in intervals for each in interval.usages if each.allocation_id == "a"]
    assert paid[:2] == [pytest.approx(200), pytest.approx(200 * 15)]
    assert sum(paid[2:]) == pytest.approx(200), "what is sampled before the agent has seen the end"
    assert sum(interval.metered_gpu_energy_j for interval in intervals) == pytest.approx(300 * 63)


@pytest.mark.parametrize("step_s", [-3_600, -20, 20, 3_600])
async def test_nobody_pays_for_time_after_an_end_though_the_clock_was_set(
    world: World, tmp_path: Path, step_s: float
) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(1)
    await measuring.switch({1: "a"})
    ended_at = world.at + timedelta(seconds=15)
    world.pass_time(60, set_clock_by_s=step_s)
    await a_meter(world, tmp_path, {}, ended_at)
    interval = last(tmp_path)
    (usage,) = (each for each in interval.usages if each.allocation_id == "a")
    its_s = (min(ended_at, interval.end_at) - interval.start_at).total_seconds()
    assert usage.gpu_energy_j == pytest.approx(200 * max(its_s, 0.0))
    assert energies(interval)[None][0] == pytest.approx(300 * 60 - usage.gpu_energy_j)


async def test_a_restart_of_the_host_is_a_new_start(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(1)
    await measuring.switch({1: "a"})
    intervals = len(Spool(tmp_path))
    monkeypatch.setattr(meter, "kernel_boot", lambda: "another")
    world.pass_time(3_600)
    world.now_s = 5.0
    await a_meter(world, tmp_path)
    assert len(Spool(tmp_path)) == intervals, "what happened meanwhile is not known"


UNREADABLE = {
    "devices": [{TWO_GPUS[1].uuid: []}, {TWO_GPUS[1].uuid: [1.0, "much", 0.0]}, [], None],
    "owners": [{"first": "a"}, [], None],
    "guests": [{"first": "a"}, 3],
    "cpu_s": [{"a": "long"}, [], None],
    "host": [[]],
    "clock": ["noon", None],
    "at": ["noon", None],
}


@pytest.mark.parametrize(("field", "value"), [(key, value) for key, values in UNREADABLE.items() for value in values])
async def test_what_cannot_be_read_of_an_earlier_agent_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any
) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(1)
    await measuring.switch({1: "a"}, {1: "b"})
    known = Spool(tmp_path).state
    assert known is not None
    monkeypatch.setattr(world, "restore", lambda state: state.get("busy_s"))
    host: Any = world
    made = Meter(
        host,
        TWO_GPUS,
        host,
        Spool(tmp_path),
        static_w=40,
        boot_id="b",
        shim_pids=dict,
        progress_of=lambda _: 0,
        lock=asyncio.Lock(),
        activity_of=lambda _: None,
    )
    before, fresh = made._state(), [replace(each) for each in made._devices]
    assert not made._resume(known | {field: value})
    assert (made._state(), made._devices) == (before, fresh)
    assert made._resume(known)
    assert made._owners == {1: "a"}


@pytest.mark.parametrize("step_s", [3_600, -3_600, 0.4, -0.4])
async def test_a_clock_that_is_set_moves_the_interval_and_not_its_length(
    world: World, tmp_path: Path, step_s: float
) -> None:
    measuring = await a_meter(world, tmp_path)
    world.pass_time(10)
    await measuring.close()
    world.pass_time(10, set_clock_by_s=step_s)
    await measuring.close()
    interval = last(tmp_path)
    assert interval.end_at == world.at
    assert (interval.end_at - interval.start_at).total_seconds() == pytest.approx(10, abs=0.5)
