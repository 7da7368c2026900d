"""MIG through NVML, against a library of C that keeps an A100's rules for instances."""

from __future__ import annotations

import pynvml
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
from gpu_agent.devices.nvml import NvmlDriver
from services.core.domain.mig import SlicePlace, placed, slice_index
from tests.agent.test_nvml import NO_PERMISSION, NOT_SUPPORTED, UNKNOWN, Fault, fault, library

__all__ = ["fault", "library"]

IN_USE, RESET_REQUIRED, NO_RESOURCES = "19", "16", "23"
HALVES = placed([4, 3])


@pytest.fixture
def driver(fault: Fault) -> NvmlDriver:
    """Two GPUs, neither of them in MIG mode."""
    return NvmlDriver()


def cut(driver: NvmlDriver, gpu: int = 0) -> Cut:
    return cut_of(driver.devices(), gpu)


def test_slices_are_described_by_the_driver(driver: NvmlDriver) -> None:
    driver.cut(1, placed([3, 2, 2]))
    whole, parent, *slices = driver.devices()
    assert (whole.mig_enabled, parent.mig_enabled) == (False, True)
    assert [(each.index, each.uuid, each.parent, each.profile, each.sevenths, each.start) for each in slices] == [
        (1032, "MIG-1-2-0", 1, "2g.10gb", 2, 0),
        (1034, "MIG-1-2-2", 1, "2g.10gb", 2, 2),
        (1036, "MIG-1-3-4", 1, "3g.20gb", 3, 4),
    ]
    assert [each.memory_gib for each in slices] == [9.75, 9.75, 19.625]
    assert not any(each.can_set_clock or each.can_set_power_limit or each.can_partition for each in slices)
    sample = driver.read_slice(1036)
    assert (sample.activity, sample.memory_used_gib) == (None, 19.625 * 3 / 4), "activity is since the last sample"
    assert driver.read_slice(1036).activity == pytest.approx(0.3), "the third of the GPU's instances"


def test_what_an_operator_has_cut_is_there_for_the_next_driver(driver: NvmlDriver, fault: Fault) -> None:
    driver.cut(0, HALVES)
    fault("KEEP_CUT", "1")
    after = NvmlDriver(may_probe=False)
    assert cut(after) == HALVES
    assert after.devices()[2:] == driver.devices()[2:]


def test_cuts_follow_each_other_and_end_whole(driver: NvmlDriver) -> None:
    for sizes in ([7], [1] * 7, [3, 3], [2, 2, 2, 1], []):
        driver.cut(0, placed(sizes))
        assert cut(driver) == placed(sizes)
    assert driver.devices()[0].mig_enabled, "MIG mode without a slice"
    driver.cut(0, None)
    assert cut(driver) is None
    assert len(driver.devices()) == 2


def test_a_place_that_is_none_is_refused(driver: NvmlDriver) -> None:
    with pytest.raises(NotSupportedError, match="a slice of 4g cannot begin at slot 4"):
        driver.cut(0, (SlicePlace(4, 4),))
    with pytest.raises(NotSupportedError):
        driver.cut(0, (SlicePlace(4, 0), SlicePlace(2, 2)))
    with pytest.raises(NotSupportedError, match="no slice of 5 sevenths"):
        driver.cut(0, (SlicePlace(5, 0),))


@pytest.mark.parametrize(
    ("function", "code", "error"),
    [
        ("DESTROY_CI", IN_USE, DeviceBusyError),
        ("DESTROY_GI", IN_USE, DeviceBusyError),
        ("CREATE_GI", NO_RESOURCES, NotSupportedError),
        ("CREATE_GI", NO_PERMISSION, NotPermittedError),
        ("CREATE_CI", UNKNOWN, DeviceError),
    ],
)
def test_errors_of_a_cut_have_names(
    driver: NvmlDriver, fault: Fault, function: str, code: str, error: type[DeviceError]
) -> None:
    driver.cut(0, HALVES)
    fault(function, code)
    with pytest.raises(error):
        driver.cut(0, placed([7]))


def test_after_an_error_the_devices_are_those_that_there_are(driver: NvmlDriver, fault: Fault) -> None:
    fault("CREATE_GI", UNKNOWN)
    fault("CREATE_AT", "4")
    with pytest.raises(DeviceError):
        driver.cut(0, HALVES)
    assert cut(driver) == (SlicePlace(4, 0),)


@pytest.mark.parametrize(("status", "error"), [(IN_USE, DeviceBusyError), (RESET_REQUIRED, DeviceError)])
def test_mig_mode_is_switched_now_or_never(
    driver: NvmlDriver, fault: Fault, status: str, error: type[DeviceError]
) -> None:
    fault("ACTIVATION", status)
    with pytest.raises(error, match="MIG mode cannot be switched: a fake fault"):
        driver.cut(0, HALVES)
    assert cut(driver) is None


def test_activity_is_measured_where_nvml_does(fault: Fault) -> None:
    fault("GPM", NOT_SUPPORTED)
    driver = NvmlDriver()
    driver.cut(0, HALVES)
    assert [driver.read_slice(slice_index(0, 0)).activity for _ in range(2)] == [None, None]


def test_a_sample_that_fails_is_no_activity(driver: NvmlDriver, fault: Fault) -> None:
    driver.cut(0, HALVES)
    fault("GPM_SAMPLE", NOT_SUPPORTED)
    assert [driver.read_slice(slice_index(0, 0)).activity for _ in range(2)] == [None, None]


def test_an_instance_of_several_parts_is_left_to_its_operator(driver: NvmlDriver, fault: Fault) -> None:
    fault("COMPUTE_PARTS", "1")
    driver.cut(0, HALVES)
    assert cut(driver) == ()


def test_without_the_right_to_read_instances_there_are_none(driver: NvmlDriver, fault: Fault) -> None:
    fault("INSTANCES", NO_PERMISSION)
    driver.cut(0, HALVES)
    assert cut(driver) == ()
    assert driver.devices()[0].mig_enabled, "so that no job is placed on the GPU as a whole"


def test_a_gpu_without_mig_is_not_cut(fault: Fault) -> None:
    fault("MIG", NOT_SUPPORTED)
    driver = NvmlDriver()
    assert not driver.devices()[0].can_partition
    with pytest.raises(NotSupportedError, match="cannot be cut"):
        driver.cut(0, HALVES)


def test_slices_have_no_controls(driver: NvmlDriver) -> None:
    driver.cut(0, HALVES)
    index = slice_index(0, 0)
    for call in (
        lambda: driver.set_clock(index, 1_410),
        lambda: driver.reset_power_limit(index),
        lambda: driver.read(index),
    ):
        with pytest.raises(NotSupportedError, match="those of GPU 0"):
            call()
    with pytest.raises(DeviceLostError, match="no slice 1025"):
        driver.read_slice(1_025)


def test_a_mode_that_somebody_else_switched_is_noticed(driver: NvmlDriver) -> None:
    assert not driver.refresh()
    handle = pynvml.nvmlDeviceGetHandleByIndex(1)
    pynvml.nvmlDeviceSetMigMode(handle, 1)
    assert driver.refresh()
    assert [device.mig_enabled for device in driver.devices()] == [False, True]
    assert not driver.refresh()
    driver.cut(0, HALVES)
    assert not driver.refresh(), "that was the agent itself"
    pynvml.nvmlDeviceSetMigMode(handle, 0)
    assert driver.refresh()
    assert cut(driver, 1) is None
