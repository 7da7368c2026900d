"""What the agent asks of devices, and the errors they answer with.

Units are watts, joules, MHz, GiB and fractions of 1; a driver converts from whatever its library uses.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from services.contracts.nodes import DeviceInfo
from services.core.domain.errors import WattshiftError
from services.core.domain.mig import SlicePlace, parent_of


class DeviceError(WattshiftError):
    """A device did not do what it was asked to do."""

    code = "device_error"


class DriverMissingError(DeviceError):
    """There is no driver, or it does not answer."""


class NotSupportedError(DeviceError):
    """The device cannot do this."""


class NotPermittedError(DeviceError):
    """This process may not do this; usually root is required."""


class DeviceLostError(DeviceError):
    """The device has fallen off the bus or no longer answers."""


class DeviceBusyError(DeviceError):
    """Something is running on the device, so that it cannot be cut now."""


Cut = tuple[SlicePlace, ...] | None
"""How a GPU is cut: its slices in the order of their places, none of them on a GPU in MIG mode without slices; None for
a GPU that is not in MIG mode."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The current readings of one device.

    ``energy_j`` counts up from an arbitrary start; None where the device has no counter. ``power_limit_w`` is the limit
    that the device reports as in force, None where it does not report one. ``estimated`` says that the power was not
    read, because the device does not report it, but derived from its utilisation.
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
    """The current readings of one slice. It has no power reading of its own: that is the GPU's.

    ``activity`` is the fraction of its multiprocessors that were busy since the last sample; None where that is not
    measured.
    """

    activity: float | None
    memory_used_gib: float | None


@dataclass(frozen=True, slots=True)
class Health:
    """What a GPU reports of its own state; None where it does not report it."""

    temperature_c: float | None = None
    slowdown_c: float | None = None  #: The temperature from which the board slows itself down
    too_hot: bool | None = None  #: Whether it is slowing itself down now because of its temperature
    uncorrected_errors: int | None = None  #: ECC errors that could not be corrected, since its driver was loaded
    remapping_failed: bool | None = None  #: Whether broken memory could not be replaced by spare memory
    pids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A critical error that the driver reported once: an Xid, in NVIDIA's numbering."""

    index: int
    xid: int


@dataclass(frozen=True, slots=True)
class DeadDevice:
    """A GPU that did not answer when the agent started. Its UUID is empty where not even that can be read."""

    index: int
    uuid: str
    why: str


class Driver:
    """The devices of one host. Calls block for milliseconds and may come from any thread, but only one at a time.

    What a subclass does not say is as on a host without devices: there are none, and each that is asked for is lost.
    Where NVML is missing or shows no GPU, the node registers with this one, so that operators see what is wrong, and
    takes no work. Nothing is simulated in its place.
    """

    name: Literal["nvml", "simulated"] = "nvml"
    why = ""  #: Why there are no devices that the agent can use; empty where there are some

    def devices(self) -> list[DeviceInfo]:
        """Return the GPUs, then their slices, with their capabilities, as of the start or of the last cut."""
        return []

    def read(self, index: int) -> Sample:
        raise self._lost(index)

    def read_slice(self, index: int) -> SliceSample:
        raise self._lost(index)

    def dead(self) -> list[DeadDevice]:
        """Return the GPUs that did not answer at the start; they are not among ``devices``."""
        return []

    def health(self, index: int) -> Health:
        """Return what one GPU reports of its state; ``DeviceLostError`` if it is off the bus, or ``DeviceError``."""
        raise self._lost(index)

    def events(self) -> list[DeviceEvent]:
        """Return the critical errors since the last call."""
        return []

    def refresh(self) -> bool:
        """Check whether somebody else has switched the MIG mode of a GPU; return whether ``devices`` has changed."""
        return False

    def cut(self, gpu: int, places: Cut) -> None:
        """Cut a GPU anew: destroy the slices that are not wanted and create those that are missing, or make it whole.

        A slice that already exists in its place is left alone. What was done before an error stays done; the caller
        restores the previous cut.

        Raises:
            DeviceBusyError: Something is running on it.
            NotSupportedError: It cannot be cut, or not in this way.
            NotPermittedError: This process may not cut it.
            DeviceError: The driver failed otherwise.
        """
        raise self._lost(gpu)

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock a GPU's SM clock; slices refuse this and the other controls."""
        raise self._lost(index)

    def reset_clock(self, index: int) -> None:
        """Let the device choose its clock again."""
        raise self._lost(index)

    def set_power_limit(self, index: int, limit_w: float) -> None:
        raise self._lost(index)

    def reset_power_limit(self, index: int) -> None:
        raise self._lost(index)

    def device_nodes(self) -> dict[int, tuple[int, int]]:
        """Return the major and minor number of each GPU's character device; empty where GPUs have none."""
        return {}

    def relative_speed(self, index: int) -> float | None:
        """Return the speed at the present clock as a fraction of the highest; None for real devices."""
        return None

    def close(self) -> None:
        """Release the library."""

    def _lost(self, index: int) -> DeviceLostError:
        return DeviceLostError(f"there is no device {index}: {self.why}")


def check_whole(index: int) -> None:
    """Raise NotSupportedError if a device is a slice: controls and counters belong to its GPU."""
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
