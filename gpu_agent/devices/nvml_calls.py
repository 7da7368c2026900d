"""Calls of NVML's Python bindings that raise the driver's errors instead of NVML's."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import pynvml

from gpu_agent.devices import driver

P = ParamSpec("P")
T = TypeVar("T")

nvml: Any = pynvml  # its own annotations mix texts and numbers

GIB = 2**30
_ERRORS: dict[int, type[driver.DeviceError]] = {
    pynvml.NVML_ERROR_UNINITIALIZED: driver.DriverMissingError,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: driver.DriverMissingError,
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: driver.DriverMissingError,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: driver.DriverMissingError,
    pynvml.NVML_ERROR_INVALID_ARGUMENT: driver.NotSupportedError,
    pynvml.NVML_ERROR_NOT_SUPPORTED: driver.NotSupportedError,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: driver.NotSupportedError,
    pynvml.NVML_ERROR_NO_PERMISSION: driver.NotPermittedError,
    pynvml.NVML_ERROR_GPU_IS_LOST: driver.DeviceLostError,
    pynvml.NVML_ERROR_NOT_FOUND: driver.DeviceLostError,
    pynvml.NVML_ERROR_RESET_REQUIRED: driver.DeviceLostError,
    pynvml.NVML_ERROR_IN_USE: driver.DeviceBusyError,
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: driver.NotSupportedError,
}


def named(call: Callable[P, T]) -> Callable[P, T]:
    """Translate NVML's errors into the driver's."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except pynvml.NVMLError as error:
            number: int = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
            raise _ERRORS.get(number, driver.DeviceError)(str(error)) from error

    return wrapped


def optional(read: Callable[[], T]) -> T | None:
    """Return a reading; None if the device does not have it or does not report it to this process."""
    try:
        return read()
    except pynvml.NVMLError as error:
        number = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
        if _ERRORS.get(number) in (driver.NotSupportedError, driver.NotPermittedError):
            return None
        raise


def mig_mode(handle: Any) -> bool:
    return bool((optional(lambda: nvml.nvmlDeviceGetMigMode(handle)) or [0])[0])


def text(value: str | bytes) -> str:
    """Return a text, which some NVML releases give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
