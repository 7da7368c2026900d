"""Energy of devices and host, split by owner into intervals.

The joules of each sample go to the gang that holds the device at that moment. An interval ends by the clock and
whenever a device changes owner, so it never mixes owners. The readings of the devices' counters over an interval are
stored apart from the split. The joules of a cut GPU are first split among its slices, by estimate; those of a GPU that
two gangs share are split between the two in the same way.
"""

import asyncio
import collections
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from gpu_agent.devices.driver import DeviceError, Driver, Sample, SliceSample
from gpu_agent.host_power import HostPower
from gpu_agent.processes import cpu_seconds
from gpu_agent.shim import clock, kernel_boot
from gpu_agent.spool import Spool
from services.contracts.nodes import Basis, DeviceInfo, DeviceReading, EnergyInterval, EnergySource, Usage
from services.core.accounting.meters import Booked, Bound, Counter, CounterCheck, Fault, advance, board_most_w, sampled
from services.core.accounting.slices import SliceUse, split_slice_energy
from services.core.domain.gpus import likeliest_gpu_model
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.metrics import counter
from services.kit.tasks import to_the_end

log = Log(__name__)

FAULTS = counter(
    "wattshift_agent_meter_faults_total",
    "Readings that were not taken for measurements, because the hardware cannot have used that: its energy was "
    "modelled instead.",
    ["meter", "fault"],
)
Number = TypeVar("Number", int, float)
_CLOCK_STEP_S = 1.0
_STOOD_STILL_S = 5.0  #: After so long without a sample, this process or its host stood still
_MOST_CLOCK_MHZ = 10_000  #: What no GPU's clock reaches
_SOURCES = tuple(EnergySource)  #: The least known last


@dataclass
class _Slice:
    """A slice between samples; its power and energy are its share of its GPU's."""

    info: DeviceInfo
    power_w: float = 0.0
    total_j: float = 0.0
    last: SliceSample | None = None


@dataclass
class _Device:
    """A GPU between samples. ``counter`` is None for one without an energy counter; ``slices`` are by index.

    ``power_w`` is the last plausible reading. ``exact``: whether the counter measured all of the interval. ``faults``:
    how often a reading was implausible.
    """

    info: DeviceInfo
    slices: dict[int, _Slice] = field(default_factory=dict[int, _Slice])
    counter: Counter | None = None
    opened_counter_j: float | None = None
    exact: bool = True
    check: CounterCheck = field(default_factory=CounterCheck)
    faults: int = 0
    power_w: float = 0.0
    at: float = 0.0
    integrated_j: float = 0.0
    total_j: float = 0.0
    last: Sample | None = None

    @property
    def bound(self) -> Bound:
        return Bound(board_most_w(self.info.model, (self.info.power_limit_w, self.info.highest_limit_w)))

    def metered_j(self) -> float:
        """Return the energy since the interval began, by the counter if it covers all of it."""
        if self.counter is None or self.opened_counter_j is None or not self.exact:
            return self.integrated_j
        return self.counter.reading_j - self.opened_counter_j


@dataclass
class _Owner:
    gpu_j: float = 0.0
    devices: set[int] = field(default_factory=set[int])
    source: EnergySource = EnergySource.COUNTER
    basis: Basis | None = None
    device_share: float = 0.0

    def add(self, device: int, energy_j: float, source: EnergySource, share: float, basis: Basis | None) -> None:
        if device not in self.devices:
            self.device_share += share
        self.devices.add(device)
        self.gpu_j += energy_j
        self.source = max(self.source, source, key=_SOURCES.index)
        self.basis = self.basis or basis


