"""Clocks and power limits that the control plane has set, remembered so that they can be taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import orjson

from gpu_agent import files
from gpu_agent.devices.driver import DeviceError, Driver, NotPermittedError, NotSupportedError
from services.kit.logging import Log

log = Log(__name__)


class Controls:
    """Sets what a device allows, and restores only what it has set: an operator's own limits are left alone.

    Args:
        lock: Held while the driver is used.
    """

    def __init__(self, driver: Driver, state_file: Path, lock: asyncio.Lock) -> None:
        self._driver = driver
        self._file = state_file
        self._lock = lock
        self._clocks: set[int] = set()
        self._limits: set[int] = set()
        self._load()

    async def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock a device's clock.

        Raises:
            DeviceError: The device refuses.
        """
        self._clocks.add(index)
        self._save()  # first: a lock that nobody remembers would stay
        async with self._lock:
            await asyncio.to_thread(self._driver.set_clock, index, clock_mhz)

    async def set_power_limit(self, index: int, limit_w: float) -> None:
        """Cap a device's power.

        Raises:
            DeviceError: The device refuses.
        """
        self._limits.add(index)
        self._save()
        async with self._lock:
            await asyncio.to_thread(self._driver.set_power_limit, index, limit_w)

    @property
    def in_force(self) -> bool:
        """Whether anything is set that is not the default."""
        return bool(self._clocks or self._limits)

    async def restore(self) -> None:
        """Return every device to the defaults, where this agent or an earlier one has changed them."""
        if not self.in_force:
            return
        async with self._lock:
            self._clocks = await self._reset(self._clocks, self._driver.reset_clock)
            self._limits = await self._reset(self._limits, self._driver.reset_power_limit)
        self._save()
        log.info("controls.restored", still_set=sorted(self._clocks | self._limits))

    async def _reset(self, indices: set[int], reset: Callable[[int], None]) -> set[int]:
        """Reset devices; return those that have to be tried again."""
        left: set[int] = set()
        for index in sorted(indices):
            try:
                await asyncio.to_thread(reset, index)
            except (NotSupportedError, NotPermittedError) as error:
                log.warning("controls.refused", index=index, error=str(error))  # then it was never set
            except DeviceError as error:
                log.warning("controls.not_restored", index=index, error=str(error))
                left.add(index)
        return left

    def _save(self) -> None:
        state = {"clocks": sorted(self._clocks), "limits": sorted(self._limits)}
        try:
            files.replace(self._file, orjson.dumps(state))
        except OSError as error:
            log.error("controls.not_saved", error=str(error))

    def _load(self) -> None:
        try:
            state = orjson.loads(self._file.read_bytes())
            self._clocks, self._limits = set(map(int, state["clocks"])), set(map(int, state["limits"]))
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("controls.unreadable", error=str(error))
