"""The MIG instances of one GPU, through NVML.

A slice here is a GPU instance with one compute instance that takes all of it. Instances that an operator created are
slices like any other; one that holds several compute instances is left out, because they share what a slice has to
itself. Only ``cut`` creates or destroys anything.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

from gpu_agent.devices import driver
from gpu_agent.devices.nvml_calls import GIB, mig_mode, named, nvml, optional, text
from services.contracts.nodes import DeviceInfo
from services.core.domain.mig import SlicePlace, slice_index, slice_name
from services.kit.logging import Log

log = Log(__name__)

_SIZES = (1, 2, 3, 4, 7)
_GPU_PROFILES = {size: getattr(nvml, f"NVML_GPU_INSTANCE_PROFILE_{size}_SLICE") for size in _SIZES}
_COMPUTE_PROFILES = {size: getattr(nvml, f"NVML_COMPUTE_INSTANCE_PROFILE_{size}_SLICE") for size in _SIZES}
_MOST_INSTANCES = 7
_MIB = 2**20


@dataclass(frozen=True)
class _Instance:
    """A slice: the handle of its MIG device, the number of its GPU instance, and its last sample of activity."""

    info: DeviceInfo
    handle: Any
    number: int


class NvmlMig:
    """One GPU that can be cut, or is cut."""

    def __init__(self, handle: Any, gpu: DeviceInfo) -> None:
        self._handle = handle
        self._gpu = gpu
        self._samples: dict[int, Any] = {}
        self._measures = bool(optional(lambda: nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice))
        self.enabled = False
        self._instances: dict[int, _Instance] = {}
        self._look()

    def slices(self) -> list[DeviceInfo]:
        return [self._instances[index].info for index in sorted(self._instances)]

    def has(self, index: int) -> bool:
        return index in self._instances

    @named
    def read(self, index: int) -> driver.SliceSample:
        instance = self._instances[index]
        used = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(instance.handle).used)
        activity = self._activity(instance) if self._measures else None
        return driver.SliceSample(activity, None if used is None else used / GIB)

    def cut(self, places: driver.Cut) -> None:
        """Destroy what is not wanted, switch MIG mode if need be, and create what is missing.

        Raises:
            DeviceError: As in ``Driver.cut``; ``slices`` then reflects what exists.
        """
        try:
            self._cut(places)
        finally:
            self._look()

    @named
    def _cut(self, places: driver.Cut) -> None:
        while self._samples:
            nvml.nvmlGpmSampleFree(self._samples.popitem()[1])
        there = {each.number: SlicePlace(each.info.sevenths, each.info.start or 0) for each in self._instances.values()}
        kept = {number for number, place in there.items() if place in (places or ())}
        for instance in list(self._gpu_instances()):
            if nvml.nvmlGpuInstanceGetInfo(instance).id in kept:
                continue
            for compute in self._compute_instances(instance):
                nvml.nvmlComputeInstanceDestroy(compute)
            nvml.nvmlGpuInstanceDestroy(instance)
        if mig_mode(self._handle) != (places is not None):
            self._switch(enabled=places is not None)
        for place in places or ():
            if place not in [there[number] for number in kept]:
                self._create(place)

    def _switch(self, *, enabled: bool) -> None:
        """Switch MIG mode, at once or not at all: a switch that waits for a reset would surprise a later process."""
        status = nvml.nvmlDeviceSetMigMode(self._handle, int(enabled))
        if status == pynvml.NVML_SUCCESS and mig_mode(self._handle) == enabled:
            return
        nvml.nvmlDeviceSetMigMode(self._handle, int(not enabled))
        reason = text(nvml.nvmlErrorString(status)) if status else "it waits for a reset of the GPU"
        if status == pynvml.NVML_ERROR_IN_USE or not status:
            raise driver.DeviceBusyError(f"MIG mode cannot be switched: {reason}")
        raise driver.DeviceError(f"MIG mode cannot be switched: {reason}")

    def _create(self, place: SlicePlace) -> None:
        if place.sevenths not in _GPU_PROFILES:
            raise driver.NotSupportedError(f"there is no slice of {place.sevenths} sevenths")
        profile = nvml.nvmlDeviceGetGpuInstanceProfileInfo(self._handle, _GPU_PROFILES[place.sevenths])
        possible = self._possible_places(profile)
        if place.start not in possible:
            raise driver.NotSupportedError(
                f"a slice of {slice_name(place.sevenths)} cannot begin at slot {place.start}"
            )
        wanted = pynvml.c_nvmlGpuInstancePlacement_t(place.start, possible[place.start])
        instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(self._handle, profile.id, ctypes.byref(wanted))
        number = _COMPUTE_PROFILES[place.sevenths]
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        compute = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, shared)
        nvml.nvmlGpuInstanceCreateComputeInstance(instance, compute.id)

    def _possible_places(self, profile: Any) -> dict[int, int]:
        """Return the number of slots that an instance takes, by where it may begin."""
        count = ctypes.c_uint(8)
        found = (pynvml.c_nvmlGpuInstancePlacement_t * 8)()
        nvml.nvmlDeviceGetGpuInstancePossiblePlacements(self._handle, profile.id, found, ctypes.byref(count))
        return {each.start: each.size for each in found[: count.value]}

    def _profiles(self) -> dict[int, Any]:
        """Return the profiles that this GPU has, by the driver's ids."""
        numbers = range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        found = [optional(lambda n=n: nvml.nvmlDeviceGetGpuInstanceProfileInfo(self._handle, n)) for n in numbers]
        return {each.id: each for each in found if each is not None}

    def _gpu_instances(self) -> Iterator[Any]:
        if not mig_mode(self._handle):
            return
        for profile in self._profiles().values():
            count = ctypes.c_uint(_MOST_INSTANCES)
            found = (pynvml.c_nvmlGpuInstance_t * _MOST_INSTANCES)()
            nvml.nvmlDeviceGetGpuInstances(self._handle, profile.id, found, ctypes.byref(count))
            yield from found[: count.value]

    def _compute_instances(self, instance: Any) -> Iterator[Any]:
        shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
        for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
            profile = optional(lambda n=number: nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, n, shared))
            if profile is None:
                continue
            count = ctypes.c_uint(_MOST_INSTANCES)
            found = (pynvml.c_nvmlComputeInstance_t * _MOST_INSTANCES)()
            nvml.nvmlGpuInstanceGetComputeInstances(instance, profile.id, found, ctypes.byref(count))
            yield from found[: count.value]

    def _look(self) -> None:
        """Read which slices exist; without permission to read instances there are none to give to jobs."""
        self.enabled, self._instances = mig_mode(self._handle), {}
        try:
            if self.enabled:
                self._read_instances()
        except driver.NotPermittedError as error:
            log.warning("mig.instances_not_readable", gpu=self._gpu.index, error=str(error))

    @named
    def _read_instances(self) -> None:
        profiles = self._profiles()
        by_instance: dict[int, list[Any]] = {}
        for handle in self._mig_devices():
            by_instance.setdefault(nvml.nvmlDeviceGetGpuInstanceId(handle), []).append(handle)
        for number, handles in by_instance.items():
            if len(handles) > 1:
                log.warning("mig.instance_left_out", gpu=self._gpu.index, instance=number, compute=len(handles))
                continue
            instance = nvml.nvmlGpuInstanceGetInfo(nvml.nvmlDeviceGetGpuInstanceById(self._handle, number))
            profile = profiles[instance.profileId]
            index = slice_index(self._gpu.index, instance.placement.start)
            self._instances[index] = _Instance(self._describe(index, handles[0], instance, profile), handles[0], number)

    def _mig_devices(self) -> Iterator[Any]:
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(self._handle)):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, number)
            except pynvml.NVMLError as error:
                if getattr(error, "value", None) != pynvml.NVML_ERROR_NOT_FOUND:
                    raise

    def _describe(self, index: int, handle: Any, instance: Any, profile: Any) -> DeviceInfo:
        name = f"{profile.sliceCount}g.{round(profile.memorySizeMB / 1_024)}gb"
        memory = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total) or profile.memorySizeMB * _MIB
        return DeviceInfo(
            index=index,
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            parent=self._gpu.index,
            profile=text(profile.name).removeprefix("MIG ") or name,
            sevenths=profile.sliceCount,
            start=instance.placement.start,
            model=self._gpu.model,
            memory_gib=memory / GIB,
            power_limit_w=self._gpu.power_limit_w,
        )

    def _activity(self, instance: _Instance) -> float | None:
        """Return the fraction of a slice's multiprocessors that were busy since the last call; None on the first."""
        sample = optional(nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return None
        taken = optional(lambda: nvml.nvmlGpmMigSampleGet(self._handle, instance.number, sample))
        if taken is None:
            nvml.nvmlGpmSampleFree(sample)
            return None
        before = self._samples.pop(instance.number, None)
        self._samples[instance.number] = sample
        if before is None:
            return None
        try:
            wanted = nvml.c_nvmlGpmMetricsGet_t()
            wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
            wanted.sample1, wanted.sample2 = before, sample
            wanted.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
            metric = nvml.nvmlGpmMetricsGet(wanted).metrics[0]
            if metric.nvmlReturn != pynvml.NVML_SUCCESS:
                return None
            share: float = metric.value / 100
            return min(max(share, 0.0), 1.0) if share == share else None  # NaN where nothing was counted
        finally:
            nvml.nvmlGpmSampleFree(before)
