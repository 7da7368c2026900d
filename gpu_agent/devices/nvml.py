"""NVIDIA devices through NVML. Milliwatts and millijoules are converted here and appear nowhere else."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import pynvml

from gpu_agent.devices.driver import (
    DeviceError,
    DeviceLostError,
    DriverMissingError,
    NotPermittedError,
    NotSupportedError,
    Sample,
)
from services.contracts.nodes import DeviceInfo
from services.kit.logging import Log

log = Log(__name__)

P = ParamSpec("P")
T = TypeVar("T")

nvml: Any = pynvml  # its own annotations mix texts and numbers

_GIB = 2**30
_ERRORS: dict[int, type[DeviceError]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: DriverMissingError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: DriverMissingError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: DriverMissingError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: DriverMissingError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: NotSupportedError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: NotSupportedError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: NotSupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: NotPermittedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: DeviceLostError,
    pynvml.NVML_ERROR_NOT_FOUND: DeviceLostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: DeviceLostError,
}


def _named(call: Callable[P, T]) -> Callable[P, T]:
    """Translate NVML's errors into the driver's."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except pynvml.NVMLError as error:
            number: int = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
            raise _ERRORS.get(number, DeviceError)(str(error)) from error

    return wrapped


class NvmlDriver:
    """The host's NVIDIA GPUs.

    Args:
        may_probe: Whether to find out what is permitted by setting each power limit to the value it has.

    Raises:
        DriverMissingError: NVML is not installed, or the kernel driver does not answer.
    """

    name: Literal["nvml", "simulated"] = "nvml"

    def __init__(self, *, may_probe: bool = True) -> None:
        _named(nvml.nvmlInit)()
        self._may_probe = may_probe
        self._handles: list[Any] = self._open()
        self._devices = [self._describe(index) for index in range(len(self._handles))]
        self._counts_energy = [self._has_counter(handle) for handle in self._handles]

    @_named
    def _open(self) -> list[Any]:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def devices(self) -> list[DeviceInfo]:
        """Return the devices, in the order of their PCI addresses."""
        return list(self._devices)

    @_named
    def read(self, index: int) -> Sample:
        """Return one device's readings; None or 0 for what a device does not report."""
        handle = self._handles[index]
        utilization = _optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = _optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        clock_mhz = _optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit_mw = _optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) if self._counts_energy[index] else None
        return Sample(
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1_000,
            utilization=min((utilization or 0) / 100, 1.0),
            clock_mhz=clock_mhz,
            memory_used_gib=None if memory is None else memory / _GIB,
            energy_j=None if energy_mj is None else energy_mj / 1_000,
            power_limit_w=None if limit_mw is None else limit_mw / 1_000,
        )

    @_named
    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock the SM clock."""
        nvml.nvmlDeviceSetGpuLockedClocks(self._handles[index], clock_mhz, clock_mhz)

    @_named
    def reset_clock(self, index: int) -> None:
        """Unlock the SM clock."""
        nvml.nvmlDeviceResetGpuLockedClocks(self._handles[index])

    @_named
    def set_power_limit(self, index: int, limit_w: float) -> None:
        """Cap the board's power."""
        nvml.nvmlDeviceSetPowerManagementLimit(self._handles[index], round(limit_w * 1_000))

    @_named
    def reset_power_limit(self, index: int) -> None:
        """Return to the board's default limit."""
        handle = self._handles[index]
        nvml.nvmlDeviceSetPowerManagementLimit(handle, nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))

    def relative_speed(self, index: int) -> float | None:
        """Return None: the devices are real."""
        return None

    def close(self) -> None:
        """Shut NVML down."""
        try:
            nvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.warning("nvml.shutdown_failed", error=str(error))

    @_named
    def _describe(self, index: int) -> DeviceInfo:
        handle = self._handles[index]
        clocks = sorted(_optional(lambda: _clocks_mhz(handle)) or [])
        limit_mw = _optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        lowest_mw = _optional(lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[0])
        permitted = limit_mw is not None and self._is_permitted(handle, limit_mw)
        return DeviceInfo(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            model=model_name(_text(nvml.nvmlDeviceGetName(handle))),
            memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB,
            power_limit_w=(limit_mw or 1_000_000) / 1_000,
            lowest_limit_w=lowest_mw and lowest_mw / 1_000,
            can_set_clock=permitted and bool(clocks),
            can_set_power_limit=permitted,
            can_partition=permitted and _optional(lambda: nvml.nvmlDeviceGetMigMode(handle)) is not None,
            clocks_mhz=clocks[-1_000:],
        )

    def _is_permitted(self, handle: Any, limit_mw: int) -> bool:
        """Whether this process may change controls; found out by setting the value that is already set."""
        if not self._may_probe:
            return False
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        except pynvml.NVMLError as error:
            log.info("nvml.settings_refused", error=str(error))
            return False
        return True

    def _has_counter(self, handle: Any) -> bool:
        return _optional(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) is not None


def model_name(name: str) -> str:
    """Return a board's name as jobs ask for it: ``NVIDIA A100-SXM4-40GB`` is ``A100-SXM4-40GB``."""
    short = re.sub(r"^(NVIDIA|Tesla|GeForce|Quadro|\s)+", "", name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short or name).strip("-._")[:63] or "unknown"


def _clocks_mhz(handle: Any) -> list[int]:
    """The SM clocks at the highest memory clock, which is the one devices work at."""
    memory_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return list(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz))


def _optional(read: Callable[[], T]) -> T | None:
    """Return a reading; None if the device does not have it or does not report it to this process."""
    try:
        return read()
    except pynvml.NVMLError as error:
        number = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
        if _ERRORS.get(number) in (NotSupportedError, NotPermittedError):
            return None
        raise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
