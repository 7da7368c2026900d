"""Power limits and clocks: set, refused, taken back; and killed anywhere in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_agent import controls as module
from gpu_agent.controls import Controls, Order
from gpu_agent.devices.driver import DeviceLostError, NotPermittedError, NotSupportedError
from gpu_agent.devices.simulated import SimulatedDriver
from services.contracts.nodes import DeviceControls
from services.core.domain.controls import ControlKind

LIMIT, CLOCK = ControlKind.POWER_LIMIT, ControlKind.CLOCK


class Killed(BaseException):
    """The process is gone: nothing that would handle it runs."""


@pytest.fixture
def driver(tmp_path: Path) -> SimulatedDriver:
    return SimulatedDriver("A100-SXM4-40GB", 3, lambda _: 1.0, tmp_path / "devices.json", "n")


@pytest.fixture
def make(driver: SimulatedDriver, tmp_path: Path) -> Callable[[], Controls]:
    """Return what starts an agent's controls anew on the same devices and state file."""
    return lambda: Controls(driver, tmp_path / "controls.json", asyncio.Lock())


def order(
    *devices: int, w: float | None = None, mhz: int | None = None, revision: int = 1, gang: str = "job_1.1"
) -> Order:
    return Order(gang, devices, DeviceControls(revision=revision, power_limit_w=w, clock_mhz=mhz))


def drawn(driver: SimulatedDriver) -> list[float]:
    return [round(driver.read(index).power_w) for index in range(3)]


async def test_only_what_was_set_is_taken_back(
    driver: SimulatedDriver, make: Callable[[], Controls], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.set_power_limit(2, 200)  # an operator's own
    controls = make()
    await controls.enforce([])
    assert await controls.enforce([order(0, mhz=705), order(1, w=150, gang="job_2.1")])
    assert drawn(driver) == [141, 150, 200]
    later = make()
    assert later.in_force, "an agent that starts anew knows what the one before has set"
    with monkeypatch.context() as patch:
        patch.setattr(driver, "reset_clock", _raise(DeviceLostError("gone")))
        await later.enforce([])
        assert later.in_force, "to be tried again"
        assert not later.is_clean([0])
        assert later.is_clean([1])
    await later.enforce([])
    assert not later.in_force
    assert drawn(driver) == [400, 400, 200]


async def test_orders_are_followed_as_they_change(driver: SimulatedDriver, make: Callable[[], Controls]) -> None:
    controls = make()

    assert await controls.enforce([order(0, 1, w=200)])
    assert not await controls.enforce([order(0, 1, w=200)]), "nothing to do"
    assert drawn(driver) == [200, 200, 400]
    assert controls.status(order(0, 1, w=200)).power_limit_w == 200
    await controls.enforce([order(0, 1, w=150, mhz=1410, revision=2)])
    assert drawn(driver) == [150, 150, 400]
    await controls.enforce([order(0, 1, revision=3)])
    assert drawn(driver) == [400, 400, 400]
    assert not controls.in_force


async def test_the_next_gang_on_a_device_inherits_nothing(
    driver: SimulatedDriver, make: Callable[[], Controls]
) -> None:
    controls = make()
    await controls.enforce([order(0, w=150, mhz=705)])

    await controls.enforce([order(0, w=200, gang="job_2.1")])

    assert drawn(driver)[0] == 200
    assert controls.value(CLOCK, 0) is None


@pytest.mark.parametrize("refusal", [NotPermittedError("takes root"), NotSupportedError("no such limit")])
async def test_a_gang_that_is_refused_runs_on_at_the_defaults(
    driver: SimulatedDriver, make: Callable[[], Controls], monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    controls, asked = make(), []
    really = driver.set_power_limit

    def refuse_the_second(index: int, limit_w: float) -> None:
        asked.append(index)
        if index == 1:
            raise refusal
        really(index, limit_w)

    monkeypatch.setattr(driver, "set_power_limit", refuse_the_second)
    wanted = order(0, 1, w=150, mhz=705)
    assert await controls.enforce([wanted])
    await controls.enforce([wanted])

    assert asked == [0, 1], "a device that has refused is not asked again"
    status = controls.status(wanted)
    assert status.refused == {LIMIT: f"device 1: {refusal}"}
    assert (status.power_limit_w, status.clock_mhz) == (None, 705), "the other setting holds"
    assert controls.value(LIMIT, 0) is None
    assert drawn(driver) == [141, 141, 400]
    await controls.enforce([order(0, 1, w=150, mhz=705, revision=2)])
    assert asked == [0, 1, 0, 1], "but for what is asked anew"


async def test_a_device_that_does_not_answer_is_asked_again(
    driver: SimulatedDriver, make: Callable[[], Controls], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = make()
    with monkeypatch.context() as patch:
        patch.setattr(driver, "set_power_limit", _raise(DeviceLostError("busy")))
        await controls.enforce([order(0, w=150)])
        assert controls.status(order(0, w=150)).power_limit_w is None
    await controls.enforce([order(0, w=150)])

    assert drawn(driver)[0] == 150


async def test_what_cannot_be_remembered_is_not_set(
    driver: SimulatedDriver, make: Callable[[], Controls], monkeypatch: pytest.MonkeyPatch
) -> None:
    controls = make()
    monkeypatch.setattr(module.files, "replace", _raise(OSError("disk full")))

    await controls.enforce([order(0, w=150)])

    assert drawn(driver)[0] == 400


def kill_points() -> Iterator[tuple[str, int, bool]]:
    """Yield (call, how many of them get through, whether the last one still takes effect)."""
    for name in ("replace", "set_power_limit", "set_clock", "reset_power_limit", "reset_clock"):
        for passes in range(3):
            for takes_effect in (False, True):
                yield name, passes, takes_effect


@pytest.mark.parametrize(("name", "passes", "takes_effect"), list(kill_points()))
async def test_killed_anywhere_the_next_agent_leaves_no_setting_behind(
    driver: SimulatedDriver,
    make: Callable[[], Controls],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    passes: int,
    takes_effect: bool,
) -> None:
    owner = module.files if name == "replace" else driver
    really: Callable[..., Any] = getattr(owner, name)
    left = [passes]

    def die_later(*arguments: Any, **options: Any) -> None:
        if left[0] == 0:
            if takes_effect:
                really(*arguments, **options)
            raise Killed
        if owner is driver or arguments[0].name == "controls.json":
            left[0] -= 1
        really(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die_later)
        try:
            controls = make()
            await controls.enforce([order(0, 1, w=150, mhz=705)])
            await controls.enforce([order(0, 1, w=200, revision=2)])
            await controls.enforce([])
        except Killed:
            pass
    adopting = make()
    await adopting.enforce([order(0, 1, w=200, revision=2)])
    assert drawn(driver) == [200, 200, 400], "a gang that was found running has what it is to have"
    await make().enforce([])
    assert drawn(driver) == [400, 400, 400]


def _raise(error: BaseException) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return refuse
