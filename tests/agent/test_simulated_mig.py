"""Cutting simulated GPUs: the places, errors, power and memory of MIG."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_agent.devices.driver import (
    Cut,
    DeviceBusyError,
    DeviceError,
    DeviceLostError,
    NotPermittedError,
    NotSupportedError,
    cut_of,
)
from gpu_agent.devices.simulated import SimulatedDriver
from services.core.domain.mig import SlicePlace, placed, slice_index
from tests.agent.test_simulated import Time, energy_j, time

__all__ = ["time"]

IDLE_W, PEAK_W = 55.0, 400.0
HALVES = placed([4, 3])


class Host:
    """What runs on the devices of a driver, by load."""

    def __init__(self, folder: Path, model: str = "A100-SXM4-40GB") -> None:
        self.folder = folder
        self.model = model
        self.loads: dict[int, float] = {}
        self.driver = self.open()

    def open(self) -> SimulatedDriver:
        """Open the driver, again as the next agent does."""
        self.driver = SimulatedDriver(
            self.model,
            2,
            lambda index: self.loads.get(index, 0.0),
            self.folder / "simulated.json",
            "n1",
            is_held=lambda index: index in self.loads,
        )
        return self.driver

    def fail(self, step: str, outcome: str, **options: int) -> None:
        """Make a step of the next cut fail."""
        entries = [{"step": step, "outcome": outcome, **options}]
        (self.folder / "simulated_faults.json").write_text(json.dumps(entries))

    def cut(self, gpu: int = 0) -> Cut:
        return cut_of(self.driver.devices(), gpu)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Two GPUs that can be cut."""
    return Host(tmp_path)


def test_slices_are_devices_of_their_own(host: Host) -> None:
    host.driver.cut(1, placed([3, 2, 2]))
    whole, parent, *slices = host.driver.devices()
    assert [(each.index, each.mig_enabled, each.can_partition) for each in (whole, parent)] == [
        (0, False, True),
        (1, True, True),
    ]
    assert [(each.index, each.profile, each.sevenths, each.start, each.memory_gib) for each in slices] == [
        (1032, "2g.10gb", 2, 0, 10),
        (1034, "2g.10gb", 2, 2, 10),
        (1036, "3g.20gb", 3, 4, 20),
    ]
    assert {each.parent for each in slices} == {1}
    assert all(each.uuid.startswith("MIG-") and not each.can_set_clock and not each.clocks_mhz for each in slices)
    assert len({each.uuid for each in host.driver.devices()}) == 5


def test_the_same_cut_has_the_same_names_and_outlives_the_agent(host: Host) -> None:
    host.driver.cut(0, HALVES)
    cut = host.driver.devices()
    assert host.open().devices() == cut
    host.driver.cut(0, placed([7]))
    host.driver.cut(0, None)
    host.driver.cut(0, HALVES)
    assert host.driver.devices() == cut


def test_after_a_restart_of_the_host_the_slices_are_gone(time: Time, host: Host) -> None:
    host.driver.cut(0, HALVES)
    time.boot = "next boot"
    assert cut_of(host.open().devices(), 0) == ()
    assert cut_of(host.driver.devices(), 1) is None


def test_a_cut_gpu_draws_what_its_slices_add_up_to(time: Time, host: Host) -> None:
    host.driver.cut(0, HALVES)
    assert host.driver.read(0).power_w == IDLE_W
    host.loads = {slice_index(0, 0): 1.0, slice_index(0, 4): 0.5}
    sample = host.driver.read(0)
    load = (4 * 1.0 + 3 * 0.5) / 7
    assert sample.utilization == pytest.approx(load)
    assert sample.power_w == pytest.approx(IDLE_W + load * (PEAK_W - IDLE_W))
    before = energy_j(host.driver)
    time.now_s += 10
    assert energy_j(host.driver) - before == pytest.approx(10 * sample.power_w)


