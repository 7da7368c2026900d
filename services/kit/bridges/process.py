"""The process of every bridge: enrolled as a node, it follows its stream of decisions until SIGTERM."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson
from pydantic import Field, ValidationError

from services.contracts.engines import EngineDecision, EngineMode, direct_adapter
from services.contracts.nodes import EnergySource, NodeRegistration, NodeRole
from services.contracts.schema import Name
from services.kit.bridges.figures import BridgeFigures, NotedControlPlane, shown_at
from services.kit.command_stream import CommandStream, StreamSource
from services.kit.control_plane import ControlPlane
from services.kit.enrolment import Enrolment, NodeRedis, NodeSettings
from services.kit.http import ServiceClient, new_session
from services.kit.logging import Log
from services.kit.metrics import Metrics
from services.kit.tasks import end_tasks

log = Log(__name__)


class BridgeSettings(NodeSettings):
    """Settings of every bridge; an engine's own give ``node_id`` a default and ``own_zone`` an alias."""

    enroll_token: str = Field("", description="The token of `wattshift nodes enroll NAME --engine`.")
    own_zone: Name | None = None
    mode: EngineMode = EngineMode.DRY_RUN
    interval_s: float = Field(2.0, gt=0, le=600, description="How often the engine is looked at.")
    silence_s: float = Field(60.0, gt=0)
    gpu_memory_gib: float = Field(80.0, gt=0, description="Memory of a GPU; the engine does not say.")
    metrics_address: str = Field(
        "",
        pattern=r"^(\S+:[0-9]{1,5})?$",
        description="Where `/metrics` is shown, to everybody who reaches it: `127.0.0.1:9464`; by default nowhere.",
    )


class SomeBridge(Protocol):
    def take(self, decisions: Sequence[EngineDecision]) -> None:
        """Take decisions; of two about the same job, the newer one is in force."""
        ...

    async def run(self) -> None:
        """Look at the engine repeatedly until cancelled."""
        ...


class Decisions(CommandStream):
    """Decisions from the control plane; lost ones are repeated to a bridge that starts."""

    def __init__(self, redis: StreamSource, node_id: str, bridge: SomeBridge, figures: BridgeFigures) -> None:
        super().__init__(redis, node_id, retry_s=1.0)
        self._bridge, self._figures = bridge, figures

    def obey(self, text: str) -> None:
        """Take the decisions of one command; an unreadable one is skipped."""
        try:
            decisions = direct_adapter.validate_python(orjson.loads(text)).decisions
            self._figures.note_decisions(decisions)
            self._bridge.take(decisions)
        except (orjson.JSONDecodeError, ValidationError) as error:
            log.error("command.unreadable", error=str(error), command=text[:500])


async def run_bridge(settings: BridgeSettings, bridge_to: Callable[[ControlPlane], SomeBridge]) -> None:
    """Run a bridge, and the reader of its decisions, until SIGTERM."""
    stopped = asyncio.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stopped.set)
    registration = NodeRegistration(
        node_id=settings.node_id,
        address="",
        agent_url="",
        zone=settings.own_zone,
        devices=[],
        driver="engine",
        host_power=EnergySource.MODELLED,
    )
    async with new_session(tls=settings.tls) as session:
        client = ServiceClient(session, settings.telemetry_url, "telemetry")
        enrolment = Enrolment(settings, client, NodeRole.ENGINE)
        redis = NodeRedis(settings, enrolment)
        control_plane = NotedControlPlane(client, enrolment, registration)
        figures = control_plane.figures = BridgeFigures(metrics := Metrics())
        bridge = bridge_to(control_plane)
        decisions = Decisions(redis, settings.node_id, bridge, figures)
        async with shown_at(settings.metrics_address, metrics):
            tasks = [asyncio.create_task(each) for each in (bridge.run(), decisions.run())]
            log.info("bridge.started", engine=settings.node_id, mode=settings.mode.value)
            await asyncio.wait([*tasks, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
            failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
            await end_tasks(tasks)
        await redis.aclose()
    for error in failed:
        if error is not None:
            raise error
