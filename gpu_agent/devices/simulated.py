"""Simulated devices: power from load and clock, and an energy counter that outlives the agent.

They are cut into MIG slices as a real driver does it: in MIG mode, which is switched only while nothing runs on the
GPU, and slice by slice, each at a place where it may begin. A cut GPU draws the sum of its slices' loads.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from gpu_agent import files
from gpu_agent.devices import driver
from gpu_agent.shim import clock, kernel_boot
from services.contracts.nodes import DeviceInfo
from services.core.domain.gpus import SLICE_SEVENTHS, GpuModel, gpu_model, mig_memory_gib
from services.core.domain.mig import WHOLE, SlicePlace, fits, gpu_of, profile_name, slice_index

_COLD_C, _WARMTH_C = 28.0, 46.0  #: Of a GPU that draws nothing, and how much warmer one is that draws all it can
_CONTEXT_GIB = 0.4  #: Memory an idle device reports in use
_RESIDENT_SHARE = 0.6  #: Share of its memory that a loaded device reports in use


POWER_EXPONENT = 2.0
"""Dynamic power over clock. Voltage falls with the clock but has a floor, so the exponent lies below the textbook 3."""
COMPUTE_SHARE = 0.75
"""Share of a step that stretches when the clock falls; the rest waits for memory and the network and does not."""
CLOCK_STEP_MHZ = 15


@dataclass(frozen=True, slots=True)
class Response:
    """The power and speed of a board of one model at a given load and clock; limits and idle draw are the model's."""

    model: GpuModel

    @property
    def clocks_mhz(self) -> list[int]:
        """The clocks the board can be locked to, in ascending order: steps down from the highest."""
        lowest, highest = self.model.lowest_clock_mhz, self.model.highest_clock_mhz
        return list(range(highest, lowest - 1, -CLOCK_STEP_MHZ))[::-1]

    def power_w(self, load: float, clock_mhz: float) -> float:
        """Return the draw at a load (0..1) and clock with no limit in force."""
        share = clock_mhz / self.model.highest_clock_mhz
        return self.model.idle_w + (self.model.peak_w - self.model.idle_w) * load * share**POWER_EXPONENT

    def clock_under_limit_mhz(self, load: float, clock_mhz: float, limit_w: float) -> float:
        """Return the clock to which the device drops so that it draws no more than its limit."""
        if self.power_w(load, clock_mhz) <= limit_w:
            return clock_mhz
        dynamic_w = (self.model.peak_w - self.model.idle_w) * load
        share = (max(limit_w - self.model.idle_w, 0.0) / dynamic_w) ** (1 / POWER_EXPONENT)
        return max(share * self.model.highest_clock_mhz, self.model.lowest_clock_mhz)

    def relative_speed(self, clock_mhz: float) -> float:
        """Return the speed at a clock as a fraction of the speed at the highest."""
        return 1 / (COMPUTE_SHARE * self.model.highest_clock_mhz / clock_mhz + (1 - COMPUTE_SHARE))


@dataclass
class _Slice:
    place: SlicePlace
    load: float = 0.0
    busy_s: float = 0.0
    read_busy_s: float = 0.0
    read_at: float = 0.0

    def activity(self, now: float) -> float:
        """Return the mean load since the last call."""
        elapsed_s = now - self.read_at
        share = (self.busy_s - self.read_busy_s) / elapsed_s if self.read_at and elapsed_s > 0 else self.load
        self.read_busy_s, self.read_at = self.busy_s, now
        return min(max(share, 0.0), 1.0)


@dataclass
class _Device:
    """A GPU. ``slices`` is None for one that is not in MIG mode."""

    limit_w: float
    clock_mhz: int
    energy_j: float = 0.0
    power_w: float = 0.0
    slices: list[_Slice] | None = field(default=None)


