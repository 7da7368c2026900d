"""An agent that only measures, for hosts whose jobs somebody else runs: ``GPU_AGENT_MEASURE_ONLY=true``.

It reports devices, their health, power and energy. It starts no jobs, sets no clocks or limits, and needs neither root
nor folders for jobs. Its node is registered as one that only measures; the control plane places nothing on it.

**Whose energy it is.** Where an engine runs the host's jobs, ``GPU_AGENT_ENGINE_NODE=ENGINE.NODE`` is the name by which
its bridge reports the host: ``slurm.gpu-17`` for node ``gpu-17`` of the bridge ``slurm``. The last part has to be this
node's own id, as a credential speaks for one host only. The agent delivers energy by device, after
``GPU_AGENT_ENGINE_DELAY_S``, when the bridge has reported who ran; telemetry then books each device to the engine's
job that held it (``services/telemetry/measured.py``), and the rest as idle. What a bridge models for a node that is
measured in this way is not booked. Without an engine's node all energy is idle.
"""

import os
from typing import Any

from gpu_agent.health import GpuHealth
from gpu_agent.meter import Meter
from gpu_agent.reporting import ReportingAgent
from gpu_agent.settings import AgentSettings
from services.contracts.nodes import DeviceInfo, Heartbeat
from services.kit.enrolment import Enrolment
from services.kit.http import ServiceClient
from services.kit.logging import Log

log = Log(__name__)

_HEARTBEAT_TIMEOUT_S = 5.0


class MeasuringAgent(ReportingAgent):
    """The agent of a node on which it runs no jobs."""

    def __init__(self, settings: AgentSettings, client: ServiceClient, enrolment: Enrolment) -> None:
        super().__init__(settings, enrolment)
        self.devices = self._usable(self.devices)
        host = self._host()
        self.meter = Meter(
            self.driver,
            self.devices,
            host,
            self.spool,
            static_w=settings.static_w,
            boot_id=self.boot_id,
            shim_pids=dict[str, int],
            progress_of=lambda _: None,
            lock=self._device_lock,
            boot=settings.simulated_boot,
            apart=True,
        )
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
        heartbeat = Heartbeat(
            boot_id=self.boot_id,
            ranks=[],
            devices=self.meter.readings(),
            closed=self._closed(),
            gpu_faults=self.health.faults() if self.settings.health == "on" else None,
        )
        reply = await self.plane.heartbeat(heartbeat, _HEARTBEAT_TIMEOUT_S)
        self.health.returned(reply.returned_faults)

    def _usable(self, devices: list[DeviceInfo]) -> list[DeviceInfo]:
        """Return the devices without the capabilities that this agent never uses."""
        changes = {"can_set_clock": False, "can_set_power_limit": False, "can_partition": False}
        return [each.model_copy(update=changes) for each in devices]
