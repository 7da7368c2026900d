"""What the agent asks of devices, and the errors they answer with.

Watts, joules, MHz, GiB and shares of one; a driver converts from whatever its library speaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from services.contracts.nodes import DeviceInfo
from services.core.domain.errors import WattshiftError
from services.core.domain.mig import SlicePlace, parent_of


class DeviceError(WattshiftError):
    """A device did not do what was asked."""

    code = "device_error"


class DriverMissingError(DeviceError):
    """There is no driver, or none that answers."""


class NotSupportedError(DeviceError):
    """The device cannot do this."""


class NotPermittedError(DeviceError):
    """This process may not do this; usually it requires root."""


class DeviceLostError(DeviceError):
    """The device has fallen off the bus or no longer answers."""


class DeviceBusyError(DeviceError):
    """Something runs on the device, so that it cannot be cut now."""


Cut = tuple[SlicePlace, ...] | None
"""How a GPU is cut: its slices in the order of their places, none of them on a GPU in MIG mode without slices; None for
a GPU that is not in MIG mode."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One device now.

    ``energy_j`` counts up from an arbitrary start; None where the device has no counter. ``power_limit_w`` is the limit
    that the device says is in force, None where it does not say. ``estimated`` says that the power was not read,
    because the device does not report it, but follows from its utilisation.
    """

    power_w: float
    utilization: float
    clock_mhz: int | None
    memory_used_gib: float | None
    energy_j: float | None
    power_limit_w: float | None = None
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class SliceSample:
    """One slice now. Its power is the GPU's and has no reading of its own.

    ``activity`` is the share of its multiprocessors that were busy since the last sample; None where that is not
    measured.
    """

    activity: float | None
    memory_used_gib: float | None


@dataclass(frozen=True, slots=True)
class Health:
    """What a GPU says of its own state; None where it does not say.

    Attributes:
        temperature_c: Of the die.
        slowdown_c: From which temperature on the board slows itself down.
        too_hot: Whether it slows itself down now because of its temperature.
        uncorrected_errors: ECC errors that could not be corrected, since its driver was loaded.
        remapping_failed: Whether broken memory could not be replaced by spare memory.
        pids: The processes that compute on it.
    """

    temperature_c: float | None = None
    slowdown_c: float | None = None
    too_hot: bool | None = None
    uncorrected_errors: int | None = None
    remapping_failed: bool | None = None
    pids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A critical error that the driver reported once: an Xid, as NVIDIA numbers them."""

    index: int
    xid: int


@dataclass(frozen=True, slots=True)
class DeadDevice:
    """A GPU that did not answer when the agent began. Its UUID is empty where not even that can be read."""

    index: int
    uuid: str
    why: str


class Driver(Protocol):
    """The devices of one host. Calls block for milliseconds and may come from any one thread at a time."""

    name: Literal["nvml", "simulated"]

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs, then their slices, and what can be done with them; as of the start or of the last cut."""
        ...

    def read(self, index: int) -> Sample:
        """Return one GPU's readings."""
        ...

    def read_slice(self, index: int) -> SliceSample:
        """Return one slice's readings."""
        ...

    def dead(self) -> list[DeadDevice]:
        """Return the GPUs that did not answer at the start; they are not among ``devices``."""
        ...

    def health(self, index: int) -> Health:
        """Return what one GPU says of its state.

        Raises:
            DeviceLostError: It has fallen off the bus.
            DeviceError: It did not answer.
        """
        ...

    def events(self) -> list[DeviceEvent]:
        """Return the critical errors since the last call."""
        ...

    def refresh(self) -> bool:
        """Look whether somebody else has switched the MIG mode of a GPU; return whether ``devices`` has changed."""
        ...

    def cut(self, gpu: int, places: Cut) -> None:
        """Cut a GPU anew: destroy the slices that are not wanted and create those that are missing, or make it whole.

        A slice that is there already, at its place, is left alone. What was done until an error stays done; the caller
        restores what was before.

        Raises:
            DeviceBusyError: Something runs on it.
            NotSupportedError: It cannot be cut, or not in this way.
            NotPermittedError: This process may not cut it.
            DeviceError: The driver failed otherwise.
        """
        ...

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock a GPU's SM clock; slices refuse this and the other controls."""
        ...

    def reset_clock(self, index: int) -> None:
        """Let the device choose its clock again."""
        ...

    def set_power_limit(self, index: int, limit_w: float) -> None:
        """Cap the device's power."""
        ...

    def reset_power_limit(self, index: int) -> None:
        """Return to the default power limit."""
        ...

    def device_nodes(self) -> dict[int, tuple[int, int]]:
        """Return major and minor number of each GPU's character device; none where it has no device of its own."""
        ...

    def relative_speed(self, index: int) -> float | None:
        """Return the speed at the present clock as a share of the highest; None for real devices."""
        ...

    def close(self) -> None:
        """Release the library."""
        ...


def check_whole(index: int) -> None:
    """Raise NotSupportedError if a device is a slice: controls and counters are those of its GPU."""
    parent = parent_of(index)
    if parent is not None:
        raise NotSupportedError(f"it is a slice: clock, power limit and power are those of GPU {parent} as a whole")


def cut_of(devices: Iterable[DeviceInfo], gpu: int) -> Cut:
    """Return how a GPU among these devices is cut."""
    known = list(devices)
    if not any(device.index == gpu and device.mig_enabled for device in known):
        return None
    slices = (device for device in known if device.parent == gpu and device.start is not None)
    return tuple(sorted((SlicePlace(each.sevenths, each.start or 0) for each in slices), key=lambda place: place.start))
