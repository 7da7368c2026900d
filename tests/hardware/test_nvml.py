"""The NVML driver on real devices: what it reads, what it refuses, and that nothing is left changed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from gpu_agent.devices.driver import DeviceLostError, DriverMissingError, NotPermittedError, NotSupportedError
from gpu_agent.devices.nvml import NvmlDriver
from gpu_agent.devices.nvml_calls import GIB, nvml, optional
from services.contracts.nodes import DeviceInfo
from services.core.domain.mig import is_gpu
from services.telemetry.settings import TelemetrySettings
from tests.agent.conftest import Node, eventually, node, plane, tmp_path
from tests.hardware import load
from tests.support.servers import ROOT

__all__ = ["node", "plane", "tmp_path"]

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
    before = settings(opened)
    yield opened
    assert settings(opened) == before, "no test leaves a device with other settings than it had"
    opened.close()


def settings(driver: NvmlDriver) -> dict[int, tuple[object, ...]]:
    """Return what can be set on each GPU, and how the driver says that it is set."""
    found: dict[int, tuple[object, ...]] = {}
    for index, handle in driver._handles.items():
        readings = (
            nvml.nvmlDeviceGetPowerManagementLimit,
            nvml.nvmlDeviceGetMigMode,
            nvml.nvmlDeviceGetPersistenceMode,
            nvml.nvmlDeviceGetComputeMode,
            nvml.nvmlDeviceGetEccMode,
            lambda device: nvml.nvmlDeviceGetApplicationsClock(device, nvml.NVML_CLOCK_SM),
        )
        found[index] = tuple(optional(lambda read=read, of=handle: read(of)) for read in readings)
    return found


def a_whole_gpu(driver: NvmlDriver) -> DeviceInfo:
    """Return a GPU that is not cut, so that programs can compute on all of it."""
    for device in driver.devices():
        if is_gpu(device.index) and not device.mig_enabled:
            return device
    pytest.skip("every GPU here is cut into slices")


MEMORY_MIB = 1_024


@contextmanager
def computing(gpu: DeviceInfo, seconds: float = 60.0) -> Iterator[int]:
    """Keep a GPU busy with ``load``; yield the process id once it is."""
    command = [sys.executable, load.__file__, gpu.uuid, str(MEMORY_MIB), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said != "ready" and process.wait() == load.NO_CUDA:
            pytest.skip(f"nothing can compute here: {said}")
        assert said == "ready"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


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


def test_readings_follow_a_load_that_is_known(driver: NvmlDriver) -> None:
    gpu = a_whole_gpu(driver)
    idle, strangers = driver.read(gpu.index), set(driver.health(gpu.index).pids or ())
    if idle.utilization > 0.05 or strangers:
        pytest.skip("somebody computes here")
    with computing(gpu) as pid:
        time.sleep(3)  # boards average their power over a second, and count energy now and then
        began, first = time.monotonic(), driver.read(gpu.index)
        powers, last = [first.power_w], first
        while time.monotonic() - began < 5:
            time.sleep(0.02)
            last = driver.read(gpu.index)
            powers.append(last.power_w)
        seconds = time.monotonic() - began
        pids = driver.health(gpu.index).pids
        found = optional(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(driver._handle(gpu.index))) or []
    assert last.utilization >= 0.9
    assert last.power_w > idle.power_w
    assert not last.estimated or idle.estimated
    if last.memory_used_gib is not None and idle.memory_used_gib is not None:
        assert last.memory_used_gib - idle.memory_used_gib >= MEMORY_MIB / 1_024
    if last.energy_j is not None and first.energy_j is not None:
        assert (last.energy_j - first.energy_j) / seconds == pytest.approx(sum(powers) / len(powers), rel=0.1)
    if pids is not None:
        assert len(pids) == 1, "the load is seen; in a container, by a number that it has outside"
        assert pids[0] == pid or not psutil.pid_exists(pids[0])
        held = found[0].usedGpuMemory
        assert held is None or held / GIB >= MEMORY_MIB / 1_024, "its memory is told, or it is said to be unknown"


def test_a_device_that_is_not_there_is_refused(driver: NvmlDriver) -> None:
    for call in (driver.read, driver.health, driver.reset_clock):
        with pytest.raises(DeviceLostError):
            call(99)


def test_a_limit_beyond_the_boards_is_refused(driver: NvmlDriver) -> None:
    gpu = a_whole_gpu(driver)
    before = driver.read(gpu.index).power_limit_w
    with pytest.raises((NotSupportedError, NotPermittedError)):
        driver.set_power_limit(gpu.index, 100_000.0)
    assert driver.read(gpu.index).power_limit_w == before


AS_NOBODY = """
import os, sys
from gpu_agent.devices.driver import NotPermittedError, NotSupportedError
from gpu_agent.devices.nvml import NvmlDriver
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
driver = NvmlDriver(may_probe=False)
index = int(sys.argv[1])
limit_w = driver.read(index).power_limit_w
try:
    driver.set_power_limit(index, limit_w or 1_000.0)
except (NotPermittedError, NotSupportedError) as error:
    print(type(error).__name__)
"""


def test_whoever_is_not_root_may_read_and_set_nothing(driver: NvmlDriver) -> None:
    gpu = a_whole_gpu(driver)
    if driver.read(gpu.index).power_limit_w is None:
        pytest.skip("this device has no power limit")
    command = [sys.executable, "-c", AS_NOBODY, str(gpu.index)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("NotPermittedError", "NotSupportedError"), done.stderr


async def test_an_agent_takes_less_than_a_hundredth_of_a_core_and_leaves_nothing_set(
    driver: NvmlDriver, node: Node
) -> None:
    for name in ("GPU_AGENT_TICK_S", "GPU_AGENT_SAMPLE_INTERVAL_S", "GPU_AGENT_ENERGY_INTERVAL_S"):
        del node.environment[name]  # as an installation has them
    node.plane.heartbeat_interval_s = TelemetrySettings.model_fields["heartbeat_interval_s"].default
    before = settings(driver)
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    await node.start(GPU_AGENT_DRIVER="nvml", **libraries)
    assert node.process is not None
    found, known = node.plane.registrations[-1].devices, driver.devices()
    assert [(each.index, each.uuid, each.model) for each in found] == [(d.index, d.uuid, d.model) for d in known]
    agent, beats = psutil.Process(node.process.pid), len(node.plane.heartbeats)
    began, first = time.monotonic(), agent.cpu_times()
    await eventually(lambda: time.monotonic() - began >= 60, within_s=90)
    seconds, last = time.monotonic() - began, agent.cpu_times()
    assert len(node.plane.heartbeats) > beats
    await node.stop()
    assert (last.user + last.system - first.user - first.system) / seconds < 0.01
    assert settings(driver) == before


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
