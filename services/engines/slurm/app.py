"""Composition root of the bridge to Slurm: ``python -m services.engines.slurm.app``."""

from __future__ import annotations

import asyncio
import signal

import orjson
from pydantic import ValidationError
from redis.asyncio import Redis

from services.contracts.engines import direct_adapter
from services.contracts.nodes import EnergySource, NodeRegistration
from services.engines.slurm.bridge import Bridge, Slurm
from services.engines.slurm.commands import Commands
from services.engines.slurm.settings import SlurmSettings
from services.kit.command_stream import CommandStream
from services.kit.control_plane import ControlPlane
from services.kit.enrolment import Enrolment, NodeRedis
from services.kit.http import ServiceClient, new_session
from services.kit.logging import Log, configure_logging
from services.kit.settings import settings_or_exit
from services.kit.tasks import end_tasks

log = Log(__name__)


class Decisions(CommandStream):
    """Decisions from the control plane; what is lost of them is repeated to a bridge that starts."""

    def __init__(self, redis: Redis | NodeRedis, settings: SlurmSettings, bridge: Bridge) -> None:
        super().__init__(redis, settings.node_id, retry_s=1.0)
        self._bridge = bridge

    def obey(self, text: str) -> None:
        """Take the decisions of one command; what cannot be read is left out."""
        try:
            self._bridge.take(direct_adapter.validate_python(orjson.loads(text)).decisions)
        except (orjson.JSONDecodeError, ValidationError) as error:
            log.error("command.unreadable", error=str(error), command=text[:500])


def slurm_of(settings: SlurmSettings) -> Slurm:
    """Return Slurm as it is reached by these settings."""
    return Commands(settings.command_timeout_s)


async def run(settings: SlurmSettings) -> None:
    """Run the bridge until SIGTERM."""
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
        enrolment = Enrolment(settings, client)
        redis = NodeRedis(settings, enrolment)
        bridge = Bridge(settings, slurm_of(settings), ControlPlane(client, enrolment, registration))
        tasks = [asyncio.create_task(each) for each in (bridge.run(), Decisions(redis, settings, bridge).run())]
        log.info("bridge.started", engine=settings.node_id, mode=settings.mode.value)
        await asyncio.wait([*tasks, asyncio.create_task(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
        failed = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        await end_tasks(tasks)
        await redis.aclose()
    for error in failed:
        if error is not None:
            raise error


def main() -> None:
    """Run the process."""
    settings = settings_or_exit(SlurmSettings)
    configure_logging("engine_slurm", log_format=settings.log_format, level=settings.log_level)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
