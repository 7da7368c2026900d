"""What every agent does: it reads its GPUs and reports them, and the energy they use, to the control plane."""

import asyncio
import fcntl
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from gpu_agent import shim
from gpu_agent.devices.driver import Driver, DriverMissingError
from gpu_agent.devices.nvml import NvmlDriver
from gpu_agent.devices.simulated import SimulatedDriver
from gpu_agent.health import GpuHealth
from gpu_agent.host_power import HostPower, host_power
from gpu_agent.meter import Meter
from gpu_agent.settings import AgentSettings
from gpu_agent.spool import Spool
from services.contracts.nodes import (
    DeviceInfo,
    DeviceReading,
    EnergyInterval,
    GpuFault,
    Heartbeat,
    HeartbeatReply,
    NodeRegistration,
)
from services.core.accounting.host_power import CpuPowerModel
from services.kit.control_plane import ControlPlane
from services.kit.disk import DiskSpace, DiskWatch
from services.kit.enrolment import Enrolment
from services.kit.http import ServiceClient
from services.kit.ids import utc_now
from services.kit.logging import Log
from services.kit.metrics import Metrics, gauge, single
from services.kit.problems import ProblemError
from services.kit.tasks import end_tasks, to_the_end

log = Log(__name__)

BATCH = 200
_BACKLOG = 1_000
_BACKLOG_INTERVAL_S = 30.0
"""Interval while many wait for delivery, so that a long absence of the control plane does not fill the disk."""
_IDLE_FACTOR = 5
"""By how much intervals are longer in which no gang holds a GPU: their rows are most of a quiet site's ledger."""
HOUSEKEEPING_S = 5.0
_LOCK_PATIENCE_S = 15.0
_HEARTBEAT_TIMEOUT_S = 5.0  #: Of an agent that only measures
_REFUSED = frozenset({400, 413, 422})

Loops = Mapping[str, Callable[[], Awaitable[None]]]


class StateFolderTakenError(Exception):
    """Another agent is running on the same state folder."""


