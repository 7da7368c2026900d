"""Every kind of meter books what its hardware can have used, each second once, whatever it shows."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_agent import host_power, meter
from gpu_agent.devices.driver import Sample, SliceSample
from gpu_agent.host_power import RaplPower
from gpu_agent.meter import FAULTS
from gpu_agent.spool import Spool
from services.contracts.nodes import Basis, EnergyInterval, EnergySource
from services.core.accounting.host_power import CpuPowerModel
from services.core.domain.mig import SlicePlace
from tests.agent import test_meter_slices
from tests.agent.conftest import gpus
from tests.agent.test_meter import World, a_meter, last, world

__all__ = ["world"]

FAULTY = ("", "", "", "zero", "spike", "reset", "jump", "power", "none", "nan", "duplicate", "clock", "off")
STREAMS = st.lists(st.tuples(st.floats(0.5, 5), st.sampled_from(FAULTY)), min_size=1, max_size=12)
WATTS, MOST_W = 300.0, 2 * 1.2 * 300.0
"""Of the two GPUs of the world together."""


class FaultyWorld(World):
    """A world whose first GPU shows something else at times."""

    def __init__(self) -> None:
        super().__init__()
        self.counter_j = [50_000.0, 70_000.0]
        self.once: Callable[[Sample], Sample] | None = None

    def read(self, index: int) -> Sample:
        sample = super().read(index)
        wrong = self.once(sample) if self.once and index == 0 else sample
        return wrong if self.has_counter else replace(wrong, energy_j=None)

    def read_slice(self, index: int) -> SliceSample:
        return SliceSample(0.5, 1.0)

    def meet(self, event: str) -> None:
        """Have something happen to the first GPU, if that is said, at the next reading."""
        wrong: dict[str, Callable[[Sample], Sample]] = {
            "zero": lambda sample: replace(sample, energy_j=0.0),
            "spike": lambda sample: replace(sample, energy_j=9e6),
            "power": lambda sample: replace(sample, power_w=1e6),
            "off": lambda sample: replace(sample, power_w=0.0),
            "none": lambda sample: replace(sample, energy_j=None),
            "nan": lambda sample: replace(sample, energy_j=math.nan, power_w=math.nan),
        }
        self.once = wrong.get(event)
        if event == "reset":
            self.counter_j[0] = 0.0
        elif event == "jump":
            self.counter_j[0] += 4.29e6


def lines(folder: Path) -> list[EnergyInterval]:
    return Spool(folder).batch(10_000)


def kinds() -> dict[str, tuple[dict[int, str], dict[int, str], bool, bool]]:
    """Return the owners, the guests, whether there is a counter, and whether the first GPU is cut, by kind of meter."""
    slices = {test_meter_slices.FOUR: "a", test_meter_slices.THREE: "b"}
    return {
        "counter": ({0: "a"}, {}, True, False),
        "sampled": ({0: "a"}, {}, False, False),
        "shared": ({0: "a"}, {0: "b"}, True, False),
        "slices": (slices, {}, True, True),
    }


@pytest.mark.parametrize("kind", kinds())
@settings(max_examples=40, deadline=None)
@given(first=st.sampled_from(FAULTY), steps=STREAMS)
async def test_each_second_of_gpus_is_booked_once(kind: str, first: str, steps: list[tuple[float, str]]) -> None:
    owners, guests, has_counter, is_cut = kinds()[kind]
    made, began = FaultyWorld(), 0.0
    made.meet(first)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter, "clock", lambda: made.now_s)
        patch.setattr(meter, "utc_now", lambda: made.at)
        patch.setattr(meter, "cpu_seconds", lambda _: dict[str, float]())
        made.has_counter = has_counter
        devices = gpus(2)
        if is_cut:
            places = test_meter_slices.devices(SlicePlace(4, 0), SlicePlace(3, 4))
            devices = [each.model_copy(update={"power_limit_w": 300.0, "model": "X"}) for each in places]
        measuring = await a_meter(made, Path(name), devices=devices)
        began = made.now_s
        await measuring.switch(owners, guests)
        for seconds, event in [*steps, (1.0, ""), (1.0, "")]:
            made.meet(event)
            made.pass_time(0.0 if event == "duplicate" else seconds, set_clock_by_s=-5.0 if event == "clock" else 0.0)
            await measuring.close()
        booked = lines(Path(name))

    elapsed_s = made.now_s - began
    total_j = sum(usage.gpu_energy_j for each in booked for usage in each.usages)
    assert total_j <= MOST_W * (elapsed_s + 1)
    events = [event for _, event in steps]
    if first or "off" in events:
        assert total_j > 0
    elif not has_counter or events.count("reset") + events.count("zero") < 2:
        assert total_j == pytest.approx(WATTS * elapsed_s, rel=1e-6), "the power is known all the time"
    for each in booked:
        assert sum(usage.gpu_energy_j for usage in each.usages) == pytest.approx(each.metered_gpu_energy_j)
    assert sum((each.end_at - each.start_at).total_seconds() for each in booked) == pytest.approx(elapsed_s, abs=1e-3)
    if "clock" not in events:
        assert all(later.start_at == earlier.end_at for earlier, later in pairwise(booked))


@pytest.fixture
def faulty(world: World, monkeypatch: pytest.MonkeyPatch) -> FaultyWorld:
    made = FaultyWorld()
    monkeypatch.setattr(meter, "clock", lambda: made.now_s)
    monkeypatch.setattr(meter, "utc_now", lambda: made.at)
    return made


async def test_what_no_board_can_draw_is_modelled_marked_and_counted(faulty: FaultyWorld, tmp_path: Path) -> None:
    measuring = await a_meter(faulty, tmp_path)
    await measuring.switch({0: "a"})
    before = FAULTS.labels("gpu0", "rise")._value.get()
    faulty.meet("jump")
    faulty.pass_time(2)
    await measuring.close()

    of_gang, idle = last(tmp_path).usages
    assert (of_gang.gpu_energy_j, of_gang.source, of_gang.basis) == (200, EnergySource.MODELLED, Basis.METER)
    assert (idle.gpu_energy_j, idle.source, idle.basis) == (400, EnergySource.COUNTER, None)
    assert measuring.describe() == {"gpu0": {"rise": 1}}
    assert FAULTS.labels("gpu0", "rise")._value.get() == before + 1
    assert [reading.meter_faults for reading in measuring.readings()] == [1, 0]

    faulty.pass_time(2)
    await measuring.close()
    assert last(tmp_path).usages[0].basis is None
    assert last(tmp_path).usages[0].source is EnergySource.COUNTER


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e18, 2.0**32 - 1])
async def test_what_no_gpu_can_show_silences_no_node(
    faulty: FaultyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    places = test_meter_slices.devices(SlicePlace(4, 0), SlicePlace(3, 4))
    senseless: Any = number
    monkeypatch.setattr(faulty, "read_slice", lambda _: SliceSample(senseless, senseless))
    faulty.once = lambda _: Sample(senseless, senseless, senseless, senseless, senseless, senseless)
    measuring = await a_meter(faulty, tmp_path, devices=places)
    for _ in range(2):
        first, *slices, second = measuring.readings()
        found = (first.utilization, first.clock_mhz, first.memory_used_gib, first.enforced_limit_w)
        assert found == (0.0, None, None, None)
        assert 0 <= first.power_w <= 1.2 * 400
        assert [(each.utilization, each.memory_used_gib) for each in slices] == [(0.0, None)] * 2
        assert all(0 <= each.power_w <= 1.2 * 400 for each in slices)
        assert (second.power_w, second.utilization, second.clock_mhz) == (200, 0.5, 1_000)
        faulty.pass_time(1)
        await measuring.close()


async def test_the_check_of_a_counter_is_told_and_one_that_fails_is_not_used(
    faulty: FaultyWorld, tmp_path: Path
) -> None:
    measuring = await a_meter(faulty, tmp_path)
    assert [reading.counter_ratio for reading in measuring.readings()] == [None, None]
    for _ in range(61):
        faulty.pass_time(1)
        faulty.counter_j[0] -= 90.0  # it counts a tenth of what is drawn
        await measuring.sample()
    assert [reading.counter_ratio for reading in measuring.readings()] == [pytest.approx(0.1), pytest.approx(1)]
    await measuring.switch({0: "a"})
    faulty.pass_time(10)
    faulty.counter_j[0] -= 900.0
    await measuring.close()
    of_gang = last(tmp_path).usages[0]
    assert (of_gang.gpu_energy_j, of_gang.source) == (1_000, EnergySource.SAMPLED)


async def test_who_ended_while_nobody_looked_is_told_with_the_moment(faulty: FaultyWorld, tmp_path: Path) -> None:
    measuring = await a_meter(faulty, tmp_path)
    await measuring.switch({0: "a", 1: "b"})
    faulty.pass_time(1)
    await measuring.close()
    ended_at = faulty.at
    faulty.pass_time(100)
    await a_meter(faulty, tmp_path, ended=ended_at)
    assert {usage.allocation_id: usage.until for usage in last(tmp_path).usages} == {
        "a": ended_at, "b": ended_at, None: None,
    }  # fmt: skip


# --- CPU packages

MODEL = CpuPowerModel.between(60, 200)
RANGE_UJ = 262_143_328_850
PACKAGE = "intel-rapl:0"


class Package:
    """One CPU package that draws 150 W; the host is as busy as the model says then."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **files: str) -> None:
        self.zone = folder / PACKAGE
        self.zone.mkdir(parents=True)
        self.shown_j, self.busy_s = 90_000.0, 0.0
        for name, text in {"name": "package-0\n", "max_energy_range_uj": str(RANGE_UJ), **files}.items():
            (self.zone / name).write_text(text)
        self.show(self.shown_j)
        patch.setattr(host_power, "_busy_cpu_s", lambda: self.busy_s)
        patch.setattr(host_power.psutil, "cpu_count", lambda: 1)

    def show(self, energy_j: float | str) -> None:
        text = energy_j if isinstance(energy_j, str) else str(round(energy_j * 1e6))
        (self.zone / "energy_uj").write_text(text)

    def pass_time(self, seconds: float) -> None:
        self.busy_s += seconds * (150 - 60) / (200 - 60)
        self.shown_j = (self.shown_j + 150 * seconds) % (RANGE_UJ / 1e6)
        self.show(self.shown_j)


