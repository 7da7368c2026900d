"""Sick GPUs: which of a node's GPUs must not be used for computing, and why.

A fault is a state (the GPU is lost, too hot, or used by a process of no job) or an event (an Xid, an ECC error). A
state counts only once it has lasted, except for a lost GPU, and a GPU recovers from it by itself once it has been over
for a while. An event stays until an operator returns the GPU to service, or until the host has booted again. With a
probe, a GPU recovers from either only when the probe passes.
"""

import asyncio
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gpu_agent import files
from gpu_agent.devices.driver import DeviceError, DeviceLostError, Driver, Health
from gpu_agent.processes import ProcessTable, run
from gpu_agent.settings import AgentSettings
from gpu_agent.shim import kernel_boot
from services.contracts.nodes import GpuFault, GpuFaultCause
from services.core.domain.mig import is_gpu
from services.kit.logging import Log

log = Log(__name__)

_MOST_C = 200.0  #: No GPU is warmer, or colder than below it
_SILENT_LOOKS = 3  #: A GPU counts as lost after this many looks in a row without an answer
_WORST_FIRST = tuple(GpuFaultCause)
_EVENTS = (GpuFaultCause.XID, GpuFaultCause.ECC)
_ENDS_GANGS = (GpuFaultCause.LOST, GpuFaultCause.XID, GpuFaultCause.ECC)


