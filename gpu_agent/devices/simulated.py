"""Devices that exist as numbers: power from load and clock, an energy counter that outlives the agent."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu_agent import files
from gpu_agent.devices.driver import NotSupportedError, Sample
from gpu_agent.devices.response import Response
from gpu_agent.shim import clock, kernel_boot
from services.contracts.nodes import DeviceInfo
from services.core.domain.gpus import gpu_model
from services.kit.logging import Log

log = Log(__name__)

_CONTEXT_GIB = 0.4
"""Memory an idle device reports in use."""
_RESIDENT_SHARE = 0.6
"""Share of its memory that a loaded device reports in use."""


@dataclass
class _Device:
    limit_w: float
    clock_mhz: int
    energy_j: float = 0.0
    power_w: float = 0.0


class SimulatedDriver:
    """GPUs of one model.

    Args:
        model: Any name of a model in ``services.core.domain.gpus``.
        load_of: The load (0..1) of a device, from what runs on it.
        state_file: Keeps counters and settings. While the agent is away the devices go on drawing what they drew last,
            as real ones would, and the counter shows it afterwards. A restart of the host stops the counter.
        boot: Identifies a boot of the simulated host.

    Raises:
        DomainError: no GPU model has that name.
    """

    name: Literal["nvml", "simulated"] = "simulated"

    def __init__(
        self, model: str, count: int, load_of: Callable[[int], float], state_file: Path, node_id: str, boot: str = ""
    ) -> None:
        self._model = gpu_model(model)
        self._response = Response(self._model)
        self._load_of = load_of
        self._state_file = state_file
        self._node_id = node_id
        self._boot = boot
        self._devices = [_Device(self._model.peak_w, self._model.highest_clock_mhz) for _ in range(count)]
        self._at = clock()
        self._restore()
        self._advance()

    def devices(self) -> list[DeviceInfo]:
        """Return the simulated devices; they accept every control and cannot be partitioned."""
        return [
            DeviceInfo(
                index=index,
                uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'wattshift:{self._node_id}:{index}')}",
                model=self._model.name,
                memory_gib=self._model.memory_gib,
                power_limit_w=self._model.peak_w,
                lowest_limit_w=self._model.lowest_limit_w,
                can_set_clock=True,
                can_set_power_limit=True,
                clocks_mhz=self._response.clocks_mhz,
            )
            for index in range(len(self._devices))
        ]

    def read(self, index: int) -> Sample:
        """Bring all counters up to now and return one device's readings."""
        self._advance(save=index == 0)  # once for each round over the devices
        device = self._devices[index]
        load = self._load(index)
        resident_gib = self._model.memory_gib * _RESIDENT_SHARE if load else _CONTEXT_GIB
        clock_mhz = round(self._clock_mhz(index))
        return Sample(device.power_w, load, clock_mhz, resident_gib, device.energy_j, device.limit_w)

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock the clock to one of the model's."""
        if clock_mhz not in self._response.clocks_mhz:
            raise NotSupportedError(f"{self._model.name} has no clock of {clock_mhz} MHz")
        self._change(index, clock_mhz=clock_mhz)

    def reset_clock(self, index: int) -> None:
        """Return to the highest clock."""
        self._change(index, clock_mhz=self._model.highest_clock_mhz)

    def set_power_limit(self, index: int, limit_w: float) -> None:
        """Cap the power within the board's range."""
        if not self._model.lowest_limit_w <= limit_w <= self._model.peak_w:
            raise NotSupportedError(f"{self._model.name} accepts limits of {self._model.lowest_limit_w:g} W and more")
        self._change(index, limit_w=limit_w)

    def reset_power_limit(self, index: int) -> None:
        """Return to the board's limit."""
        self._change(index, limit_w=self._model.peak_w)

    def relative_speed(self, index: int) -> float | None:
        """Return the speed at the clock that lock and limit leave."""
        return self._response.relative_speed(self._clock_mhz(index))

    def close(self) -> None:
        """Save the counters."""
        self._advance()

    def _load(self, index: int) -> float:
        return min(max(self._load_of(index), 0.0), 1.0)

    def _clock_mhz(self, index: int) -> float:
        device = self._devices[index]
        return self._response.clock_under_limit_mhz(self._load(index), device.clock_mhz, device.limit_w)

    def _change(self, index: int, *, clock_mhz: int | None = None, limit_w: float | None = None) -> None:
        self._advance()
        device = self._devices[index]
        device.clock_mhz = clock_mhz or device.clock_mhz
        device.limit_w = limit_w or device.limit_w
        self._advance()

    def _advance(self, *, save: bool = True) -> None:
        """Count the time since the last call at the power drawn then, and read the loads again."""
        now = clock()
        for index, device in enumerate(self._devices):
            device.energy_j += device.power_w * (now - self._at)
            device.power_w = self._response.power_w(self._load(index), self._clock_mhz(index))
        self._at = now
        if save:
            self._save()

    def _save(self) -> None:
        state = {
            "kernel_boot": kernel_boot() + self._boot,
            "at": self._at,
            "devices": [[d.limit_w, d.clock_mhz, d.energy_j, d.power_w] for d in self._devices],
        }
        try:
            files.replace(self._state_file, json.dumps(state).encode(), durable=False)
        except OSError as error:
            log.warning("simulated.state_not_saved", error=str(error))

    def _restore(self) -> None:
        try:
            state: dict[str, Any] = json.loads(self._state_file.read_bytes())
            saved = [_Device(float(w), int(mhz), float(j), float(now_w)) for w, mhz, j, now_w in state["devices"]]
            if len(saved) != len(self._devices) or saved[0].clock_mhz not in self._response.clocks_mhz:
                return  # other devices than last time: new counters
            self._devices = saved
            if state["kernel_boot"] == kernel_boot() + self._boot:
                self._at = min(float(state["at"]), self._at)
            else:
                for device in saved:
                    device.power_w = 0.0
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("simulated.state_unreadable", error=str(error))