CPU_STREAMS = st.lists(
    st.tuples(st.floats(0.5, 30), st.sampled_from(("", "", "", "zero", "spike", "reset", "unreadable", "gap"))),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(steps=CPU_STREAMS)
def test_each_second_of_a_package_is_booked_once(steps: list[tuple[float, str]]) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        package = Package(Path(name), patch)
        power, booked, elapsed_s = RaplPower(MODEL, Path(name)), list[host_power.HostEnergy](), 0.0
        for seconds, event in [*steps, (1.0, ""), (1.0, "")]:
            length_s = 4_000.0 if event == "gap" else seconds
            if event == "reset":
                package.shown_j = 0.0
            package.pass_time(length_s)
            shown = {"zero": "0", "spike": "200000000000", "unreadable": ""}.get(event)
            if shown is not None:
                package.show(shown)
            elapsed_s += length_s
            booked.append(power.advance(length_s, 0))
    total_j = sum(each.total_j for each in booked)
    assert total_j <= 300 * (elapsed_s + 1)
    events = [event for _, event in steps]
    if sum(map(events.count, ("reset", "zero", "gap", "unreadable"))) < 2:
        assert total_j == pytest.approx(150 * elapsed_s, rel=1e-6)


def test_a_package_that_was_away_for_longer_than_a_wrap_is_modelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package(tmp_path, monkeypatch)
    state = RaplPower(MODEL, tmp_path).state()
    package.pass_time(3_600)
    again = RaplPower(MODEL, tmp_path)
    again.restore(state)
    booked = again.advance(3_600, 0)
    assert booked.total_j == pytest.approx(150 * 3_600)
    assert [fault.value for fault in booked.faults] == ["gap"]


@pytest.mark.parametrize(
    ("files", "most_w"),
    [
        ({}, 300.0),
        ({"constraint_0_max_power_uw": "250000000", "constraint_1_power_limit_uw": "300000000"}, 360.0),
        ({"constraint_0_max_power_uw": "125000000", "constraint_1_power_limit_uw": "4095000000"}, 150.0),
        ({"constraint_0_max_power_uw": "nonsense", "max_energy_range_uj": "0"}, 300.0),
    ],
)
def test_a_package_is_bound_by_its_own_limits_or_by_the_hosts_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], most_w: float
) -> None:
    Package(tmp_path, monkeypatch, **files)
    assert RaplPower(MODEL, tmp_path).most_w == pytest.approx(most_w)


def test_a_host_of_which_nobody_said_what_it_draws_is_believed_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Package(tmp_path, monkeypatch)
    power = RaplPower(MODEL, tmp_path, is_stated=False)
    package.show(package.shown_j + 4_500)
    assert power.advance(10, 0).total_j == pytest.approx(4_500)


async def test_energy_of_cpus_that_was_modelled_instead_is_marked(world: World, tmp_path: Path) -> None:
    measuring = await a_meter(world, tmp_path, {0: "a"})
    world.pass_time(1)
    await measuring.close()
    assert last(tmp_path).cpu_source is None
    world.faults = (meter.Fault.FALL,)
    world.pass_time(1)
    await measuring.close()
    interval = last(tmp_path)
    assert interval.cpu_source is EnergySource.MODELLED
    assert {usage.basis for usage in interval.usages} == {Basis.METER}
    assert measuring.describe() == {"cpu": {"fall": 1}}