class ReportingAgent:
    """The GPUs of one node, and the loops that report them; subclasses add the rest."""

    plane: ControlPlane
    meter: Meter
    health: GpuHealth

    def __init__(self, settings: AgentSettings, enrolment: Enrolment) -> None:
        self.settings = settings
        self._enrolment = enrolment
        self.boot_id = uuid.uuid4().hex
        self._state_lock = _take_state_folder(settings.state_folder)
        self._device_lock, self._taking_devices = asyncio.Lock(), asyncio.Lock()
        self._heartbeat_due, self._delivery_due = asyncio.Event(), asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._disk = DiskWatch(settings.state_folder, settings.disk_reserve_bytes)
        self.driver = self._open_driver()
        self.devices = self.driver.devices()
        self._has_other_devices = False  #: Whether they changed, and this has not been taken in
        self.spool = Spool(settings.state_folder)

    # --- what others say

    async def _send_heartbeat(self) -> None:
        raise NotImplementedError

    def _usable(self, devices: list[DeviceInfo]) -> list[DeviceInfo]:
        """Return the driver's devices with what this agent makes use of."""
        return devices

    def _use(self, devices: list[DeviceInfo]) -> None:
        """Go on with other devices than before."""

    def _load_of(self, device: int) -> float:
        """Return how busy the jobs here keep a simulated device, 0 to 1."""
        return 0.0

    def _is_held(self, device: int) -> bool:
        """Return whether a job here holds a device."""
        return False

    def _delivered(self) -> None:
        """Record that the control plane has taken intervals."""

    def _problems(self) -> list[str]:
        return [self.spool.problem] if self.spool.problem else []

    @property
    def gangs_running(self) -> int:
        return 0

    @property
    def lease_left_s(self) -> float | None:
        """The time for which gangs may still run without contact, in seconds; None before the first heartbeat."""
        return None

    # --- what all have

    async def check_ready(self) -> None:
        """Check that the agent can do its work; ``RuntimeError`` says why it cannot."""
        if not self.plane.is_registered:
            raise RuntimeError("the control plane does not know this node yet")
        if problem := next(iter(self._problems()), ""):
            raise RuntimeError(problem)

    def disk_space(self) -> DiskSpace | None:
        """Return how full the disk with the agent's state is; None where that cannot be determined."""
        return self._disk.space()

    def _closed(self) -> str | None:
        """Return why this node takes no new work; None if it does."""
        if self.driver.why:
            return self.driver.why
        problem = self._disk.problem()
        return f"Its disk {problem}" if problem else None

    def _open_driver(self) -> Driver:
        settings = self.settings
        if settings.driver != "simulated":
            try:
                if settings.zeusd:
                    from gpu_agent.devices.zeusd import Zeusd, ZeusdDriver  # httpx only where it is wanted

                    driver: Driver = ZeusdDriver(Zeusd(settings.zeusd, settings.zeusd_token_file))
                else:
                    driver = NvmlDriver(may_probe=settings.probe_controls and not settings.measure_only)
                if driver.devices():
                    return driver
                driver.close()
                why = "NVML shows none"
            except DriverMissingError as error:
                why = f"NVML does not answer ({error})"
            log.error("driver.no_devices", reason=why)
            absent = Driver()
            absent.why = f"It has no GPUs: {why}. Restart its agent once that is mended."
            return absent
        return SimulatedDriver(
            settings.simulated_model,
            settings.simulated_gpus,
            self._load_of,
            settings.state_folder / "simulated.json",
            settings.node_id,
            settings.simulated_boot,
            self._is_held,
        )

    def _meter_of(self, host: HostPower, **of: Any) -> Meter:
        """Return a meter of all devices and their host; ``of``: what it has from those who use them, as ``Meter``'s."""
        settings = self.settings
        return Meter(
            self.driver,
            self.devices,
            host,
            self.spool,
            static_w=settings.static_w,
            boot_id=self.boot_id,
            lock=self._device_lock,
            boot=settings.simulated_boot,
            **of,
        )

    def _host(self) -> HostPower:
        settings = self.settings
        utilisation, power_w = zip(*settings.cpu_power_curve, strict=True)
        model = CpuPowerModel(utilisation, power_w)
        is_stated = "cpu_power_curve" in settings.model_fields_set
        return host_power(settings.host_power, model, simulated=self.driver.name == "simulated", is_stated=is_stated)

    def _plane_of(self, client: ServiceClient, host: HostPower, **more: Any) -> ControlPlane:
        """Return the control plane, where the node registers with what every agent says of itself, and ``more``."""
        settings = self.settings
        registration = NodeRegistration(
            node_id=settings.node_id,
            address=settings.address,
            agent_url=settings.agent_url,
            zone=settings.own_zone,
            devices=self.devices,
            driver=self.driver.name,
            host_power=host.source,
            most_host_w=host.most_w + settings.static_w,
            labels=settings.labels,
            **more,
        )
        return ControlPlane(client, self._enrolment, registration)

    def describe(self) -> dict[str, Any]:
        """Return the agent's state, for troubleshooting."""
        return {
            "node_id": self.settings.node_id,
            "boot_id": self.boot_id,
            "driver": self.driver.name,
            "registered": self.plane.is_registered,
            "problems": self._problems(),
            "closed": self._closed(),
            "energy_intervals_waiting": len(self.spool),
            "meter_faults": self.meter.describe(),
            "gpu_faults": [fault.model_dump(mode="json") for fault in self.health.faults()],
            "devices": [device.model_dump(mode="json", exclude={"clocks_mhz"}) for device in self.devices],
            "readings": [reading.model_dump(mode="json") for reading in self._readings()],
        }

    def _readings(self) -> list[DeviceReading]:
        return self.meter.readings()

    # --- loops

    def _begin(self, loops: Loops) -> None:
        for name, loop in loops.items():
            self._tasks[name] = asyncio.create_task(self._keep_going(name, loop), name=name)
        log.info("agent.started", node_id=self.settings.node_id, driver=self.driver.name, devices=len(self.devices))

    async def _keep_going(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await loop()
            except Exception:  # a fault in one loop must neither end the others nor stay
                log.exception("agent.loop_failed", loop=name)
            await asyncio.sleep(self.settings.retry_s)

    async def _send_heartbeats(self) -> None:
        failing = False
        while True:
            self._heartbeat_due.clear()
            pause_s = self.plane.heartbeat_interval_s
            try:
                await self._send_heartbeat()
                failing = False
            except ProblemError as error:
                if not failing:
                    log.warning("heartbeat.failed", status=error.status, detail=error.detail)
                failing = True
                pause_s = min(pause_s, self.settings.retry_s)
            await wait_for(self._heartbeat_due, pause_s)

    async def _beat(self, timeout_s: float, **more: Any) -> HeartbeatReply:
        """Send a heartbeat with what every agent says of its GPUs, and ``more``; return the answer."""
        heartbeat = Heartbeat(
            boot_id=self.boot_id,
            devices=self._readings(),
            closed=self._closed(),
            gpu_faults=self.health.faults() if self.settings.health == "on" else None,
            **more,
        )
        reply = await self.plane.heartbeat(heartbeat, timeout_s)
        self.health.returned(reply.returned_faults)
        return reply

    async def _watch_health(self) -> None:
        while self.settings.health == "on":
            if await self._look_at_health():
                self._heartbeat_due.set()
            await self._probe_due()
            await asyncio.sleep(self.settings.health_interval_s)

    async def _probe_due(self) -> None:
        """Probe the GPUs whose faults may be over, all at once: each probe may take up to its time-out."""
        due: dict[int, list[GpuFault]] = {}
        for fault in self.health.due_probes(shim.clock()):
            due.setdefault(fault.gpu, []).append(fault)

        async def probe(faults: list[GpuFault]) -> None:
            for fault in faults:
                if not self._is_held(fault.gpu):
                    await self.health.probe(fault, shim.clock())

        await asyncio.gather(*map(probe, due.values()))

    async def _look_at_health(self) -> bool:
        async with self._device_lock:
            changed = await to_the_end(asyncio.to_thread(self.health.look, shim.clock()))
            if await to_the_end(asyncio.to_thread(self.driver.refresh)):
                self._has_other_devices = True
        if self._has_other_devices:
            self._has_other_devices = False
            try:
                await self._take_devices()
            except BaseException:
                self._has_other_devices = True  # with the next look: the driver says it once
                raise
        return changed

    async def _take_devices(self) -> None:
        """Adopt the devices as they are now, one change after the other, and register the node with them."""
        async with self._taking_devices:
            devices = self._usable(self.driver.devices())
            if devices != self.devices:
                await self.meter.recut(devices)
                self.devices = devices
                self._use(devices)
                self.plane.register_again(devices)
        self._heartbeat_due.set()

    async def _measure(self) -> None:
        closed = shim.clock()
        while True:
            await asyncio.sleep(self.settings.sample_interval_s)
            interval_s = self.settings.energy_interval_s
            if self.meter.nobody_is_charged:
                interval_s *= _IDLE_FACTOR
            if len(self.spool) > _BACKLOG:
                interval_s = max(interval_s, _BACKLOG_INTERVAL_S)
            if shim.clock() - closed + self.settings.sample_interval_s / 2 < interval_s:
                await self.meter.sample()
                continue
            closed = shim.clock()
            await self.meter.close()
            self._delivery_due.set()

    async def _deliver(self) -> None:
        limit = BATCH
        while True:
            self._delivery_due.clear()
            try:
                while await self._deliver_batch(limit):
                    limit = BATCH
            except ProblemError as error:
                if error.status in _REFUSED:
                    limit = 1  # find the one that is refused, and let the others pass
                    continue
                await asyncio.sleep(self.settings.retry_s)
            await wait_for(self._delivery_due, HOUSEKEEPING_S)

    async def _deliver_batch(self, limit: int) -> bool:
        """Deliver the oldest intervals that are due; return True if there were any. A single one may be refused."""
        batch = self._due(self.spool.batch(limit))
        if not batch:
            return False
        try:
            await self.plane.report_energy(batch)
        except ProblemError as error:
            if error.status not in _REFUSED or limit > 1:
                raise
            log.error("energy.refused", detail=error.detail)
            self.spool.reject(batch[0])
        else:
            self.spool.acknowledge(batch)
            self._delivered()
        return True

    def _due(self, batch: list[EnergyInterval]) -> list[EnergyInterval]:
        """Return the leading intervals of the batch that are old enough to be delivered."""
        if not self.settings.engine_node:
            return batch
        now, delay_s = utc_now(), self.settings.engine_delay_s
        waits = (at for at, each in enumerate(batch) if 0 <= (now - each.end_at).total_seconds() < delay_s)
        return batch[: next(waits, len(batch))]

    async def _cancel(self, *names: str) -> None:
        await end_tasks([self._tasks.pop(name) for name in names if name in self._tasks])


class MeasuringAgent(ReportingAgent):
    """An agent that only measures, for hosts whose jobs somebody else runs: ``GPU_AGENT_MEASURE_ONLY=true``.

    It reports devices, their health, power and energy. It starts no jobs, sets no clocks or limits, and needs neither
    root nor folders for jobs. Its node is registered as one that only measures; the control plane places nothing on it.

    **Whose energy it is.** Where an engine runs the host's jobs, ``GPU_AGENT_ENGINE_NODE=ENGINE.NODE`` is the name by
    which its bridge reports the host: ``slurm.gpu-17`` for node ``gpu-17`` of the bridge ``slurm``. The last part has
    to be this node's own id, as a credential speaks for one host only. The agent delivers energy by device, after
    ``GPU_AGENT_ENGINE_DELAY_S``, when the bridge has reported who ran; telemetry then books each device to the engine's
    job that held it (``services/telemetry/measured.py``), and the rest as idle. What a bridge models for a node that is
    measured in this way is not booked. Without an engine's node all energy is idle.
    """

    def __init__(self, settings: AgentSettings, client: ServiceClient, enrolment: Enrolment) -> None:
        super().__init__(settings, enrolment)
        self.devices = self._usable(self.devices)
        host = self._host()
        self.meter = self._meter_of(host, shim_pids=dict[str, int], progress_of=lambda _: None, apart=True)
        self.health = GpuHealth(self.driver, settings, None)
        self.plane = self._plane_of(client, host, measures_only=True, engine_node=settings.engine_node)

    async def start(self) -> None:
        """Continue where an earlier agent stopped measuring."""
        await self.meter.begin({}, lambda _: None)
        self._begin(
            {
                "heartbeats": self._send_heartbeats,
                "energy": self._measure,
                "health": self._watch_health,
                "delivery": self._deliver,
            }
        )

    async def stop(self) -> None:
        """End the agent; the next one delivers what is still undelivered."""
        await self._cancel(*self._tasks)
        await self.meter.close()
        self.driver.close()
        os.close(self._state_lock)
        log.info("agent.stopped")

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "measures_only": True, "engine_node": self.settings.engine_node}

    async def _send_heartbeat(self) -> None:
        await self._beat(_HEARTBEAT_TIMEOUT_S, ranks=[])

    def _usable(self, devices: list[DeviceInfo]) -> list[DeviceInfo]:
        """Return the devices without the capabilities that this agent never uses."""
        changes = {"can_set_clock": False, "can_set_power_limit": False, "can_partition": False}
        return [each.model_copy(update=changes) for each in devices]


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Return when an event is set, or after some seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _take_state_folder(folder: Path) -> int:
    """Hold the state folder for as long as this process lives; wait briefly for a previous agent to end."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = shim.clock() + _LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if shim.clock() > deadline:
                os.close(descriptor)
                raise StateFolderTakenError(f"another agent runs on {folder}") from None
            time.sleep(0.05)


def show_figures(metrics: Metrics, agent: ReportingAgent) -> None:
    """Show on ``/metrics`` how the agent's own work goes, and what it alone knows of its GPUs.

    What every heartbeat contains, such as the power of the GPUs, is shown by telemetry for all nodes.
    """

    async def read_agent() -> Iterable[Metric]:
        state = agent.describe()
        faults = {fault["gpu"]: fault["cause"] for fault in state["gpu_faults"]}
        disk = agent.disk_space()
        lease = "How long gangs may still run without contact; none before the first heartbeat."
        waiting, problems = state["energy_intervals_waiting"], len(state["problems"])
        free, reserve = (disk.free_bytes, disk.reserve_bytes) if disk else (None, None)
        singles: dict[str, tuple[str, float | None]] = {
            "wattshift_agent_registered": ("1 once telemetry knows this node.", float(state["registered"])),
            "wattshift_agent_gangs": ("Gangs that have processes here.", agent.gangs_running),
            "wattshift_agent_lease_seconds": (lease, agent.lease_left_s),
            "wattshift_agent_spooled_intervals": ("Intervals of energy that telemetry has not accepted yet.", waiting),
            "wattshift_agent_problems": ("What the agent cannot do now; its readiness and its log name it.", problems),
            "wattshift_agent_disk_free_bytes": ("What may still be written to the disk of the agent's state.", free),
            "wattshift_agent_disk_reserve_bytes": ("Below so much free space the node takes no new work.", reserve),
        }
        temperatures = [((str(gpu),), celsius) for gpu, celsius in sorted(agent.health.temperatures_c.items())]
        warmth = "Temperature of a GPU; none where it does not say."
        sick = "1 for a GPU with which something is the matter."
        found = [((str(gpu), cause), 1.0) for gpu, cause in faults.items()]
        return [
            *(single(name, text, number) for name, (text, number) in singles.items()),
            gauge("wattshift_agent_device_temperature_celsius", warmth, ["gpu"], temperatures),
            gauge("wattshift_agent_device_fault", sick, ["gpu", "cause"], found),
        ]

    metrics.add("agent", read_agent)
