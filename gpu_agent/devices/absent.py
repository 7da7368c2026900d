"""A host without devices that the agent can use: NVML is missing, or shows no GPU.

Such a node registers, so that operators see what is wrong, and takes no work. Nothing is simulated in its place.
"""

from typing import Literal, NoReturn

from gpu_agent.devices.driver import Cut, DeadDevice, DeviceEvent, DeviceLostError, Health, Sample, SliceSample
from services.contracts.nodes import DeviceInfo


class AbsentDriver:
    """No devices."""

    name: Literal["nvml", "simulated"] = "nvml"

    def __init__(self, why: str) -> None:
        self.why = why

    def devices(self) -> list[DeviceInfo]:
        return []

    def read(self, index: int) -> Sample:
        """Raise DeviceLostError, as every other request to a device does."""
        self._refuse(index)

    def read_slice(self, index: int) -> SliceSample:
        """Raise DeviceLostError."""
        self._refuse(index)

    def dead(self) -> list[DeadDevice]:
        return []

    def health(self, index: int) -> Health:
        """Raise DeviceLostError."""
        self._refuse(index)

    def events(self) -> list[DeviceEvent]:
        return []

    def refresh(self) -> bool:
        """Return False: nobody else changes anything."""
        return False

    def cut(self, gpu: int, places: Cut) -> None:
        """Raise DeviceLostError."""
        self._refuse(gpu)

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Raise DeviceLostError."""
        self._refuse(index)

    def reset_clock(self, index: int) -> None:
        """Raise DeviceLostError."""
        self._refuse(index)

    def set_power_limit(self, index: int, limit_w: float) -> None:
        """Raise DeviceLostError."""
        self._refuse(index)

    def reset_power_limit(self, index: int) -> None:
        """Raise DeviceLostError."""
        self._refuse(index)

    def device_nodes(self) -> dict[int, tuple[int, int]]:
        return {}

    def relative_speed(self, index: int) -> float | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""

    def _refuse(self, index: int) -> NoReturn:
        raise DeviceLostError(f"there is no device {index}: {self.why}")