class GpuHealth:
    """The health of one node's GPUs.

    Args:
        driver: The devices. Whoever calls ``look`` holds its lock.
        shims: The processes from which those of all jobs descend; None on a node whose jobs are somebody else's:
            whatever computes there is neither foreign nor probed for.
        contained: The GPUs that ranks in containers hold: their processes cannot be attributed.
    """

    def __init__(
        self,
        driver: Driver,
        settings: AgentSettings,
        shims: Callable[[], Collection[int]] | None,
        contained: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._driver = driver
        self._settings = settings
        self._path = settings.state_folder / "health.json"
        self._shims = shims if settings.health_foreign == "on" else None
        self._probe = [] if shims is None else settings.health_probe
        self._contained = contained
        self._faults: dict[tuple[int, GpuFaultCause], GpuFault] = {}
        self._began_s: dict[tuple[int, GpuFaultCause], float] = {}
        self._over_s: dict[tuple[int, GpuFaultCause], float] = {}
        self._silent: dict[int, int] = {}
        self.temperatures_c: dict[int, float | None] = {}
        """Of the GPUs, as they last said; None for one that does not say."""
        self._uuids: dict[int, str] = {}
        self._accepted_errors: dict[str, int] = {}
        self._written: dict[str, Any] = {}
        files.read(self._path, self._take, "health.unreadable")

    def faults(self) -> list[GpuFault]:
        """Return the faults, only the worst of each GPU."""
        worst: dict[int, GpuFault] = {}
        for fault in sorted(self._faults.values(), key=lambda fault: _WORST_FIRST.index(fault.cause)):
            worst.setdefault(fault.gpu, fault)
        return [worst[gpu] for gpu in sorted(worst)]

    def has_lost(self) -> bool:
        """Return whether a GPU is lost, so that CUDA may number the others differently."""
        return any(cause is GpuFaultCause.LOST for _, cause in self._faults)

    def look(self, now_s: float) -> bool:
        """Check every GPU at a monotonic time; return whether anything has changed. Blocks for milliseconds."""
        before = self.faults()
        gpus = {each.index: each.uuid for each in self._driver.devices() if is_gpu(each.index)}
        self._uuids |= gpus
        for dead in self._driver.dead():
            self._uuids[dead.index] = dead.uuid or self._uuids.get(dead.index, f"unknown-{dead.index}")
            detail = f"It did not answer when the agent started ({dead.why})."
            self._state(dead.index, GpuFaultCause.LOST, detail, now_s, at_once=True)
        for event in self._driver.events():
            log.warning("gpu.xid", gpu=event.index, xid=event.xid)
            if event.xid in self._settings.health_xids and event.index in gpus:
                self._add(event.index, GpuFaultCause.XID, f"Its driver reported Xid {event.xid}.", lasts=False)
        table = ProcessTable()
        for gpu in gpus:
            self._look_at(gpu, table, now_s)
        self._recover(now_s)
        self._save()
        return self.faults() != before

    def returned(self, fault_ids: Collection[str]) -> None:
        """Forget these faults, because an operator has returned their GPUs to service."""
        for key, fault in list(self._faults.items()):
            if fault.id in fault_ids:
                self._forget(key)

    def due_probes(self, now_s: float) -> list[GpuFault]:
        """Return the faults that may be over, for the probe to decide."""
        found = [key for key, fault in sorted(self._faults.items()) if self._probe and not fault.lasts]
        return_s = self._settings.health_return_s
        return [self._faults[key] for key in found if now_s - self._over_s.setdefault(key, now_s) >= return_s]

    async def probe(self, fault: GpuFault, now_s: float) -> None:
        """Run the probe on a GPU that no gang holds, and forget its fault if it passes."""
        words = [word.replace("{gpu}", str(fault.gpu)).replace("{uuid}", fault.uuid) for word in self._probe]
        try:
            problem = await _run(words, self._settings.health_probe_timeout_s)
        except OSError as error:
            problem = str(error)
        key = fault.gpu, fault.cause
        if key not in self._faults:
            return
        if problem:
            log.warning("gpu.probe_failed", gpu=fault.gpu, uuid=fault.uuid, why=problem)
            self._over_s[key] = now_s
            detail = f"{fault.detail.partition(' Its probe')[0]} Its probe failed: {problem}"[:500]
            self._faults[key] = fault.model_copy(update={"detail": detail})
        else:
            log.info("gpu.probe_passed", gpu=fault.gpu, uuid=fault.uuid)
            self._forget(key)

    # --- what is found

    def _look_at(self, gpu: int, table: ProcessTable, now_s: float) -> None:
        try:
            health = self._driver.health(gpu)
        except DeviceLostError as error:
            self._state(gpu, GpuFaultCause.LOST, f"It is lost ({error}).", now_s, at_once=True)
            return
        except DeviceError as error:
            self._silent[gpu] = self._silent.get(gpu, 0) + 1
            if self._silent[gpu] >= _SILENT_LOOKS:
                self._state(gpu, GpuFaultCause.LOST, f"It does not answer ({error}).", now_s, at_once=True)
            return
        self._silent.pop(gpu, None)
        if health.temperature_c is not None and not -_MOST_C < health.temperature_c < _MOST_C:
            health = replace(health, temperature_c=None)
        self.temperatures_c[gpu] = health.temperature_c
        self._state(gpu, GpuFaultCause.LOST, "", now_s)
        self._look_at_memory(gpu, health)
        self._state(gpu, GpuFaultCause.TEMPERATURE, self._heat(health), now_s)
        self._state(gpu, GpuFaultCause.FOREIGN_PROCESS, self._strangers(gpu, health, table), now_s)

    def _look_at_memory(self, gpu: int, health: Health) -> None:
        errors = health.uncorrected_errors or 0
        if errors < self._accepted_errors.get(self._uuids[gpu], 0):  # the driver was loaded again, and counts anew
            self._accepted_errors.pop(self._uuids[gpu])
        accepted = self._accepted_errors.get(self._uuids[gpu], 0)
        if health.remapping_failed:
            self._add(gpu, GpuFaultCause.ECC, "Broken memory of it could not be replaced by spare memory.", lasts=True)
        elif errors > accepted + self._settings.health_uncorrected_errors:
            found = errors - accepted
            detail = f"Its memory has had {found} error{'s' if found > 1 else ''} that could not be corrected."
            self._add(gpu, GpuFaultCause.ECC, detail, lasts=False)

    def _heat(self, health: Health) -> str:
        limit_c = self._settings.health_temperature_c or health.slowdown_c
        if health.temperature_c is not None and limit_c is not None and health.temperature_c >= limit_c:
            return f"It is too hot: {limit_c:g} degrees Celsius or more."
        return "It slows itself down because of its temperature." if health.too_hot else ""

    def _strangers(self, gpu: int, health: Health, table: ProcessTable) -> str:
        if self._shims is None or not health.pids or gpu in self._contained():
            return ""
        roots = set(self._shims())
        known = (None, *self._settings.health_allowed_processes)
        for pid in health.pids:
            if (name := table.name_of(pid)) not in known and not table.descends(pid, roots):
                return f"Process {pid} ({name}) computes on it and belongs to no job."
        return ""

    def _state(self, gpu: int, cause: GpuFaultCause, detail: str, now_s: float, *, at_once: bool = False) -> None:
        """Record that a state holds, for the reason ``detail``, or that it does not if there is none."""
        key = gpu, cause
        if detail:
            self._over_s.pop(key, None)
            began_s = self._began_s.setdefault(key, now_s)
            if at_once or key in self._faults or now_s - began_s >= self._settings.health_lasts_s:
                self._add(gpu, cause, detail, lasts=True)
            return
        self._began_s.pop(key, None)
        if (fault := self._faults.get(key)) is not None:
            self._over_s.setdefault(key, now_s)
            self._faults[key] = fault.model_copy(update={"lasts": False})

    def _add(self, gpu: int, cause: GpuFaultCause, detail: str, *, lasts: bool) -> None:
        if (known := self._faults.get((gpu, cause))) is not None:
            self._faults[gpu, cause] = known.model_copy(update={"lasts": lasts or known.lasts})
            return
        self._faults[gpu, cause] = GpuFault(
            id=uuid.uuid4().hex,
            gpu=gpu,
            uuid=self._uuids[gpu],
            cause=cause,
            detail=detail[:500],
            since=datetime.now(UTC),
            ends_gangs=cause in _ENDS_GANGS,
            lasts=lasts,
        )
        log.error("gpu.fault", gpu=gpu, uuid=self._uuids[gpu], cause=cause.value, detail=detail)

    def _recover(self, now_s: float) -> None:
        if self._probe:
            return
        for key, fault in list(self._faults.items()):
            if fault.cause in _EVENTS or fault.lasts:
                continue
            if now_s - self._over_s.setdefault(key, now_s) >= self._settings.health_return_s:
                self._forget(key)

    def _forget(self, key: tuple[int, GpuFaultCause]) -> None:
        fault = self._faults.pop(key)
        self._over_s.pop(key, None)
        self._began_s.pop(key, None)
        log.info("gpu.recovered", gpu=fault.gpu, uuid=fault.uuid, cause=fault.cause.value)
        if fault.cause is GpuFaultCause.ECC:
            with suppress(DeviceError):
                self._accepted_errors[fault.uuid] = self._driver.health(fault.gpu).uncorrected_errors or 0

    # --- what survives the agent

    def _save(self) -> None:
        kept = {
            "kernel_boot": kernel_boot(),
            "uuids": {str(gpu): name for gpu, name in sorted(self._uuids.items())},
            "accepted_errors": self._accepted_errors,
            "events": [
                fault.model_dump(mode="json") for _, fault in sorted(self._faults.items()) if fault.cause in _EVENTS
            ],
        }
        if kept != self._written and files.store(self._path, kept, "health.not_written"):
            self._written = kept

    def _take(self, kept: Any) -> None:
        self._uuids = {int(gpu): str(name) for gpu, name in kept["uuids"].items()}
        if kept["kernel_boot"] == kernel_boot():  # a boot resets the devices
            self._accepted_errors = {str(name): int(count) for name, count in kept["accepted_errors"].items()}
            self._faults = {(each.gpu, each.cause): each for each in map(GpuFault.model_validate, kept["events"])}


async def _run(words: Sequence[str], timeout_s: float) -> str:
    """Run a probe; return why it did not pass, or an empty string if it did."""
    try:
        async with asyncio.timeout(timeout_s):
            code, printed = await run(words)
    except TimeoutError:
        return f"it took longer than {timeout_s:g} s"
    last = printed.strip().rpartition("\n")[2]
    return "" if code == 0 else (last or f"exit status {code}")
