"""The agent's ``/metrics``: the progress of its own work, and what only the agent knows of its GPUs.

What every heartbeat contains, such as the power of the GPUs, is shown by telemetry for all nodes.
"""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from gpu_agent.agent import Agent
from gpu_agent.measuring import MeasuringAgent
from services.kit.metrics import Metrics, gauge, single


def show_figures(metrics: Metrics, agent: Agent | MeasuringAgent) -> None:

    async def read_agent() -> Iterable[Metric]:
        state = agent.describe()
        faults = {fault["gpu"]: fault["cause"] for fault in state["gpu_faults"]}
        disk = agent.disk_space()
        return [
            single("wattshift_agent_registered", "1 once telemetry knows this node.", float(state["registered"])),
            single("wattshift_agent_gangs", "Gangs that have processes here.", agent.gangs_running),
            single(
                "wattshift_agent_lease_seconds",
                "How long gangs may still run without contact; none before the first heartbeat.",
                agent.lease_left_s,
            ),
            single(
                "wattshift_agent_spooled_intervals",
                "Intervals of energy that telemetry has not accepted yet.",
                state["energy_intervals_waiting"],
            ),
            single(
                "wattshift_agent_problems",
                "What the agent cannot do now; its readiness and its log name it.",
                len(state["problems"]),
            ),
            single(
                "wattshift_agent_disk_free_bytes",
                "What may still be written to the disk of the agent's state.",
                disk and disk.free_bytes,
            ),
            single(
                "wattshift_agent_disk_reserve_bytes",
                "Below so much free space the node takes no new work.",
                disk and disk.reserve_bytes,
            ),
            gauge(
                "wattshift_agent_device_temperature_celsius",
                "Temperature of a GPU; none where it does not say.",
                ["gpu"],
                [((str(gpu),), celsius) for gpu, celsius in sorted(agent.health.temperatures_c.items())],
            ),
            gauge(
                "wattshift_agent_device_fault",
                "1 for a GPU with which something is the matter.",
                ["gpu", "cause"],
                [((str(gpu), cause), 1.0) for gpu, cause in faults.items()],
            ),
        ]

    metrics.add("agent", read_agent)
