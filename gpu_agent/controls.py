"""Clocks and power limits of gangs on their devices, remembered so that they can be restored to the defaults.

Every tick sets the devices of running gangs as ordered and all others to the defaults. A value is on disk before it is
set on the device, and is forgotten only once the device is back at its default, so that a restarted agent knows what an
earlier one may have left.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gpu_agent import files
from gpu_agent.devices.driver import DeviceError, Driver, NotPermittedError, NotSupportedError
from services.contracts.nodes import ControlsStatus, DeviceControls
from services.core.domain.controls import ControlKind
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.tasks import to_the_end

log = Log(__name__)

LIMIT, CLOCK = ControlKind.POWER_LIMIT, ControlKind.CLOCK
_NAMES = {CLOCK: "clocks", LIMIT: "limits"}
Key = tuple[ControlKind, int]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """The controls for the devices that a gang holds on this node."""

    allocation_id: str
    devices: tuple[int, ...]
    settings: DeviceControls

    @property
    def key(self) -> tuple[str, int]:
        """The gang, and the revision of its controls."""
        return self.allocation_id, self.settings.revision

    @property
    def values(self) -> dict[ControlKind, float]:
        """The values to set, by kind; kinds that should be at their default are left out."""
        asked = {LIMIT: self.settings.power_limit_w, CLOCK: self.settings.clock_mhz}
        return {kind: value for kind, value in asked.items() if value is not None}


class Controls:
    """Sets the controls that a device allows, and restores only what it has set: operators keep their own limits."""

    def __init__(self, driver: Driver, state_file: Path, lock: asyncio.Lock) -> None:
        self._driver = driver
        self._file = state_file
        self._lock = lock
        self._put = files.read(state_file, _left, "controls.unreadable") or {}
        self._refused: dict[tuple[str, int], dict[ControlKind, str]] = {}
        self._found: dict[tuple[str, int], tuple[datetime, list[float]]] = {}
        self._failing: set[Key] = set()
        self._saved: dict[str, list[int]] | None = None

    @property
    def in_force(self) -> bool:
        """Whether any device has, or may have, a value other than the default."""
        return bool(self._put)

    def value(self, kind: ControlKind, index: int) -> float | None:
        """Return the value set on a device; None if it is at its default, or if only an earlier agent knew it."""
        return self._put.get((kind, index))

    def is_clean(self, devices: Iterable[int]) -> bool:
        """Return whether none of these devices still has controls of an earlier gang."""
        return not any((kind, index) in self._put for kind in ControlKind for index in devices)

    def status(self, order: Order) -> ControlsStatus:
        refused, found = self._refused.get(order.key, {}), self._found.get(order.key)
        reached = {
            kind: value
            for kind, value in order.values.items()
            if kind not in refused and all(self.value(kind, index) == value for index in order.devices)
        }
        clock = reached.get(CLOCK)
        return ControlsStatus(
            revision=order.settings.revision,
            power_limit_w=reached.get(LIMIT),
            clock_mhz=None if clock is None else round(clock),
            refused=refused,
            since=found and found[0],
            enforced_w=found[1] if found else [],
        )

    def has_reached(self, order: Order) -> bool:
        """Return whether an order is in force on all its devices, with nothing refused."""
        status, wanted = self.status(order), order.settings
        return (status.power_limit_w, status.clock_mhz) == (wanted.power_limit_w, wanted.clock_mhz)

    async def enforce(self, orders: Sequence[Order]) -> bool:
        """Set every device according to the gangs' orders; return whether that changed anything.

        If a device of a gang refuses a kind of control, the gang continues with all its devices at that kind's default.
        """
        known = {order.key for order in orders}
        self._refused = {key: kinds for key, kinds in self._refused.items() if key in known}
        before = dict(self._put)
        if before == self._wanted(orders):
            if known - self._found.keys():
                async with self._lock:
                    await self._look_back(orders)
            return False
        async with self._lock:
            await self._take_back(self._wanted(orders))
            for order in orders:
                for kind, value in order.values.items():
                    await self._give(order, kind, value)
            await self._take_back(self._wanted(orders))
            await self._look_back(orders)
        return self._put != before or bool(self._refused)

    async def _look_back(self, orders: Sequence[Order]) -> None:
        """Record when the devices came to match their gangs' orders exactly, and the power limits they report then."""
        wanted, found = self._wanted(orders), dict(self._found)
        self._found = {}
        for order in orders:
            if all(self._put.get(at) == wanted.get(at) for at in product(ControlKind, order.devices)):
                limits = self._limits_w, order.devices
                self._found[order.key] = found.get(order.key) or (utc_now(), await self._ask(*limits))

    @staticmethod
    async def _ask(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Have the driver do something, in a thread that is always awaited to its end."""
        return await to_the_end(asyncio.to_thread(work, *arguments, **options))

    def _limits_w(self, devices: Iterable[int]) -> list[float]:
        """Return the power limits of the devices that report one."""
        told: list[float] = []
        for index in devices:
            with suppress(DeviceError):
                if (limit_w := self._driver.read(index).power_limit_w) is not None:
                    told.append(limit_w)
        return told

    def _wanted(self, orders: Sequence[Order]) -> dict[Key, float | None]:
        return {
            (kind, index): value
            for order in orders
            for kind, value in order.values.items()
            if kind not in self._refused.get(order.key, {})
            for index in order.devices
        }

    async def _give(self, order: Order, kind: ControlKind, value: float) -> None:
        for index in order.devices:
            if kind in self._refused.get(order.key, {}) or self._put.get((kind, index)) == value:
                continue
            known = (kind, index) in self._put
            self._put[kind, index] = None
            if not known and not self._save():
                del self._put[kind, index]  # what nobody would remember is not set
                return
            try:
                if kind is LIMIT:
                    await self._ask(self._driver.set_power_limit, index, value)
                else:
                    await self._ask(self._driver.set_clock, index, round(value))
            except (NotSupportedError, NotPermittedError) as error:
                log.warning("controls.refused", index=index, kind=kind.value, value=value, error=str(error))
                self._refused.setdefault(order.key, {})[kind] = f"device {index}: {error}"
                return
            except DeviceError as error:
                self._note_failure((kind, index), error)
            else:
                self._failing.discard((kind, index))
                self._put[kind, index] = value

    async def _take_back(self, wanted: Mapping[Key, float | None]) -> None:
        """Reset controls that are no longer wanted; those that cannot be reset now are tried again later."""
        for key in sorted(self._put.keys() - wanted.keys()):
            kind, index = key
            reset = self._driver.reset_power_limit if kind is LIMIT else self._driver.reset_clock
            try:
                await self._ask(reset, index)
            except (NotSupportedError, NotPermittedError) as error:
                log.warning("controls.refused", index=index, kind=kind.value, error=str(error))  # then it was never set
            except DeviceError as error:
                self._note_failure(key, error)
                self._put[key] = None
                continue
            self._failing.discard(key)
            del self._put[key]
        self._save()

    def _note_failure(self, key: Key, error: DeviceError) -> None:
        if key not in self._failing:
            log.warning("controls.failed", index=key[1], kind=key[0].value, error=str(error))
        self._failing.add(key)

    def _save(self) -> bool:
        state = {name: sorted(index for each, index in self._put if each is kind) for kind, name in _NAMES.items()}
        if state != self._saved:
            self._saved = state if files.store(self._file, state, "controls.not_saved") else None
        return state == self._saved


def _left(state: Any) -> dict[Key, float | None]:
    return {(kind, int(index)): None for kind, name in _NAMES.items() for index in state[name]}