def test_the_activity_of_a_slice_is_its_mean_load(time: Time, host: Host) -> None:
    host.driver.cut(0, HALVES)
    first, second = slice_index(0, 0), slice_index(0, 4)
    host.driver.read_slice(first)
    host.loads = {first: 0.8}
    assert host.driver.read_slice(first).activity == 0.8, "it has just begun"
    time.now_s += 30
    host.loads = {}
    host.driver.read(1)
    time.now_s += 10
    sample = host.driver.read_slice(first)
    assert sample.activity == pytest.approx(0.6)
    assert host.driver.read_slice(second).activity == 0
    assert sample.memory_used_gib == 0


@pytest.mark.parametrize("places", [[(4, 4)], [(2, 1)], [(3, 0), (2, 2)], [(5, 0)], [(7, 0), (1, 6)]])
def test_places_that_mig_does_not_have_are_refused(host: Host, places: list[tuple[int, int]]) -> None:
    host.driver.cut(0, HALVES)
    with pytest.raises(NotSupportedError, match="Insufficient Resources"):
        host.driver.cut(0, tuple(SlicePlace(*place) for place in places))
    assert host.cut() == HALVES, "nothing was touched"


def test_a_board_without_mig_is_not_cut(tmp_path: Path) -> None:
    host = Host(tmp_path, "V100")
    assert not host.driver.devices()[0].can_partition
    with pytest.raises(NotSupportedError, match="cannot be cut"):
        host.driver.cut(0, HALVES)


def test_work_on_a_device_keeps_it_as_it_is(host: Host) -> None:
    host.loads = {0: 0.0}
    with pytest.raises(DeviceBusyError, match="MIG mode"):
        host.driver.cut(0, HALVES)
    host.loads = {}
    host.driver.cut(0, HALVES)
    host.loads = {slice_index(0, 4): 0.0}
    with pytest.raises(DeviceBusyError, match="slice at 4"):
        host.driver.cut(0, None)
    assert host.cut() == (SlicePlace(3, 4),), "what was free is gone: the caller restores it"
    host.driver.cut(0, HALVES)
    assert host.cut() == HALVES, "without touching the slice in use"
    host.driver.cut(1, HALVES)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ("busy", DeviceBusyError),
        ("refused", NotPermittedError),
        ("unsupported", NotSupportedError),
        ("failed", DeviceError),
    ],
)
def test_a_fault_stops_a_cut_half_way_as_it_would_a_real_one(
    host: Host, outcome: str, error: type[DeviceError]
) -> None:
    host.fail("create", outcome, skip=1, times=1)
    with pytest.raises(error):
        host.driver.cut(0, placed([2, 2, 3]))
    assert host.cut() == (SlicePlace(2, 0),)
    host.driver.cut(0, HALVES)
    assert host.cut() == HALVES, "the fault was for one step"


@pytest.mark.parametrize(
    "text", ["", "{", '{"step": 1}', '[{"step": "create"}]', '[{"step": "create", "outcome": "x"}]']
)
def test_a_file_of_faults_that_says_nothing_does_nothing(host: Host, text: str) -> None:
    (host.folder / "simulated_faults.json").write_text(text)
    host.driver.cut(0, HALVES)
    assert host.cut() == HALVES


def test_slices_have_no_controls_and_no_counter(host: Host) -> None:
    host.driver.cut(0, HALVES)
    index = slice_index(0, 0)
    for call in (
        lambda: host.driver.set_clock(index, 1_410),
        lambda: host.driver.set_power_limit(index, 300),
        lambda: host.driver.reset_clock(index),
        lambda: host.driver.reset_power_limit(index),
        lambda: host.driver.read(index),
    ):
        with pytest.raises(NotSupportedError, match="slice: clock, power limit and power are those of GPU 0"):
            call()
    host.driver.set_clock(0, 705)
    assert host.driver.relative_speed(index) == host.driver.relative_speed(0) != 1
    with pytest.raises(DeviceLostError, match="no slice 1030"):
        host.driver.read_slice(1_030)
