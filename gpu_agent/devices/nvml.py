"""NVIDIA devices through NVML. Milliwatts and millijoules are converted here and appear nowhere else."""

import ctypes
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil
import pynvml

from gpu_agent.devices import driver
from gpu_agent.devices.nvml_calls import GIB, mig_mode, named, nvml, optional, text
from gpu_agent.devices.nvml_mig import NvmlMig
from services.contracts.nodes import DeviceInfo
from services.core.profiles.boards import board_of
from services.kit.logging import Log

log = Log(__name__)

_MAJOR = 195  #: Of NVIDIA's character devices
_MOST_EVENTS = 1_000
_MOST_LIMIT_MW, _MOST_CLOCK_MHZ = 10_000_000, 10_000  #: What no board draws, and no GPU's clock reaches


class NvmlDriver(driver.Driver):
    """The host's NVIDIA GPUs.

    Args:
        may_probe: Whether to find out what is permitted by setting each power limit to its present value.

    Raises:
        DriverMissingError: NVML is not installed, or the kernel driver does not answer.
    """

    def __init__(self, *, may_probe: bool = True) -> None:
        named(nvml.nvmlInit)()
        self._may_probe = may_probe
        self._handles: dict[int, Any] = {}
        self._gpus: dict[int, DeviceInfo] = {}
        self._mig: dict[int, NvmlMig] = {}
        self._counts_energy: dict[int, bool] = {}
        self._dead: list[driver.DeadDevice] = []
        for index in range(named(nvml.nvmlDeviceGetCount)()):
            try:
                self._open(index)
            except driver.DriverMissingError:
                raise
            except (driver.DeviceError, ValueError) as error:  # the other GPUs are as good as before
                self._forget(index, str(error))
        self._events = _Events(self._handles)

    @named
    def _open(self, index: int) -> None:
        handle = self._handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = self._gpus[index] = self._describe(index)
        if gpu.can_partition or gpu.mig_enabled:
            self._mig[index] = NvmlMig(handle, gpu)
        counted_mj = optional(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        self._counts_energy[index] = counted_mj is not None

    def _forget(self, index: int, why: str) -> None:
        uuid = ""
        if (handle := self._handles.pop(index, None)) is not None:
            with suppress(pynvml.NVMLError):
                uuid = text(nvml.nvmlDeviceGetUUID(handle))[:100]
        for known in (self._gpus, self._mig, self._counts_energy):
            known.pop(index, None)
        log.error("device.dead", index=index, uuid=uuid, error=why)
        self._dead.append(driver.DeadDevice(index, uuid, why))

    def _handle(self, index: int) -> Any:
        try:
            return self._handles[index]
        except KeyError:
            raise driver.DeviceLostError(f"GPU {index} did not answer when the agent started") from None

    def dead(self) -> list[driver.DeadDevice]:
        return list(self._dead)

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs, in the order of their PCI addresses, and their slices, whoever created them."""
        gpus = [
            gpu.model_copy(update={"mig_enabled": self._mig[index].enabled}) if index in self._mig else gpu
            for index, gpu in sorted(self._gpus.items())
        ]
        return gpus + [each for _, mig in sorted(self._mig.items()) for each in mig.slices()]

    @named
    def read(self, index: int) -> driver.Sample:
        """Return one GPU's readings; None or 0 for what it does not report."""
        driver.check_whole(index)
        handle = self._handle(index)
        utilization = optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        clock_mhz = optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit_mw = optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) if self._counts_energy[index] else None
        power_mw = optional(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return driver.Sample(
            power_w=self._likely_w(index, utilization or 0) if power_mw is None else power_mw / 1_000,
            utilization=min((utilization or 0) / 100, 1.0),
            clock_mhz=clock_mhz,
            memory_used_gib=None if memory is None else memory / GIB,
            energy_j=None if energy_mj is None else energy_mj / 1_000,
            power_limit_w=None if limit_mw is None else limit_mw / 1_000,
            estimated=power_mw is None,
        )

    def _likely_w(self, index: int, utilization_percent: int) -> float:
        """Return the likely draw of a board that does not report it, from what is known of its model."""
        board = board_of(self._gpus[index].model)
        return board.idle_w + (board.peak_w - board.idle_w) * min(utilization_percent / 100, 1.0)

    @named
    def health(self, index: int) -> driver.Health:
        handle = self._handle(index)
        reasons = optional(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        remapped = optional(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
        processes = optional(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return driver.Health(
            temperature_c=optional(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            slowdown_c=optional(
                lambda: nvml.nvmlDeviceGetTemperatureThreshold(handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
            )
            or None,
            too_hot=None if reasons is None else bool(reasons & nvml.nvmlClocksThrottleReasonHwThermalSlowdown),
            uncorrected_errors=optional(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
            remapping_failed=None if remapped is None else bool(remapped[3]),
            pids=None if processes is None else tuple(int(each.pid) for each in processes),
        )

    def events(self) -> list[driver.DeviceEvent]:
        return self._events.read()

    def refresh(self) -> bool:
        """Check whether somebody has switched the MIG mode of a GPU and open it again: its old handle is invalid."""
        changed = False
        for index, gpu in list(self._gpus.items()):
            known = self._mig[index].enabled if index in self._mig else gpu.mig_enabled
            try:
                if self._is_cut(index) == known:
                    continue
                self._mig.pop(index, None)
                self._open(index)
            except (driver.DeviceError, ValueError) as error:  # its health says more
                log.warning("device.unreadable", index=index, error=str(error))
                continue
            log.warning("device.mig_mode_changed", index=index, enabled=not known)
            changed = True
        return changed

    @named
    def _is_cut(self, index: int) -> bool:
        return mig_mode(self._handle(index))

    def read_slice(self, index: int) -> driver.SliceSample:
        """Return the activity of a slice, where NVML measures it (from Hopper on), and its memory."""
        for mig in self._mig.values():
            if mig.has(index):
                return mig.read(index)
        raise driver.DeviceLostError(f"there is no slice {index}")

    def cut(self, gpu: int, places: driver.Cut) -> None:
        """Cut a GPU into instances, each with one compute instance that takes all of it."""
        mig = self._mig.get(gpu)
        if mig is None:
            raise driver.NotSupportedError("this GPU cannot be cut")
        mig.cut(places)

    @named
    def set_clock(self, index: int, clock_mhz: int) -> None:
        driver.check_whole(index)
        nvml.nvmlDeviceSetGpuLockedClocks(self._handle(index), clock_mhz, clock_mhz)

    @named
    def reset_clock(self, index: int) -> None:
        driver.check_whole(index)
        nvml.nvmlDeviceResetGpuLockedClocks(self._handle(index))

    @named
    def set_power_limit(self, index: int, limit_w: float) -> None:
        driver.check_whole(index)
        nvml.nvmlDeviceSetPowerManagementLimit(self._handle(index), round(limit_w * 1_000))

    @named
    def reset_power_limit(self, index: int) -> None:
        driver.check_whole(index)
        self.set_power_limit(index, nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle(index)) / 1_000)

    def device_nodes(self) -> dict[int, tuple[int, int]]:
        """Return the device numbers of ``/dev/nvidiaN``, where N is the minor number and not the index."""
        minors = {
            index: optional(lambda handle=handle: nvml.nvmlDeviceGetMinorNumber(handle))
            for index, handle in self._handles.items()
        }
        return {index: (_MAJOR, minor) for index, minor in minors.items() if minor is not None}

    def close(self) -> None:
        self._events.close()
        try:
            nvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.warning("nvml.shutdown_failed", error=str(error))

    @named
    def _describe(self, index: int) -> DeviceInfo:
        handle = self._handle(index)
        clocks = sorted(mhz for mhz in optional(lambda: _clocks_mhz(handle)) or [] if 0 < mhz <= _MOST_CLOCK_MHZ)
        limits_mw = [optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))]
        limits_mw += optional(lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)) or (0, 0)
        limit_mw, lowest_mw, highest_mw = (mw if mw and mw <= _MOST_LIMIT_MW else None for mw in limits_mw)
        permitted = limit_mw is not None and self._is_permitted(handle, limit_mw)
        # A board without memory of its own shares the host's.
        memory_bytes = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) or psutil.virtual_memory().total
        return DeviceInfo(
            index=index,
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            model=model_name(text(nvml.nvmlDeviceGetName(handle))),
            memory_gib=memory_bytes / GIB,
            power_limit_w=(limit_mw or 1_000_000) / 1_000,
            lowest_limit_w=lowest_mw and lowest_mw / 1_000,
            highest_limit_w=highest_mw and highest_mw / 1_000,
            can_set_clock=permitted and bool(clocks),
            can_set_power_limit=permitted,
            mig_enabled=mig_mode(handle),
            can_partition=permitted and optional(lambda: _seven_sevenths(handle)) is not None,
            clocks_mhz=clocks[-1_000:],
        )

    def _is_permitted(self, handle: Any, limit_mw: int) -> bool:
        """Return whether this process may change controls; found out by setting the value that is already set."""
        if not self._may_probe:
            return False
        try:
            nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        except pynvml.NVMLError as error:
            log.info("nvml.settings_refused", error=str(error))
            return False
        return True


class _Events:
    """Xids, the critical errors of a host's GPUs, through NVML's events; none where GPU or driver has no events."""

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

    def read(self) -> list[driver.DeviceEvent]:
        found: list[driver.DeviceEvent] = []
        while self._set is not None and len(found) < _MOST_EVENTS:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError as error:  # a timeout: there is none; else a GPU is lost, as its readings say
                if getattr(error, "value", None) != pynvml.NVML_ERROR_TIMEOUT:
                    log.warning("nvml.events_unread", error=str(error))
                break
            index = self._index_of.get(_address(event.device))
            if event.eventType & nvml.nvmlEventTypeXidCriticalError and index is not None:
                found.append(driver.DeviceEvent(index, int(event.eventData)))
        return found

    def close(self) -> None:
        if self._set is not None:
            try:
                nvml.nvmlEventSetFree(self._set)
            except pynvml.NVMLError as error:
                log.warning("nvml.events_not_freed", error=str(error))
            self._set = None


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def model_name(name: str) -> str:
    """Return a board's name in the form that jobs use: ``NVIDIA A100-SXM4-40GB`` is ``A100-SXM4-40GB``."""
    short = re.sub(r"^(NVIDIA|Tesla|GeForce|Quadro|\s)+", "", name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short or name).strip("-._")[:63] or "unknown"


def _seven_sevenths(handle: Any) -> Any:
    """Return the profile of a slice of seven sevenths, for GPUs that are cut like the A100."""
    nvml.nvmlDeviceGetMigMode(handle)
    return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, nvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE)


def _clocks_mhz(handle: Any) -> list[int]:
    """Return the SM clocks at the highest memory clock, at which devices do their work."""
    memory_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return list(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz))
