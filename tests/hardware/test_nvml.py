"""The NVML driver on real devices, read-only."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from gpu_agent.devices.driver import DriverMissingError
from gpu_agent.devices.nvml import NvmlDriver
from services.core.domain.mig import is_gpu

pytestmark = pytest.mark.hardware


@pytest.fixture(scope="module")
def driver() -> Iterator[NvmlDriver]:
    """The host's devices."""
    try:
        opened = NvmlDriver(may_probe=False)
    except DriverMissingError as error:
        pytest.skip(f"no NVIDIA driver here: {error}")
    if not opened.devices():
        pytest.skip("no NVIDIA device here")
    yield opened
    opened.close()


def test_devices_are_plausible(driver: NvmlDriver) -> None:
    for device in driver.devices():
        assert device.uuid.startswith(("GPU-", "MIG-"))
        assert 1 < device.memory_gib < 1_000
        assert 10 < device.power_limit_w < 2_000
        assert device.clocks_mhz == sorted(set(device.clocks_mhz))


def test_readings_are_plausible(driver: NvmlDriver) -> None:
    for device in driver.devices():
        if not is_gpu(device.index):
            continue
        sample = driver.read(device.index)
        assert 0 < sample.power_w < device.power_limit_w * 1.2
        assert 0 <= sample.utilization <= 1
        assert sample.memory_used_gib is None or sample.memory_used_gib <= device.memory_gib


def test_the_counter_agrees_with_the_power(driver: NvmlDriver) -> None:
    index = driver.devices()[0].index
    first = driver.read(index)
    if first.energy_j is None:
        pytest.skip("this device has no energy counter")
    began, powers, last = time.monotonic(), [first.power_w], first
    while time.monotonic() - began < 3:
        last = driver.read(index)
        powers.append(last.power_w)
    assert last.energy_j is not None
    mean_w = (last.energy_j - first.energy_j) / (time.monotonic() - began)
    assert mean_w == pytest.approx(sum(powers) / len(powers), rel=0.15)


def test_the_state_of_devices_is_plausible(driver: NvmlDriver) -> None:
    assert driver.dead() == []
    assert not driver.refresh(), "nobody switches MIG modes meanwhile"
    for device in driver.devices():
        if not is_gpu(device.index):
            continue
        health = driver.health(device.index)
        assert health.temperature_c is None or 5 < health.temperature_c < 120
        assert health.slowdown_c is None or 60 < health.slowdown_c < 130
        assert health.uncorrected_errors is None or health.uncorrected_errors >= 0
        assert health.pids is None or all(pid > 0 for pid in health.pids)
    assert driver.events() == []