class Meter:
    """Measures one node.

    Args:
        static_w: Watts of everything but GPU and CPU; owners are charged by their share of the devices.
        shim_pids: Returns the root process of each allocation, for CPU time.
        progress_of: Returns the progress of an allocation; None if it reports none.
        activity_of: Returns how busy an allocation keeps its devices, 0 to 1; None where that is not known.
        apart: Whether energy that no gang used is reported by device, so that others can attribute it.
    """

    def __init__(
        self,
        driver: Driver,
        devices: Sequence[DeviceInfo],
        host: HostPower,
        spool: Spool,
        *,
        static_w: float,
        boot_id: str,
        shim_pids: Callable[[], dict[str, int]],
        progress_of: Callable[[str], float | None],
        lock: asyncio.Lock,
        activity_of: Callable[[str], float | None] = lambda _: None,
        boot: str = "",
        apart: bool = False,
    ) -> None:
        self._driver = driver
        self._apart = apart
        self._devices = _with_slices({}, devices)
        self._host = host
        self._spool = spool
        self._static_w = static_w
        self._boot_id = boot_id
        self._shim_pids = shim_pids
        self._progress_of = progress_of
        self._sequence = 0
        self._lock = lock
        self._activity_of = activity_of
        self._boot = boot
        self._owners: dict[int, str] = {}
        self._guests: dict[int, str] = {}
        self._usage: dict[str | None, _Owner] = {}
        self._cpu_s: dict[str, float] = {}
        self._when_ended: Callable[[str], datetime | None] = lambda _: None
        self._ended_at: dict[str, datetime] = {}
        self._faults = collections.Counter[tuple[str, str]]()
        self._sampled_at = self._opened_at = utc_now()
        self._sampled = self._opened = clock()

    def readings(self) -> list[DeviceReading]:
        """Return the last readings of GPUs, and of slices with their estimated shares of the power."""
        return [each for device in self._devices if device.last is not None for each in self._readings(device)]

    def describe(self) -> dict[str, dict[str, int]]:
        """Return how many readings were rejected since this agent began, by meter and by reason."""
        found: dict[str, dict[str, int]] = {}
        for (meter, fault), count in sorted(self._faults.items()):
            found.setdefault(meter, {})[fault] = count
        return found

    def _readings(self, device: _Device) -> Iterator[DeviceReading]:
        sample = device.last
        if sample is None:
            return
        energy_j = sample.energy_j
        yield DeviceReading(
            index=device.info.index,
            power_w=device.power_w,  # the last that can be: what else a driver says must not silence the node
            utilization=sample.utilization,
            clock_mhz=sample.clock_mhz,
            memory_used_gib=sample.memory_used_gib,
            enforced_limit_w=sample.power_limit_w,
            energy_j=energy_j if energy_j is not None and 0 <= energy_j <= 1e15 else None,
            read_at=self._sampled_at,
            counter_ratio=device.check.ratio,
            meter_faults=device.faults,
        )
        for index, each in sorted(device.slices.items()):
            if each.last is not None:
                yield DeviceReading(
                    index=index,
                    power_w=each.power_w,
                    utilization=each.last.activity or 0.0,
                    clock_mhz=sample.clock_mhz,
                    memory_used_gib=each.last.memory_used_gib,
                )

    @property
    def nobody_is_charged(self) -> bool:
        """Whether all of the energy is the node's own now; whoever takes a device ends the interval."""
        return not (self._owners or self._guests or self._apart)

    def energy_j(self, devices: Collection[int], at: float) -> float:
        """Return the energy of these devices since this agent began, up to a moment near the last sample.

        Between the sample and that moment, their power is assumed to be that of the sample.
        """
        return sum(
            each.total_j + (each.power_w * (at - device.at) if device.at else 0.0)
            for device in self._devices
            for index, each in ((device.info.index, device), *device.slices.items())
            if index in devices
        )

    async def begin(
        self,
        owners: dict[int, str],
        ended_at: Callable[[str], datetime | None],
        guests: Mapping[int, str] | None = None,
    ) -> None:
        """Start measuring, with the time since an earlier agent stopped as the first interval.

        Args:
            ended_at: Returns when an allocation ended, None if it has not: the energy of its devices in the gap is
                split by time between it and idle, and marked as modelled.
            guests: Who shares which device with its owner.
        """
        async with self._lock:
            self._when_ended = ended_at
            if self._spool.state is not None and self._resume(self._spool.state):
                self._ended_at = self._ends()
            await self._sample()
            await self._close(owners, guests or {})
            self._ended_at.clear()

    async def sample(self) -> None:
        """Read every device and book the energy since the last sample to its owner."""
        async with self._lock:
            await self._sample()

    async def close(self) -> None:
        async with self._lock:
            await self._sample()
            await self._close(self._owners, self._guests)

    async def switch(self, owners: dict[int, str], guests: Mapping[int, str] | None = None) -> None:
        """End the interval because devices get other owners, or other ``guests`` that share them."""
        async with self._lock:
            await self._sample()
            await self._close(owners, guests or {})

    async def recut(self, devices: Sequence[DeviceInfo]) -> None:
        """End the interval because the GPUs' slices have changed."""
        async with self._lock:
            await self._sample()
            await self._close(self._owners, self._guests)
            self._devices = _with_slices({device.info.index: device for device in self._devices}, devices)

    def _ends(self) -> dict[str, datetime]:
        """Return when those owners ended that have, though devices are still booked to them."""
        found = ((name, self._when_ended(name)) for name in {*self._owners.values(), *self._guests.values()})
        return {name: at for name, at in found if at is not None}

    async def _sample(self) -> None:
        stood_still = clock() - self._sampled > _STOOD_STILL_S and not self._ended_at and self._ends()
        if stood_still:  # what ended meanwhile, such as by its lease, is booked as after an absence
            await self._close(self._owners, self._guests)
            self._ended_at = stood_still
        try:
            for sample in await to_the_end(asyncio.to_thread(self._read_all)):
                self._advance(*sample)
            if stood_still:
                await self._close(self._owners, self._guests)
        finally:
            if stood_still:
                self._ended_at = {}

    def _read_all(self) -> list[tuple[_Device, Sample, float]]:
        """Return the readings of the devices that can be read, and the times of the readings."""
        samples: list[tuple[_Device, Sample, float]] = []
        for device in self._devices:
            try:
                samples.append((device, _plausible(self._driver.read(device.info.index), device), clock()))
            except DeviceError as error:
                if device.last is not None:
                    log.warning("device.unreadable", index=device.info.index, error=str(error))
                device.last = None
            for index, each in device.slices.items():
                each.last = SliceSample(None, None)  # if it cannot be read, its GPU's energy is split by size
                with suppress(DeviceError):
                    found = self._driver.read_slice(index)
                    used_gib = _within(found.memory_used_gib, each.info.memory_gib)
                    each.last = SliceSample(_within(found.activity, 1.0), used_gib)
        self._sampled, self._sampled_at = clock(), utc_now()  # at once: a busy host may not return here for a while
        return samples

    def _advance(self, device: _Device, sample: Sample, now: float) -> None:
        elapsed_s = now - device.at if device.at else 0.0
        booked, source = self._booked(device, sample, now, elapsed_s)
        energy_j = booked.energy_j
        if device.opened_counter_j is None and device.counter is not None:
            device.opened_counter_j = device.counter.reading_j
        if 0 <= sample.power_w <= device.bound.most_w:
            device.power_w = sample.power_w
        device.at, device.last = now, sample
        device.integrated_j += energy_j
        device.total_j += energy_j
        index = device.info.index
        basis = Basis.METER if booked.fault else None
        estimated = max(source, EnergySource.ESTIMATED, key=_SOURCES.index)
        if not device.slices and index in self._guests and index in self._owners:
            # Half of the idle draw each, the rest by how busy each is.
            pair = self._owners[index], self._guests[index]
            gangs = {name: SliceUse(1, in_use=True, activity=self._activity_of(name)) for name in pair}
            for owner, part_j in split_slice_energy(energy_j, _idle_w(device) * elapsed_s, gangs).items():
                self._give(owner, index, part_j, estimated, 0.5, basis)
            return
        if not device.slices:
            self._give(self._owners.get(index), index, energy_j, source, 1.0, basis)
            return
        uses = {
            index: SliceUse(each.info.sevenths, index in self._owners, each.last.activity if each.last else None)
            for index, each in device.slices.items()
        }
        for index, part_j in split_slice_energy(energy_j, _idle_w(device) * elapsed_s, uses).items():
            each = device.slices[index]
            share = each.info.sevenths / sum(other.info.sevenths for other in device.slices.values())
            each.power_w = part_j / elapsed_s if elapsed_s > 0 else device.power_w * share
            each.total_j += part_j
            is_split = any(other in self._owners for other in device.slices)
            self._give(self._owners.get(index), index, part_j, estimated if is_split else source, share, basis)

    def _booked(self, device: _Device, sample: Sample, now: float, elapsed_s: float) -> tuple[Booked, EnergySource]:
        """Return the energy since the last sample: by the counter, else by the power, else by a model."""
        by_power = sampled(device.bound, device.power_w, sample.power_w, elapsed_s)
        booked, source = by_power, EnergySource.MODELLED if sample.estimated else EnergySource.SAMPLED
        if sample.energy_j is None or not device.check.holds:
            device.counter = None
        elif device.counter is None:
            device.exact &= elapsed_s == 0
            if math.isfinite(sample.energy_j) and sample.energy_j >= 0:
                device.counter = Counter.first(sample.energy_j, now)
        else:
            simulated = self._driver.name == "simulated"
            source = EnergySource.SIMULATED if simulated else EnergySource.COUNTER
            # After a reading that was not believed, the counter may go on from that one: its rise is no difference.
            device.exact &= not device.counter.modelled_j and device.counter.doubted_j is None
            modelled_w = by_power.energy_j / elapsed_s if elapsed_s > 0 else 0.0
            device.counter, booked = advance(device.counter, device.bound, sample.energy_j, now, modelled_w)
            if not (booked.fault or by_power.fault or sample.estimated):
                device.check = device.check.after(elapsed_s, booked.energy_j, by_power.energy_j)
        if booked.fault and elapsed_s > 0:
            device.exact, device.faults = False, device.faults + 1
            self._note_fault(f"gpu{device.info.index}", booked.fault)
            return booked, EnergySource.MODELLED
        return Booked(booked.energy_j), source

    def _give(
        self, owner: str | None, index: int, energy_j: float, source: EnergySource, device_share: float,
        basis: Basis | None,
    ) -> None:  # fmt: skip
        """Book a device's energy to an owner; over a gap in which the owner ended, only until then."""
        alive = self._alive_share(owner)
        if alive < 1.0:
            source = EnergySource.MODELLED
            gone = 1 - alive
            self._usage.setdefault(None, _Owner()).add(index, energy_j * gone, source, device_share * gone, basis)
        self._usage.setdefault(owner, _Owner()).add(index, energy_j * alive, source, device_share * alive, basis)

    def _alive_share(self, owner: str | None) -> float:
        """Return the fraction of the time since the interval began during which an owner was alive."""
        if (ended_at := self._ended_at.get(owner or "")) is None:
            return 1.0
        start_at, end_at = self._bounds(self._sampled - self._opened)
        gap_s = max((end_at - start_at).total_seconds(), 1e-6)
        return min(max((ended_at - start_at).total_seconds() / gap_s, 0.0), 1.0)

    def _note_fault(self, meter: str, fault: Fault) -> None:
        self._faults[meter, fault.value] += 1
        FAULTS.labels(meter, fault.value).inc()
        if self._faults[meter, fault.value] == 1:
            log.warning("meter.not_believed", meter=meter, fault=fault.value)

    async def _close(self, next_owners: Mapping[int, str], next_guests: Mapping[int, str]) -> None:
        elapsed_s, interval = self._sampled - self._opened, None
        if elapsed_s > 0:
            interval = self._interval(elapsed_s, await asyncio.to_thread(cpu_seconds, self._shim_pids()))
            self._sequence += 1
            self._opened_at = interval.end_at
        self._opened = self._sampled
        self._owners, self._guests = dict(next_owners), dict(next_guests)
        self._usage = {}
        for device in self._devices:
            device.opened_counter_j = device.counter.reading_j if device.counter else None
            device.integrated_j, device.exact = 0.0, True
        if interval is not None:
            await self._spool.append(interval, self._state())

    def _interval(self, elapsed_s: float, cpu_s: dict[str, float]) -> EnergyInterval:
        """Return the energy used since the last interval, by owner."""
        used_cpu_s = {name: max(total - self._cpu_s.get(name, 0.0), 0.0) for name, total in cpu_s.items()}
        self._cpu_s = cpu_s
        host = self._host.advance(elapsed_s, sum(used_cpu_s.values()))
        for fault in host.faults:
            self._note_fault("cpu", fault)
        by_model = Basis.METER if host.faults else None
        static_j = self._static_w * elapsed_s
        nobody = self._usage.setdefault(None, _Owner())
        usages = [
            Usage(
                allocation_id=name,
                devices=sorted(owner.devices),
                gpu_energy_j=owner.gpu_j,
                cpu_energy_j=used_cpu_s.get(name, 0.0) * host.j_per_cpu_s,
                static_energy_j=static_j * owner.device_share / len(self._devices),
                source=owner.source,
                progress_done=self._progress_of(name),
                basis=owner.basis or by_model,
                until=self._ended_at[name] if self._alive_share(name) < 1 else None,
            )
            for name, owner in sorted((name, owner) for name, owner in self._usage.items() if name is not None)
        ]
        rest = Usage(
            allocation_id=None,
            devices=sorted(nobody.devices),
            gpu_energy_j=nobody.gpu_j,
            cpu_energy_j=max(host.total_j - sum(usage.cpu_energy_j for usage in usages), 0.0),
            static_energy_j=max(static_j - sum(usage.static_energy_j for usage in usages), 0.0),
            source=nobody.source,
            basis=nobody.basis or by_model,
        )
        usages += self._by_device(rest) if self._apart and self._devices else [rest]
        start_at, end_at = self._bounds(elapsed_s)
        return EnergyInterval(
            boot_id=self._boot_id,
            sequence=self._sequence,
            start_at=start_at,
            end_at=end_at,
            metered_gpu_energy_j=sum(device.metered_j() for device in self._devices),
            usages=usages,
            cpu_source=EnergySource.MODELLED if host.faults else None,
        )

    def _by_device(self, rest: Usage) -> list[Usage]:
        """Return the unused energy by GPU, with the host's energy in equal parts."""
        of_host = ("cpu_energy_j", "static_energy_j")
        parts = {name: getattr(rest, name) / len(self._devices) for name in of_host}
        return [
            rest.model_copy(update={**parts, "devices": [each.info.index], "gpu_energy_j": each.integrated_j})
            for each in self._devices
        ]

    def _bounds(self, elapsed_s: float) -> tuple[datetime, datetime]:
        """Return the interval's start and end on the calendar clock, which may have been set in between."""
        end_at, start_at, length = self._sampled_at, self._opened_at, timedelta(seconds=elapsed_s)
        if abs((end_at - start_at - length).total_seconds()) > _CLOCK_STEP_S:
            start_at = end_at - length
        return start_at, end_at if end_at > start_at else start_at + length

    def _state(self) -> dict[str, Any]:
        """Return what the next agent needs to account for the time until it runs."""
        return {
            "kernel_boot": kernel_boot() + self._boot,
            "clock": self._opened,
            "at": self._opened_at.isoformat(),
            "owners": {str(device): owner for device, owner in self._owners.items()},
            "guests": {str(device): guest for device, guest in self._guests.items()},
            "devices": {
                d.info.uuid: [d.counter and d.counter.reading_j, d.power_w, d.at] for d in self._devices if d.at
            },
            "cpu_s": self._cpu_s,
            "host": self._host.state(),
        }

    def _resume(self, state: dict[str, Any]) -> bool:
        """Resume an earlier agent's counters; return False after a restart of the host, which resets them."""
        try:
            if state["kernel_boot"] != kernel_boot() + self._boot:
                return False
            readings = [state["devices"].get(device.info.uuid, (None, 0.0, 0.0)) for device in self._devices]
            read = [(j if j is None else float(j), float(power_w), float(at)) for j, power_w, at in readings]
            owners = {int(device): str(owner) for device, owner in state["owners"].items()}
            guests = {int(device): str(guest) for device, guest in state.get("guests", {}).items()}
            cpu_s = {str(name): float(total) for name, total in state["cpu_s"].items()}
            opened, opened_at = float(state["clock"]), datetime.fromisoformat(state["at"])
            self._host.restore(state["host"])  # the last that may fail: nothing is half resumed
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            log.warning("meter.state_unreadable", error=str(error))
            return False
        for device, (counter_j, power_w, at) in zip(self._devices, read, strict=True):
            device.opened_counter_j, device.power_w, device.at = counter_j, power_w, at
            device.counter = None if counter_j is None else Counter.first(counter_j, at)
        self._owners, self._guests, self._cpu_s = owners, guests, cpu_s
        self._opened, self._opened_at = opened, opened_at
        return True


