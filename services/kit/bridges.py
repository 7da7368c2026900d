"""What the process of every bridge is: enrolled as a node, with its stream of decisions, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Protocol

import orjson
from pydantic import ValidationError
from redis.asyncio import Redis

from services.contracts.engines import EngineDecision, EngineMode, direct_adapter
from services.contracts.nodes import EnergySource, NodeRegistration
from services.kit.command_stream import CommandStream
from services.kit.control_plane import ControlPlane
from services.kit.enrolment import Enrolment, NodeRedis, NodeSettings
from services.kit.http import ServiceClient, new_session
from services.kit.logging import Log
from services.kit.tasks import end_tasks

log = Log(__name__)


class BridgeSettings(NodeSettings, Protocol):
    """What the settings of every bridge have."""

    @property
    def own_zone(self) -> str | None:
        """The grid zone of its engine's nodes."""
        ...

    @property
    def mode(self) -> EngineMode:
        """Whether decisions are carried out."""
        ...


class SomeBridge(Protocol):
    """A bridge to some engine."""

    def take(self, decisions: Sequence[EngineDecision]) -> None:
        """Take decisions; of two on a job the newer one is in force."""
        ...

    async def run(self) -> None:
        """Look until cancelled."""
        ...


class Decisions(CommandStream):
    """Decisions from the control plane; what is lost of them is repeated to a bridge that starts."""

    def __init__(self, redis: Redis | NodeRedis, node_id: str, bridge: SomeBridge) -> None:
        super().__init__(redis, node_id, retry_s=1.0)
        self._bridge = bridge

    def obey(self, text: str) -> None:
        """Take the decisions of one command; what cannot be read is left out."""
        try:
            self._bridge.take(direct_adapter.validate_python(orjson.loads(text)).decisions)
        except (orjson.JSONDecodeError, ValidationError) as error:
            log.error("command.unreadable", error=str(error), command=text[:500])


async def run_bridge(settings: BridgeSettings, bridge_to: Callable[[ControlPlane], SomeBridge]) -> None:
    """Run a bridge, and what reads its decisions, until SIGTERM.

    Args:
        settings: Of the bridge.
        bridge_to: Makes the bridge to this control plane.
    """
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
    shared = settings.shared
    async with new_session(tls=shared.tls) as session:
        client = ServiceClient(session, shared.telemetry_url, "telemetry")
        enrolment = Enrolment(settings, client)
        redis = NodeRedis(settings, enrolment)
        bridge = bridge_to(ControlPlane(client, enrolment, registration))
        tasks = [asyncio.create_task(each) for each in (bridge.run(), Decisions(redis, settings.node_id, bridge).run())]
        log.info("bridge.started", engine=settings.node_id, mode=settings.mode.value)
        await asyncio.wait([*tasks, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        await end_tasks(tasks)
        await redis.aclose()
    for error in failed:
        if error is not None:
            raise error