class SimulatedDriver(driver.Driver):
    """GPUs of one model.

    Args:
        model: The name of any model in ``services.core.domain.gpus``.
        load_of: Returns the load (0..1) of a device, from what runs on it.
        state_file: Keeps counters and settings. While the agent is away the devices go on drawing what they drew last,
            as real ones would, and the counter shows it afterwards. A restart of the host stops the counter.

    Raises:
        DomainError: No GPU model has that name.
    """

    name: Literal["nvml", "simulated"] = "simulated"

    def __init__(
        self,
        model: str,
        count: int,
        load_of: Callable[[int], float],
        state_file: Path,
        node_id: str,
        boot: str = "",
        is_held: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._model = gpu_model(model)
        self._response = Response(self._model)
        self._load_of = load_of
        self._state_file = state_file
        self._node_id = node_id
        self._boot = boot
        self._is_held = is_held
        self._sickness = Sickness(state_file.with_name("simulated_health.json"))
        self._faults = CutFaults(state_file.with_name("simulated_faults.json"))
        self._devices = [_Device(self._model.peak_w, self._model.highest_clock_mhz) for _ in range(count)]
        self._at = clock()
        files.read(state_file, self._restore, "simulated.state_unreadable")
        self._advance()

    def devices(self) -> list[DeviceInfo]:
        """Return the simulated GPUs, which accept every control, and their slices."""
        gpus = [
            DeviceInfo(
                index=index,
                uuid=self._uuid("GPU", str(index)),
                mig_enabled=device.slices is not None,
                model=self._model.name,
                memory_gib=self._model.memory_gib,
                power_limit_w=self._model.peak_w,
                lowest_limit_w=self._model.lowest_limit_w,
                can_set_clock=True,
                can_set_power_limit=True,
                can_partition=mig_memory_gib(self._model) is not None,
                clocks_mhz=self._response.clocks_mhz,
            )
            for index, device in enumerate(self._devices)
        ]
        devices = enumerate(self._devices)
        return gpus + [self._describe_slice(gpu, each.place) for gpu, device in devices for each in device.slices or ()]

    def _describe_slice(self, gpu: int, place: SlicePlace) -> DeviceInfo:
        return DeviceInfo(
            index=slice_index(gpu, place.start),
            uuid=self._uuid("MIG", f"{gpu}:{place.sevenths}g@{place.start}"),
            parent=gpu,
            profile=profile_name(self._model, place.sevenths),
            sevenths=place.sevenths,
            start=place.start,
            model=self._model.name,
            memory_gib=self._slice_memory_gib(place),
            power_limit_w=self._model.peak_w,
        )

    def _uuid(self, kind: str, name: str) -> str:
        return f"{kind}-{uuid.uuid5(uuid.NAMESPACE_URL, f'wattshift:{self._node_id}:{name}')}"

    def _slice_memory_gib(self, place: SlicePlace) -> float:
        memory_gib = mig_memory_gib(self._model)
        return memory_gib[SLICE_SEVENTHS.index(place.sevenths)] if memory_gib else self._model.memory_gib

    def read(self, index: int) -> driver.Sample:
        """Bring all counters up to now and return one GPU's readings."""
        driver.check_whole(index)
        self._sickness.health(index)
        self._advance(save=index == 0)  # once for each round over the devices
        device = self._devices[index]
        load = self._load(index)
        resident_gib = self._model.memory_gib * _RESIDENT_SHARE if load else _CONTEXT_GIB
        clock_mhz = round(self._clock_mhz(index))
        return driver.Sample(device.power_w, load, clock_mhz, resident_gib, device.energy_j, device.limit_w)

    def read_slice(self, index: int) -> driver.SliceSample:
        """Return the mean load of a slice since it was last read."""
        self._advance(save=False)
        each = self._slice(index)
        activity = each.activity(self._at)
        resident_gib = self._slice_memory_gib(each.place) * _RESIDENT_SHARE if each.load else 0.0
        return driver.SliceSample(activity, resident_gib)

    def health(self, index: int) -> driver.Health:
        """Return a healthy state, as warm as its power makes it, except for what the file of states says."""
        health = self._sickness.health(index)
        if health.temperature_c is not None:
            return health
        device = self._devices[index]
        return replace(health, temperature_c=_COLD_C + _WARMTH_C * device.power_w / self._model.peak_w)

    def events(self) -> list[driver.DeviceEvent]:
        return self._sickness.events()

    def cut(self, gpu: int, places: driver.Cut) -> None:
        """Cut a GPU in the same steps and with the same errors as a real driver."""
        device = self._devices[gpu]
        if mig_memory_gib(self._model) is None:
            raise driver.NotSupportedError(f"{self._model.name} cannot be cut")
        if not fits(places or ()):
            raise driver.NotSupportedError(
                "Insufficient Resources: the slices overlap, or one may not begin where it is to"
            )
        for each in [each for each in device.slices or () if each.place not in (places or ())]:
            if self._is_held(slice_index(gpu, each.place.start)):
                raise driver.DeviceBusyError(f"In use by another client: the slice at {each.place.start}")
            self._faults.check("destroy")
            self._recut(device, [other for other in device.slices or () if other is not each])
        if (device.slices is None) != (places is None):
            if self._is_held(gpu):
                raise driver.DeviceBusyError("In use by another client: MIG mode cannot be switched")
            self._faults.check("mode")
            self._recut(device, None if places is None else [])
        there = {each.place for each in device.slices or ()}
        for place in [place for place in places or () if place not in there]:
            self._faults.check("create")
            self._recut(device, sorted([*(device.slices or ()), _Slice(place)], key=lambda each: each.place.start))

    def _recut(self, device: _Device, slices: list[_Slice] | None) -> None:
        self._advance(save=False)
        device.slices = slices
        self._advance()

    def _slice(self, index: int) -> _Slice:
        gpu = gpu_of(index)
        for each in (self._devices[gpu].slices or ()) if gpu < len(self._devices) else ():
            if slice_index(gpu, each.place.start) == index:
                return each
        raise driver.DeviceLostError(f"there is no slice {index}")

    def set_clock(self, index: int, clock_mhz: int) -> None:
        """Lock the clock to one of the model's clocks."""
        if clock_mhz not in self._response.clocks_mhz:
            raise driver.NotSupportedError(f"{self._model.name} has no clock of {clock_mhz} MHz")
        self._change(index, clock_mhz=clock_mhz)

    def reset_clock(self, index: int) -> None:
        self._change(index, clock_mhz=self._model.highest_clock_mhz)

    def set_power_limit(self, index: int, limit_w: float) -> None:
        if not self._model.lowest_limit_w <= limit_w <= self._model.peak_w:
            raise driver.NotSupportedError(
                f"{self._model.name} accepts limits of {self._model.lowest_limit_w:g} W and more"
            )
        self._change(index, limit_w=limit_w)

    def reset_power_limit(self, index: int) -> None:
        self._change(index, limit_w=self._model.peak_w)

    def relative_speed(self, index: int) -> float | None:
        """Return the speed at the clock that results from lock and limit."""
        return self._response.relative_speed(self._clock_mhz(gpu_of(index)))

    def close(self) -> None:
        self._advance()

    def _load(self, index: int) -> float:
        slices = self._devices[index].slices
        if slices is None:
            return self._share(index)
        return sum(self._share(slice_index(index, each.place.start)) * each.place.sevenths for each in slices) / WHOLE

    def _share(self, index: int) -> float:
        return min(max(self._load_of(index), 0.0), 1.0)

    def _clock_mhz(self, index: int) -> float:
        device = self._devices[index]
        return self._response.clock_under_limit_mhz(self._load(index), device.clock_mhz, device.limit_w)

    def _change(self, index: int, **change: float) -> None:
        driver.check_whole(index)
        self._advance()
        self._devices[index] = replace(self._devices[index], **change)
        self._advance()

    def _advance(self, *, save: bool = True) -> None:
        """Book the time since the last call at the power drawn then, and read the loads again."""
        now = clock()
        for index, device in enumerate(self._devices):
            device.energy_j += device.power_w * (now - self._at)
            device.power_w = self._response.power_w(self._load(index), self._clock_mhz(index))
            for each in device.slices or ():
                each.busy_s += each.load * (now - self._at)
                each.load = self._share(slice_index(index, each.place.start))
        self._at = now
        if save:
            self._save()

    def _save(self) -> None:
        state = {
            "kernel_boot": kernel_boot() + self._boot,
            "at": self._at,
            "devices": [[d.limit_w, d.clock_mhz, d.energy_j, d.power_w] for d in self._devices],
            "slices": [None if d.slices is None else [[*each.place] for each in d.slices] for d in self._devices],
        }
        files.store(self._state_file, state, "simulated.state_not_saved", durable=False)

    def _restore(self, state: Any) -> None:
        saved = [_Device(float(w), int(mhz), float(j), float(now_w)) for w, mhz, j, now_w in state["devices"]]
        if len(saved) != len(self._devices) or saved[0].clock_mhz not in self._response.clocks_mhz:
            return  # other devices than last time: new counters
        for device, slices in zip(saved, state.get("slices", [None] * len(saved)), strict=True):
            if slices is not None:
                device.slices = [_Slice(SlicePlace(int(sevenths), int(start))) for sevenths, start in slices]
        self._devices = saved
        if state["kernel_boot"] == kernel_boot() + self._boot:
            self._at = min(float(state["at"]), self._at)
        else:
            for device in saved:
                device.power_w = 0.0
                device.slices = None if device.slices is None else []  # MIG mode outlives a restart, slices do not


Step = Literal["mode", "destroy", "create"]

_ERRORS: dict[str, tuple[type[driver.DeviceError], str]] = {
    "busy": (driver.DeviceBusyError, "In use by another client"),
    "refused": (driver.NotPermittedError, "Insufficient Permissions"),
    "unsupported": (driver.NotSupportedError, "Not Supported"),
    "failed": (driver.DeviceError, "Unknown Error"),
}
_LOOK_S = 0.02
_SLOWDOWN_C = 90.0


class CutFaults:
    """Faults of simulated devices, for tests, and for trials of how a cluster copes with them.

    The file is ``simulated_faults.json`` in the agent's state folder: a list such as ``[{"step": "create", "outcome":
    "busy", "skip": 1, "times": 2}]``. Each step of a cut (``mode``, ``destroy``, ``create``) looks at the first entry
    for it: ``skip`` steps pass, then the next ``times`` steps end in the outcome; all of them if ``times`` is missing.
    ``hold`` is no error: the step waits for as long as the file is there. Without a file, nothing fails.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, step: Step) -> None:
        """Raise the error that a step should end in, or wait while it is held."""
        found = self._take(step)
        if found == "hold":
            while self._path.exists():
                time.sleep(_LOOK_S)
        elif found is not None:
            kind, text = _ERRORS[found]
            raise kind(text)

    def _take(self, step: Step) -> str | None:
        def take(entries: list[dict[str, Any]]) -> str | None:
            entry = next((each for each in entries if each["step"] == step and each.get("times", 1) > 0), None)
            if entry is None:
                return None
            outcome = str(entry["outcome"])
            if outcome not in (*_ERRORS, "hold"):
                raise ValueError(f"no outcome {outcome!r}")
            passes = int(entry.get("skip", 0)) > 0
            counter = "skip" if passes else "times"
            if counter in entry:
                entry[counter] = int(entry[counter]) - 1
                files.replace(self._path, orjson.dumps(entries), durable=False)
            return None if passes else outcome

        return files.read(self._path, take, "simulated.faults_unreadable")


class Sickness:
    """The states of simulated GPUs, from ``simulated_health.json`` in the agent's state folder, by index.

    ``{"2": {"lost": true}}``, or the fields of ``Health``, or ``"xid": 79``, which is reported once for as long as it
    stays there. Without a file, all GPUs are well.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._states: dict[int, dict[str, Any]] = {}
        self._reported: set[driver.DeviceEvent] = set()

    def health(self, index: int) -> driver.Health:
        state = self._read().get(index, {})
        if state.get("lost"):
            raise driver.DeviceLostError("GPU is lost")
        pids = state.get("pids")
        known = {name: state.get(name) for name in ("temperature_c", "too_hot", "uncorrected_errors")}
        return driver.Health(**known, slowdown_c=_SLOWDOWN_C, pids=None if pids is None else tuple(pids))

    def events(self) -> list[driver.DeviceEvent]:
        """Return the Xids in the file that have not been returned before."""
        there = {driver.DeviceEvent(index, int(each["xid"])) for index, each in self._read().items() if "xid" in each}
        new, self._reported = there - self._reported, there
        return sorted(new, key=lambda event: (event.index, event.xid))

    def _read(self) -> dict[int, dict[str, Any]]:
        def take(found: dict[str, dict[str, Any]]) -> None:
            self._states = {int(index): dict(state) for index, state in found.items()}

        if self._path.exists():
            files.read(self._path, take, "simulated.health_unreadable")
        else:
            self._states = {}
        return self._states
