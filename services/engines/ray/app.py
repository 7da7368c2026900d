"""Composition root of the bridge to Ray: ``python -m services.engines.ray.app``."""

import asyncio

from services.engines.ray.bridge import Bridge
from services.engines.ray.head import Head
from services.engines.ray.settings import RaySettings
from services.kit.bridges.process import run_bridge
from services.kit.logging import configure_logging
from services.kit.settings import settings_or_exit


async def run(settings: RaySettings) -> None:
    async with Head.connected(settings) as head:
        await run_bridge(settings, lambda control_plane: Bridge(settings, head, control_plane))


def main() -> None:
    settings = settings_or_exit(RaySettings)
    configure_logging("engine_ray", log_format=settings.log_format, level=settings.log_level)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
