"""The meter on a GPU that is cut: one counter, several owners."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from gpu_agent.devices.driver import DeviceLostError, SliceSample
from gpu_agent.meter import Meter
from services.contracts.nodes import DeviceInfo, EnergyInterval, EnergySource
from services.core.domain.mig import SlicePlace, placed, slice_index
from tests.agent import test_meter
from tests.agent.test_meter import World, energies, last, world

__all__ = ["world"]

MODEL = "A100-SXM4-40GB"
IDLE_W = 55.0
FOUR, THREE = slice_index(0, 0), slice_index(0, 4)


class CutWorld(World):
    """A first GPU in two slices and a second one that is whole; `activity` is what their slices report."""

    activity: dict[int, float | None]

    def read_slice(self, index: int) -> SliceSample:
        if index not in self.activity:
            raise DeviceLostError("gone")
        return SliceSample(self.activity[index], 5.0)


def devices(*places: SlicePlace) -> list[DeviceInfo]:
    gpus = [
        DeviceInfo(
            index=index,
            uuid=f"GPU-{index}",
            model=MODEL,
            memory_gib=40,
            power_limit_w=400,
            mig_enabled=index == 0 and bool(places),
        )
        for index in (0, 1)
    ]
    slices = [
        DeviceInfo(
            index=slice_index(0, place.start),
            uuid=f"MIG-{place}",
            parent=0,
            sevenths=place.sevenths,
            start=place.start,
            model=MODEL,
            memory_gib=20,
            power_limit_w=400,
        )
        for place in places
    ]
    return gpus + slices


@pytest.fixture
def cut(world: World) -> CutWorld:
    """The world with its first GPU cut into a 4g and a 3g."""
    made = CutWorld.__new__(CutWorld)
    made.__dict__ = world.__dict__  # the meter's clock is the world's
    made.activity = {FOUR: 0.5, THREE: 1.0}
    return made


async def a_meter(cut: CutWorld, folder: Path, owners: dict[int, str] | None = None, ended: object = None) -> Meter:
    return await test_meter.a_meter(cut, folder, owners, ended, devices(*placed([4, 3])))


def sources(interval: EnergyInterval) -> dict[str | None, tuple[EnergySource, list[int]]]:
    return {usage.allocation_id: (usage.source, usage.devices) for usage in interval.usages}


async def test_activity_splits_a_gpu_between_its_slices(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    await measuring.switch({FOUR: "a", THREE: "b"})
    cut.pass_time(10)
    await measuring.close()
    interval = last(tmp_path)
    above_w = 100 - IDLE_W
    assert energies(interval) == {
        "a": (pytest.approx(10 * (IDLE_W * 4 / 7 + above_w * 2 / 5)), 0, pytest.approx(400 / 2 * 4 / 7)),
        "b": (pytest.approx(10 * (IDLE_W * 3 / 7 + above_w * 3 / 5)), 0, pytest.approx(400 / 2 * 3 / 7)),
        None: (2_000, 600, pytest.approx(200)),
    }
    assert sources(interval) == {
        "a": (EnergySource.ESTIMATED, [FOUR]),
        "b": (EnergySource.ESTIMATED, [THREE]),
        None: (EnergySource.COUNTER, [1]),
    }
    assert interval.metered_gpu_energy_j == 3_000


async def test_a_slice_that_nobody_holds_is_idle_energy(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    await measuring.switch({THREE: "b"})
    cut.pass_time(10)
    await measuring.close()
    found = energies(last(tmp_path))
    assert found["b"][0] == pytest.approx(10 * (IDLE_W * 3 / 7 + 100 - IDLE_W))
    assert found[None][0] == pytest.approx(10 * (IDLE_W * 4 / 7 + 200))
    assert sources(last(tmp_path))[None] == (EnergySource.ESTIMATED, [1, FOUR])


async def test_a_cut_gpu_that_nobody_uses_is_measured(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    cut.pass_time(10)
    await measuring.close()
    assert energies(last(tmp_path)) == {None: (pytest.approx(3_000), 600, 400)}
    assert sources(last(tmp_path)) == {None: (EnergySource.COUNTER, [1, FOUR, THREE])}


@pytest.mark.parametrize("activity", [{}, {FOUR: None, THREE: 1.0}])
async def test_without_a_measure_size_splits(cut: CutWorld, tmp_path: Path, activity: dict[int, float | None]) -> None:
    cut.activity = activity
    measuring = await a_meter(cut, tmp_path)
    await measuring.switch({FOUR: "a", THREE: "b"})
    cut.pass_time(10)
    await measuring.close()
    found = energies(last(tmp_path))
    assert [found[name][0] for name in "ab"] == pytest.approx([1_000 * 4 / 7, 1_000 * 3 / 7])


async def test_owners_of_slices_survive_the_agent(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    cut.pass_time(1)
    await measuring.switch({FOUR: "a", THREE: "b"})
    ended_at = cut.at + timedelta(seconds=15)
    cut.pass_time(60)
    await a_meter(cut, tmp_path, {}, ended_at)
    interval = last(tmp_path)
    found = energies(interval)
    assert found["a"][0] + found["b"][0] == pytest.approx(100 * 15)
    assert found[None][0] == pytest.approx(200 * 60 + 100 * 45)
    assert interval.usages[0].source is EnergySource.MODELLED


async def test_the_readings_of_slices_are_shares_of_their_gpu(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    await measuring.switch({FOUR: "a", THREE: "b"})
    cut.pass_time(10)
    await measuring.sample()
    found = {reading.index: reading for reading in measuring.readings()}
    assert list(found) == [0, FOUR, THREE, 1]
    assert found[FOUR].power_w + found[THREE].power_w == pytest.approx(found[0].power_w)
    assert (found[FOUR].utilization, found[FOUR].memory_used_gib, found[FOUR].clock_mhz) == (0.5, 5.0, 1_000)
    assert (found[0].energy_j, found[FOUR].energy_j) == (1_000, None)
    assert measuring.energy_j([FOUR, THREE], cut.now_s + 1) == pytest.approx(1_100)


async def test_other_slices_begin_with_an_interval_of_their_own(cut: CutWorld, tmp_path: Path) -> None:
    measuring = await a_meter(cut, tmp_path)
    await measuring.switch({1: "c"})
    cut.pass_time(10)
    await measuring.recut(devices(SlicePlace(7, 0)))
    await measuring.switch({FOUR: "a", 1: "c"})
    cut.activity = {FOUR: 0.1}
    cut.pass_time(5)
    await measuring.close()
    assert energies(last(tmp_path))["a"][0] == pytest.approx(500), "the 7g, which begins where the 4g did"
    assert energies(last(tmp_path))["c"][0] == 1_000
    await measuring.recut(devices())
    await measuring.switch({0: "a"})
    cut.pass_time(2)
    await measuring.close()
    assert energies(last(tmp_path))["a"][0] == 200
    assert sources(last(tmp_path))["a"] == (EnergySource.COUNTER, [0])
