"""Composition root of the bridge to Kueue: ``python -m services.engines.kueue.app``.

With ``--release``, it does not steer: it admits every workload once the bridge's Lease is too old. Run it beside the
bridge, on another node, so that a dead bridge blocks nobody.
"""

import argparse
import asyncio
import contextlib

from services.engines.kueue.bridge import Bridge
from services.engines.kueue.cluster import Cluster
from services.engines.kueue.settings import KueueSettings
from services.kit.bridges.figures import shown_at
from services.kit.bridges.process import run_bridge
from services.kit.bridges.silent import EngineSilentError
from services.kit.ids import utc_now
from services.kit.logging import Log, configure_logging
from services.kit.metrics import Metrics
from services.kit.settings import settings_or_exit
from services.kit.tasks import end_tasks

log = Log(__name__)

_LOOK_S = 15.0


async def run(settings: KueueSettings) -> None:
    async with Cluster.connected(settings) as cluster:
        await run_bridge(settings, lambda control_plane: Bridge(settings, cluster, control_plane))


async def release(settings: KueueSettings) -> None:
    """Admit all workloads for as long as the bridge's Lease is too old, until cancelled."""
    async with Cluster.connected(settings) as cluster, shown_at(settings.metrics_address, Metrics()):
        while True:
            try:
                renewed_at = await cluster.lease_renewed_at()
                silent_s = (utc_now() - renewed_at).total_seconds() if renewed_at else 0.0
                if silent_s > settings.release_after_s:
                    log.error("bridge.silent", silent_s=round(silent_s), admits="everything")
                    bridge = asyncio.create_task(Bridge(settings, cluster, None).run())
                    await asyncio.wait([bridge], timeout=_LOOK_S)
                    await end_tasks([bridge])
            except EngineSilentError as error:
                log.error("kueue.silent", error=str(error))
            await asyncio.sleep(_LOOK_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="The bridge between Wattshift and Kueue.")
    parser.add_argument("--release", action="store_true", help="admit everything while the bridge is dead")
    given = parser.parse_args()
    settings = settings_or_exit(KueueSettings)
    configure_logging("engine_kueue", log_format=settings.log_format, level=settings.log_level)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(release(settings) if given.release else run(settings))


if __name__ == "__main__":
    main()
