"""Composition root of the bridge to Slurm: ``python -m services.engines.slurm.app``."""

import asyncio

from services.engines.slurm.bridge import Bridge
from services.engines.slurm.commands import Commands
from services.engines.slurm.rest import Rest
from services.engines.slurm.settings import SlurmSettings
from services.kit.bridges.process import run_bridge
from services.kit.logging import configure_logging
from services.kit.settings import settings_or_exit


def slurm_of(settings: SlurmSettings) -> Commands:
    token, timeout_s = settings.rest_token_file, settings.command_timeout_s
    if not settings.rest:
        return Commands(timeout_s)
    return Rest(settings.rest, user=settings.rest_user, token_file=token, timeout_s=timeout_s)


def main() -> None:
    settings = settings_or_exit(SlurmSettings)
    configure_logging("engine_slurm", log_format=settings.log_format, level=settings.log_level)
    slurm = slurm_of(settings)
    asyncio.run(run_bridge(settings, lambda control_plane: Bridge(settings, slurm, control_plane)))


if __name__ == "__main__":
    main()
