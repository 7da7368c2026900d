"""NVIDIA devices through NVML. Milliwatts and millijoules are converted here and appear nowhere else."""

from __future__ import annotations

import re
from typing import Any, Literal

import pynvml

from gpu_agent.devices.driver import Cut, DeviceLostError, NotSupportedError, Sample, SliceSample, check_whole
from gpu_agent.devices.nvml_calls import GIB, named, nvml, optional, text
from gpu_agent.devices.nvml_mig import NvmlMig
from services.contracts.nodes import DeviceInfo
from services.kit.logging import Log

log = Log(__name__)

_MAJOR = 195
"""Of NVIDIA's character devices."""


class NvmlDriver:
    """The host's NVIDIA GPUs.

    Args:
        may_probe: Whether to find out what is permitted by setting each power limit to the value it has.

    Raises:
        DriverMissingError: NVML is not installed, or the kernel driver does not answer.
    """

    name: Literal["nvml", "simulated"] = "nvml"

    def __init__(self, *, may_probe: bool = True) -> None:
        named(nvml.nvmlInit)()
        self._may_probe = may_probe
        self._handles: list[Any] = self._open()
        self._gpus = [self._describe(index) for index in range(len(self._handles))]
        self._mig = [
            NvmlMig(handle, gpu) if gpu.can_partition or gpu.mig_enabled else None
            for handle, gpu in zip(self._handles, self._gpus, strict=True)
        ]
        self._counts_energy = [self._has_counter(handle) for handle in self._handles]

    @named
    def _open(self) -> list[Any]:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs, in the order of their PCI addresses, and their slices, whoever created them."""
        gpus = [
            gpu if mig is None else gpu.model_copy(update={"mig_enabled": mig.enabled})
            for gpu, mig in zip(self._gpus, self._mig, strict=True)
        ]
        return gpus + [each for mig in self._mig if mig is not None for each in mig.slices()]

    @named
    def read(self, index: int) -> Sample:
        """Return one GPU's readings; None or 0 for what it does not report."""
        check_whole(index)
        handle = self._handles[index]
        utilization = optional(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        memory = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used)
        clock_mhz = optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        limit_mw = optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        energy_mj = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) if self._counts_energy[index] else None
        return Sample(
            power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1_000,
            utilization=min((utilization or 0) / 100, 1.0),
            clock_mhz=clock_mhz,
            memory_used_gib=None if memory is None else memory / GIB,
            energy_j=None if energy_mj is None else energy_mj / 1_000,
            power_limit_w=None if limit_mw is None else limit_mw / 1_000,
        )

    def read_slice(self, index: int) -> SliceSample:
        """Return the activity of a slice, where NVML measures it (from Hopper on), and its memory."""
        for mig in self._mig:
            if mig is not None and mig.has(index):
                return mig.read(index)
        raise DeviceLostError(f"there is no slice {index}")

    def cut(self, gpu: int, places: Cut) -> None:
        """Cut a GPU into instances, each with one compute instance that has all of it."""
        mig = self._mig[gpu]
        if mig is None:
            raise NotSupportedError("this GPU cannot be cut")
        mig.cut(places)

    @named
    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock the SM clock."""
        check_whole(index)
        nvml.nvmlDeviceSetGpuLockedClocks(self._handles[index], clock_mhz, clock_mhz)

    @named
    def reset_clock(self, index: int) -> None:
        """Unlock the SM clock."""
        check_whole(index)
        nvml.nvmlDeviceResetGpuLockedClocks(self._handles[index])

    @named
    def set_power_limit(self, index: int, limit_w: float) -> None:
        """Cap the board's power."""
        check_whole(index)
        nvml.nvmlDeviceSetPowerManagementLimit(self._handles[index], round(limit_w * 1_000))

    @named
    def reset_power_limit(self, index: int) -> None:
        """Return to the board's default limit."""
        check_whole(index)
        handle = self._handles[index]
        nvml.nvmlDeviceSetPowerManagementLimit(handle, nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))

    def device_nodes(self) -> dict[int, tuple[int, int]]:
        """Return the numbers of ``/dev/nvidiaN``, where N is the minor number and not the index."""
        minors = {
            index: optional(lambda handle=handle: nvml.nvmlDeviceGetMinorNumber(handle))
            for index, handle in enumerate(self._handles)
        }
        return {index: (_MAJOR, minor) for index, minor in minors.items() if minor is not None}

    def relative_speed(self, index: int) -> float | None:
        """Return None: the devices are real."""
        return None

    def close(self) -> None:
        """Shut NVML down."""
        try:
            nvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            log.warning("nvml.shutdown_failed", error=str(error))

    @named
    def _describe(self, index: int) -> DeviceInfo:
        handle = self._handles[index]
        clocks = sorted(optional(lambda: _clocks_mhz(handle)) or [])
        limit_mw = optional(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
        lowest_mw = optional(lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[0])
        permitted = limit_mw is not None and self._is_permitted(handle, limit_mw)
        return DeviceInfo(
            index=index,
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            model=model_name(text(nvml.nvmlDeviceGetName(handle))),
            memory_gib=nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB,
            power_limit_w=(limit_mw or 1_000_000) / 1_000,
            lowest_limit_w=lowest_mw and lowest_mw / 1_000,
            can_set_clock=permitted and bool(clocks),
            can_set_power_limit=permitted,
            mig_enabled=bool((optional(lambda: nvml.nvmlDeviceGetMigMode(handle)) or [0])[0]),
            can_partition=permitted and optional(lambda: _seven_sevenths(handle)) is not None,
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
        return optional(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) is not None


def model_name(name: str) -> str:
    """Return a board's name as jobs ask for it: ``NVIDIA A100-SXM4-40GB`` is ``A100-SXM4-40GB``."""
    short = re.sub(r"^(NVIDIA|Tesla|GeForce|Quadro|\s)+", "", name)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", short or name).strip("-._")[:63] or "unknown"


def _seven_sevenths(handle: Any) -> Any:
    """The profile of a slice with seven sevenths, which GPUs have that are cut as the A100 is."""
    nvml.nvmlDeviceGetMigMode(handle)
    return nvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, nvml.NVML_GPU_INSTANCE_PROFILE_7_SLICE)


def _clocks_mhz(handle: Any) -> list[int]:
    """The SM clocks at the highest memory clock, which is the one devices work at."""
    memory_mhz = max(nvml.nvmlDeviceGetSupportedMemoryClocks(handle))
    return list(nvml.nvmlDeviceGetSupportedGraphicsClocks(handle, memory_mhz))
