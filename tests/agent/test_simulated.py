"""Simulated devices: power and speed by load and clock, and a counter that runs on without the agent."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from gpu_agent.devices import simulated
from gpu_agent.devices.driver import NotSupportedError
from gpu_agent.devices.simulated import Response, SimulatedDriver
from services.core.domain.errors import DomainError
from services.core.domain.gpus import GPU_MODELS, GpuModel


class Time:
    """A clock that a test sets."""

    now_s = 1_000.0
    boot = "one boot"


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The devices' clock."""
    made = Time()
    monkeypatch.setattr(simulated, "clock", lambda: made.now_s)
    monkeypatch.setattr(simulated, "kernel_boot", lambda: made.boot)
    return made


def a_driver(folder: Path, loads: dict[int, float], model: str = "H200-SXM-141GB") -> SimulatedDriver:
    return SimulatedDriver(model, 2, lambda index: loads.get(index, 0.0), folder / "simulated.json", "n1")


def energy_j(driver: SimulatedDriver, index: int = 0) -> float:
    energy = driver.read(index).energy_j
    assert energy is not None
    return energy


@pytest.mark.parametrize("model", GPU_MODELS.values(), ids=list(GPU_MODELS))
def test_every_model_draws_between_idle_and_peak(model: GpuModel) -> None:
    response, top = Response(model), model.highest_clock_mhz
    assert response.power_w(0, top) == model.idle_w
    assert response.power_w(1, top) == model.peak_w
    powers = [response.power_w(0.7, clock) for clock in response.clocks_mhz]
    speeds = [response.relative_speed(clock) for clock in response.clocks_mhz]
    assert powers == sorted(powers)
    assert speeds == sorted(speeds)
    assert response.clocks_mhz[-1] == top
    assert response.clocks_mhz[0] >= model.lowest_clock_mhz
    assert response.relative_speed(top) == 1
    assert all(0 < speed <= 1 for speed in speeds)


def test_a_limit_lowers_the_clock_and_the_power(time: Time, tmp_path: Path) -> None:
    driver = a_driver(tmp_path, {0: 1.0})
    assert driver.read(0).power_w == 700
    driver.set_power_limit(0, 400)
    sample = driver.read(0)
    assert sample.power_w == pytest.approx(400)
    assert sample.clock_mhz is not None
    assert sample.clock_mhz < 1_980
    speed = driver.relative_speed(0)
    assert speed is not None
    assert speed < 1
    assert driver.relative_speed(1) == 1
    driver.reset_power_limit(0)
    assert (driver.read(0).power_w, driver.relative_speed(0)) == (700, 1)


def test_the_counter_is_power_over_time(time: Time, tmp_path: Path) -> None:
    loads = {0: 0.0}
    driver = a_driver(tmp_path, loads)
    time.now_s += 10
    assert energy_j(driver) == pytest.approx(83.8 * 10)
    loads[0] = 1.0
    driver.read(0)  # the load is looked at whenever the device is
    time.now_s += 10
    assert energy_j(driver) == pytest.approx(83.8 * 10 + 700 * 10)
    driver.set_clock(0, 1_260)
    time.now_s += 10
    slow_w = 83.8 + 616.2 * (1_260 / 1_980) ** 2
    assert energy_j(driver) == pytest.approx(838 + 7_000 + 10 * slow_w)


def test_the_counter_runs_on_while_there_is_no_agent(time: Time, tmp_path: Path) -> None:
    driver = a_driver(tmp_path, {0: 1.0})
    driver.set_clock(1, 345)
    before = energy_j(driver)
    time.now_s += 60
    again = a_driver(tmp_path, {0: 1.0})
    assert energy_j(again) - before == pytest.approx(700 * 60)
    assert again.read(1).clock_mhz == 345, "as a real device would keep it"


def test_the_counter_stands_still_while_the_host_is_off(time: Time, tmp_path: Path) -> None:
    before = energy_j(a_driver(tmp_path, {0: 1.0}))
    time.now_s, time.boot = 5.0, "next boot"
    again = a_driver(tmp_path, {0: 1.0})
    assert energy_j(again) == before
    time.now_s += 1
    assert energy_j(again) == pytest.approx(before + 700)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"devices": [[1]]}', orjson.dumps({"devices": []})])
def test_an_unreadable_state_is_a_new_start(time: Time, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "simulated.json").write_bytes(content)
    assert energy_j(a_driver(tmp_path, {})) == 0


def test_impossible_settings_are_refused(time: Time, tmp_path: Path) -> None:
    driver = a_driver(tmp_path, {})
    for clock_mhz in (0, 1_261, 5_000):
        with pytest.raises(NotSupportedError):
            driver.set_clock(0, clock_mhz)
    for limit_w in (0, 199, 701):
        with pytest.raises(NotSupportedError):
            driver.set_power_limit(0, limit_w)
    with pytest.raises(DomainError, match="unknown GPU model 'B9000'; known: "):
        a_driver(tmp_path, {}, "B9000")


def test_devices_keep_their_names(time: Time, tmp_path: Path) -> None:
    first, second = a_driver(tmp_path, {}).devices()
    assert first.uuid != second.uuid
    assert a_driver(tmp_path, {}).devices() == [first, second]
    assert (first.memory_gib, first.power_limit_w, first.can_set_clock, first.can_partition) == (141, 700, True, True)
