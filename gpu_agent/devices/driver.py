"""What the agent asks of devices, and the errors they answer with.

Watts, joules, MHz, GiB and shares of one; a driver converts from whatever its library speaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from services.contracts.nodes import DeviceInfo
from services.core.domain.errors import WattshiftError


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


@dataclass(frozen=True, slots=True)
class Sample:
    """One device now.

    ``energy_j`` counts up from an arbitrary start; None where the device has no counter. ``power_limit_w`` is the limit
    that the device says is in force, None where it does not say.
    """

    power_w: float
    utilization: float
    clock_mhz: int | None
    memory_used_gib: float | None
    energy_j: float | None
    power_limit_w: float | None = None


class Driver(Protocol):
    """The devices of one host. Calls block for milliseconds and may come from any one thread at a time."""

    name: Literal["nvml", "simulated"]

    def devices(self) -> list[DeviceInfo]:
        """Return the devices and what can be done with them; asked of the hardware once."""
        ...

    def read(self, index: int) -> Sample:
        """Return one device's readings."""
        ...

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock the SM clock."""
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

    def relative_speed(self, index: int) -> float | None:
        """Return the speed at the present clock as a share of the highest; None for real devices."""
        ...

    def close(self) -> None:
        """Release the library."""
        ...
