"""The NVML driver against a library of C that answers as NVIDIA's does: same symbols, same units, same errors."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pynvml
import pytest

from gpu_agent.devices.driver import (
    DeviceError,
    DeviceEvent,
    DeviceLostError,
    DriverMissingError,
    Health,
    NotPermittedError,
    NotSupportedError,
)
from gpu_agent.devices.nvml import NvmlDriver, model_name
from services.contracts.nodes import EnergySource
from tests.agent.conftest import Node, eventually

NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN, DRIVER_NOT_LOADED = "3", "4", "15", "999", "9"

Fault = Callable[[str, str], None]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the fake NVML")
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-o", path, source], check=True)
    return path


@pytest.fixture
def fault(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fault]:
    """Load the library; the fixture makes one of its functions fail with a code."""
    nvml: Any = pynvml
    monkeypatch.setattr(nvml, "nvmlLib", ctypes.CDLL(str(library)))
    monkeypatch.setattr(nvml, "_nvmlGetFunctionPointer_cache", {})
    libc = ctypes.CDLL(None)

    def fail(function: str, code: str) -> None:
        monkeypatch.setenv(f"NVML_FAKE_{function}", code)
        libc.setenv(f"NVML_FAKE_{function}".encode(), code.encode(), 1)

    yield fail
    for name in [name for name in os.environ if name.startswith("NVML_FAKE_")]:
        libc.unsetenv(name.encode())


def test_devices_are_described_in_our_units(fault: Fault) -> None:
    driver = NvmlDriver()
    first, second = driver.devices()
    assert (first.index, second.index) == (0, 1)
    assert first.uuid != second.uuid
    assert (first.model, first.memory_gib, first.power_limit_w) == ("A100-SXM4-40GB", 40, 400)
    assert first.clocks_mhz == list(range(210, 1411, 15))
    assert (first.can_set_clock, first.can_set_power_limit, first.can_partition) == (True, True, True)
    sample = driver.read(1)
    assert (sample.power_w, sample.utilization, sample.clock_mhz, sample.memory_used_gib) == (400, 0.75, 1410, 30)
    assert sample.energy_j == pytest.approx(2_000, rel=0.01)
    driver.close()


def test_clock_and_limit_change_what_the_counter_shows(fault: Fault) -> None:
    driver = NvmlDriver()
    driver.set_clock(0, 705)
    assert driver.read(0).clock_mhz == 705
    assert driver.read(0).power_w == pytest.approx(52 + 348 / 8)
    driver.reset_clock(0)
    driver.set_power_limit(0, 250.5)
    assert driver.read(0).power_w == 250.5
    before, began = driver.read(0).energy_j, time.monotonic()
    while time.monotonic() - began < 0.1:
        pass
    after = driver.read(0).energy_j
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(250.5 * (time.monotonic() - began), rel=0.05)
    driver.reset_power_limit(0)
    assert driver.read(0).power_w == 400


def test_what_is_refused_is_a_missing_capability(fault: Fault) -> None:
    fault("SET_LIMIT", NO_PERMISSION)
    fault("MIG", NOT_SUPPORTED)
    driver = NvmlDriver()
    device = driver.devices()[0]
    assert (device.can_set_clock, device.can_set_power_limit, device.can_partition) == (False, False, False)
    with pytest.raises(NotPermittedError):
        driver.set_power_limit(0, 300)


def test_a_device_may_lack_clocks_utilisation_and_counter(fault: Fault) -> None:
    for function in ("CLOCKS", "TOTAL_ENERGY", "UTILIZATION"):
        fault(function, NOT_SUPPORTED)
    driver = NvmlDriver()
    assert driver.devices()[0].clocks_mhz == []
    assert driver.devices()[0].can_set_clock is False
    assert driver.devices()[0].can_set_power_limit is True
    sample = driver.read(0)
    assert (sample.energy_j, sample.utilization, sample.power_w) == (None, 0.0, 400)


def test_memory_and_power_are_optional(fault: Fault) -> None:
    for function in ("MEMORY", "POWER", "TOTAL_ENERGY"):
        fault(function, NOT_SUPPORTED)
    driver = NvmlDriver()
    host_gib = psutil.virtual_memory().total / 2**30
    assert driver.devices()[0].memory_gib == pytest.approx(host_gib), "as on boards that share the host's memory"
    sample = driver.read(0)
    assert (sample.memory_used_gib, sample.energy_j, sample.estimated) == (None, None, True)
    assert 52 < sample.power_w < 400, "by what is known of the board, at three quarters of its load"


def test_one_dead_card_leaves_the_others(fault: Fault) -> None:
    fault("LOST_0", GPU_IS_LOST)
    driver = NvmlDriver()
    assert [device.index for device in driver.devices()] == [1]
    assert [(dead.index, dead.uuid[-2:]) for dead in driver.dead()] == [(0, "00")]
    assert driver.read(1).power_w == 400
    assert driver.device_nodes().keys() <= {1}


def test_a_card_that_cannot_be_described_leaves_the_others(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = pynvml
    read = nvml.nvmlDeviceGetUUID
    too_long = "x" * 101
    monkeypatch.setattr(
        nvml, "nvmlDeviceGetUUID", lambda handle: too_long if read(handle).endswith("00") else read(handle).encode()
    )
    driver = NvmlDriver()
    assert [device.index for device in driver.devices()] == [1]
    assert [(dead.index, dead.uuid) for dead in driver.dead()] == [(0, too_long[:100])]


def test_what_no_board_has_is_not_believed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml: Any = pynvml
    most = 2**32 - 1
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerManagementLimit", lambda _: most)
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerManagementLimitConstraints", lambda _: [0, most])
    monkeypatch.setattr(nvml, "nvmlDeviceGetSupportedGraphicsClocks", lambda *_: [most, 1410, 0])
    monkeypatch.setattr(nvml, "nvmlDeviceGetTemperatureThreshold", lambda *_: 0)
    driver = NvmlDriver()
    device = driver.devices()[0]
    assert (device.power_limit_w, device.lowest_limit_w, device.highest_limit_w) == (1_000, None, None)
    assert (device.clocks_mhz, device.can_set_power_limit) == ([1410], False)
    assert driver.health(0).slowdown_c is None, "else each GPU is too hot"


def test_what_a_gpu_says_of_its_state(fault: Fault) -> None:
    driver = NvmlDriver()
    assert driver.health(0) == Health(55, 89, None, 0, None, ())
    for name, value in (("TEMPERATURE_1", "93"), ("ECC_1", "2"), ("PID_1", "77"), ("XID_1", "79")):
        fault(name, value)
    assert driver.health(1) == Health(93, 89, None, 2, None, (77,))
    assert driver.health(0).temperature_c == 55
    assert driver.events() == [DeviceEvent(1, 79)]
    assert driver.events() == []
    fault("LOST_1", GPU_IS_LOST)
    with pytest.raises(DeviceLostError):
        driver.health(1)
    driver.close()


def test_a_driver_without_events_has_none(fault: Fault) -> None:
    fault("EVENTS", NOT_SUPPORTED)
    assert NvmlDriver().events() == []


@pytest.mark.parametrize(
    ("code", "error"), [(NO_PERMISSION, NotPermittedError), (GPU_IS_LOST, DeviceLostError), (UNKNOWN, DeviceError)]
)
def test_errors_have_names(fault: Fault, code: str, error: type[DeviceError]) -> None:
    driver = NvmlDriver()
    fault("TOTAL_ENERGY", code)
    fault("SET_CLOCK", code)
    with pytest.raises(error):
        driver.read(0)
    with pytest.raises(error):
        driver.set_clock(0, 1410)
    with pytest.raises(NotSupportedError):
        driver.set_power_limit(0, 5)


def test_a_driver_that_does_not_answer_is_missing(fault: Fault) -> None:
    fault("INIT", DRIVER_NOT_LOADED)
    with pytest.raises(DriverMissingError):
        NvmlDriver()


def test_nothing_is_set_where_probing_is_off(fault: Fault) -> None:
    assert NvmlDriver(may_probe=False).devices()[0].can_set_power_limit is False


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB-HBM3"),
        ("NVIDIA", "NVIDIA"),
        ("☢", "unknown"),
    ],
)
def test_boards_are_named_as_jobs_ask_for_them(name: str, model: str) -> None:
    assert model_name(name) == model


async def test_an_agent_without_nvml_has_no_devices_and_says_why(node: Node) -> None:
    await node.start(GPU_AGENT_DRIVER="auto", LD_LIBRARY_PATH=str(node.folder))
    assert node.plane.registrations[-1].devices == []
    assert "It has no GPUs: NVML does not answer" in (node.plane.heartbeats[-1].closed or "")


@pytest.mark.parametrize("measure_only", [True, False])
async def test_an_agent_that_only_measures_sets_nothing_and_minds_nobodys_processes(
    node: Node, library: Path, measure_only: bool
) -> None:
    noted = node.folder / "set"
    node.environment |= {"NVML_FAKE_SET_NOTED": str(noted), "NVML_FAKE_PID_0": str(os.getpid())}
    node.environment |= {"GPU_AGENT_HEALTH_INTERVAL_S": "0.1", "GPU_AGENT_HEALTH_LASTS_S": "0"}
    node.environment |= {"GPU_AGENT_MEASURE_ONLY": "true"} if measure_only else {}
    await node.start(GPU_AGENT_DRIVER="nvml", LD_LIBRARY_PATH=str(library.parent))
    await eventually(lambda: len(node.plane.intervals) >= 4 and len(node.plane.heartbeats) >= 8)
    await node.stop()
    assert noted.exists() is not measure_only
    assert bool(node.plane.heartbeats[-1].gpu_faults) is not measure_only, "a process that belongs to no job of ours"
    if measure_only:
        intervals = node.plane.intervals[1:]
        assert {tuple(each.devices) for interval in intervals for each in interval.usages} == {(0,), (1,)}
        assert {each.source for interval in intervals for each in interval.usages} == {EnergySource.COUNTER}


@pytest.mark.parametrize(("has_counter", "source"), [(True, EnergySource.COUNTER), (False, EnergySource.SAMPLED)])
async def test_an_agent_measures_real_devices(
    node: Node, library: Path, has_counter: bool, source: EnergySource
) -> None:
    without = {} if has_counter else {"NVML_FAKE_TOTAL_ENERGY": NOT_SUPPORTED}
    await node.start(GPU_AGENT_DRIVER="auto", LD_LIBRARY_PATH=str(library.parent), **without)
    assert node.plane.registrations[-1].driver == "nvml"
    gang = await node.run("sleep", "600", devices=[1])
    await eventually(lambda: sum(u.allocation_id == gang for i in node.plane.intervals for u in i.usages) >= 8)
    intervals = node.plane.intervals[-6:]
    seconds = (intervals[-1].end_at - intervals[0].start_at).total_seconds()
    usages = [usage for interval in intervals for usage in interval.usages if usage.allocation_id == gang]
    assert {usage.source for usage in usages} == {source}
    assert sum(usage.gpu_energy_j for usage in usages) / seconds == pytest.approx(400, rel=0.05)
    assert sum(interval.metered_gpu_energy_j for interval in intervals) / seconds == pytest.approx(800, rel=0.05)
