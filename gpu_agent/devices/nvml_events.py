"""Xids: the critical errors that NVIDIA's driver reports, through NVML's events."""

import ctypes
from collections.abc import Mapping
from typing import Any

import pynvml

from gpu_agent.devices.driver import DeviceEvent
from gpu_agent.devices.nvml_calls import nvml
from services.kit.logging import Log

log = Log(__name__)

_MOST_AT_ONCE = 1_000


class NvmlEvents:
    """The events of all GPUs of a host; empty for a GPU or driver without events."""

    def __init__(self, handles: Mapping[int, Any]) -> None:
        self._index_of: dict[int | None, int] = {}
        self._set: Any = None
        try:
            self._set = nvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            log.info("nvml.no_events", error=str(error))
            return
        for index, handle in handles.items():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
            except pynvml.NVMLError as error:
                log.info("nvml.no_events", index=index, error=str(error))
            self._index_of[_address(handle)] = index

    def read(self) -> list[DeviceEvent]:
        """Return what was reported since the last call."""
        found: list[DeviceEvent] = []
        while self._set is not None and len(found) < _MOST_AT_ONCE:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError as error:  # a timeout: there is none; else a GPU is lost, as its readings say
                if getattr(error, "value", None) != pynvml.NVML_ERROR_TIMEOUT:
                    log.warning("nvml.events_unread", error=str(error))
                break
            index = self._index_of.get(_address(event.device))
            if event.eventType & nvml.nvmlEventTypeXidCriticalError and index is not None:
                found.append(DeviceEvent(index, int(event.eventData)))
        return found

    def close(self) -> None:
        """Stop listening for events."""
        if self._set is not None:
            try:
                nvml.nvmlEventSetFree(self._set)
            except pynvml.NVMLError as error:
                log.warning("nvml.events_not_freed", error=str(error))
            self._set = None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