def _with_slices(known: Mapping[int, _Device], devices: Sequence[DeviceInfo]) -> list[_Device]:
    """Return the GPUs among some devices, keeping the known ones with their readings, and the slices of each."""
    gpus: list[_Device] = []
    for info in (each for each in devices if each.parent is None):
        gpu = known.get(info.index) or _Device(info)
        before = {each.info.uuid: each for each in gpu.slices.values()}
        slices = [each for each in devices if each.parent == info.index]
        gpu.info, gpu.slices = info, {each.index: before.get(each.uuid) or _Slice(each) for each in slices}
        gpus.append(gpu)
    return gpus


def _plausible(sample: Sample, device: _Device) -> Sample:
    """Return a sample without what no device can show, which must not silence the node.

    Power and energy stay as they are: ``advance`` and ``sampled`` say what is booked instead.
    """
    return replace(
        sample,
        utilization=_within(sample.utilization, 1.0) or 0.0,
        clock_mhz=_within(sample.clock_mhz, _MOST_CLOCK_MHZ),
        memory_used_gib=_within(sample.memory_used_gib, device.info.memory_gib),
        power_limit_w=_within(sample.power_limit_w, device.bound.most_w),
    )


def _within(value: Number | None, most: float) -> Number | None:
    """Return a reading from 0 to the most that it can be; None for any other, NaN included."""
    return value if value is not None and 0 <= value <= most else None


def _idle_w(device: _Device) -> float:
    """Return a GPU's idle draw, from what is known of its board; 0 if unknown."""
    board = likeliest_gpu_model(device.info.model)
    return board.idle_w if board else 0.0
