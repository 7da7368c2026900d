"""The bridge to a real Slurm and what it needs: telemetry and the bridge as processes, the scheduler in this one.

The grid is the test's own, so that an hour is green when the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from services.core.domain.carbon import CarbonCurve, CarbonOutlook, Signal
from services.db.database import Database
from services.kit.carbon import Carbon
from services.kit.http import ServiceClient, new_session
from services.kit.redis import connect
from services.kit.tasks import end_tasks
from services.scheduler.loop import Scheduler
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.settings import SchedulerSettings
from tests.support.servers import ROOT, fresh_database
from tests.support.services import services
from tests.support.slurm import SlurmLab
from tests.support.tokens import TOKEN, tokens

JOIN_TOKEN = "join-token-of-the-tests"
ZONE = "US-CAL-CISO"
"""Of a site whose grid is replayed."""


class Grid(CarbonWatch):
    """A grid whose intensities a test sets."""

    def set(self, times_s: list[float], gco2_per_kwh: list[float], *zones: str) -> None:
        """Let intensities hold from these times on, UTC seconds; the last one for a day. By default in zone ``Z``."""
        curve = CarbonCurve(np.array(times_s), np.array(gco2_per_kwh), times_s[-1] + 86_400)
        self._known = {zone: CarbonOutlook(zone, Signal.AVERAGE_DIRECT, curve) for zone in zones or ("Z",)}

    async def _refresh(self, zone: str) -> None:
        """Ask nobody."""


class ControlPlane:
    """Telemetry as a process, and a scheduler that turns by itself.

    Attributes:
        environment: The variables by which a bridge finds it.
    """

    def __init__(self, database: Database, carbon: CarbonWatch, environment: dict[str, str], folder: Path) -> None:
        self.database, self.carbon, self.environment, self.folder = database, carbon, environment, folder

    @property
    def grid(self) -> Grid:
        """The grid of one that replays none."""
        assert isinstance(self.carbon, Grid)
        return self.carbon

    async def rows(self, query: str, *arguments: Any) -> list[Any]:
        """Return rows of the database."""
        async with self.database.connection() as connection:
            return await connection.fetch(query, *arguments)

    async def policy(self, name: str, **parameters: Any) -> None:
        """Put a policy in force; the next round is an active one."""
        query = (
            "UPDATE scheduler_state SET policy = $1, parameters = $2, memory = '{}', last_active_at = NULL, "
            "version = version + 1 RETURNING 1"
        )

        async def words() -> str:
            return ""

        await until(lambda: self.rows(query, name, parameters), "the scheduler has a policy to change", 60, words)


class Site:
    """A Slurm, its bridge, and a scheduler that turns by itself."""

    def __init__(self, lab: SlurmLab, plane: ControlPlane) -> None:
        self.lab, self.database, self.carbon, self._plane = lab, plane.database, plane.carbon, plane
        self.rows, self.policy = plane.rows, plane.policy
        self._environment, self._folder = plane.environment, plane.folder
        self._bridge: subprocess.Popen[bytes] | None = None
        self.path: dict[str, str] = {}
        """Variables of the bridge, such as another PATH."""

    @property
    def grid(self) -> Grid:
        """The grid of a site that replays none."""
        return self._plane.grid

    def start_bridge(self, **settings: str) -> None:
        """Start the bridge; settings are those of ``ENGINE_SLURM_...``."""
        wanted = {"mode": "control", "interval_s": "0.5", "nodes_interval_s": "2", "missing_after_s": "2"}
        wanted |= {"alive_file": str(self.lab.alive), **settings}
        own = {f"ENGINE_SLURM_{name.upper()}": value for name, value in wanted.items()}
        with (self._folder / "bridge.log").open("ab") as log:
            self._bridge = subprocess.Popen(
                [sys.executable, "-m", "services.engines.slurm.app"],
                env={**self.lab.environment, **self._environment, "SLURM_CONF": str(self.lab.conf), **own, **self.path},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    async def steered(self, **settings: str) -> None:
        """Start the bridge and return once the control plane knows the nodes."""
        self.start_bridge(**settings)
        await self.until(lambda: self.rows("SELECT 1 FROM nodes WHERE id = 'slurm.gpu2'"), "the nodes are known")

    def kill_bridge(self) -> None:
        """Kill the bridge as a crash would."""
        assert self._bridge
        self._bridge.send_signal(signal.SIGKILL)
        self._bridge.wait()

    def stop_bridge(self) -> None:
        """End the bridge."""
        if self._bridge and self._bridge.poll() is None:
            self._bridge.terminate()
            self._bridge.wait(10)

    @property
    def log(self) -> str:
        """What the bridge printed."""
        return (self._folder / "bridge.log").read_text()

    async def job(self, number: str) -> dict[str, Any]:
        """Return our job for one of Slurm's numbers, the newest; empty while there is none."""
        query = "SELECT * FROM jobs WHERE external_id LIKE $1 || '@%' ORDER BY id DESC LIMIT 1"
        return next((dict(row) for row in await self.rows(query, number)), {})

    async def until(self, condition: Callable[[], Awaitable[object]], what: str, within_s: float = 60) -> None:
        """Return once something is so; the bridge's last words are part of the error if it is not in time."""

        async def words() -> str:
            queue = self.lab.run("squeue", "-o", "%i %T %r %S %k %R", check=False)
            jobs = await self.rows("SELECT external_id, state, reason, detail FROM jobs ORDER BY id DESC LIMIT 20")
            return f"{queue}\n{jobs}\n{self.log[-3000:]}"

        await until(condition, what, within_s, words)

    async def until_states(self, within_s: float = 60, **wanted: str) -> None:
        """Return once jobs of Slurm, as ``_NUMBER=STATE``, are in these states in Slurm."""

        async def are_so() -> bool:
            found = await asyncio.to_thread(lambda: {name: self.lab.state(name[1:]) for name in wanted})
            return found == wanted

        await self.until(are_so, str(wanted), within_s)


async def until(
    condition: Callable[[], Awaitable[object]], what: str, within_s: float, words: Callable[[], Awaitable[str]]
) -> None:
    """Return once something is so.

    Raises:
        TimeoutError: It was not in time; ``words`` are part of it.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    while not await condition():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"not within {within_s:g} s: {what}\n{await words()}")
        await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def a_site(lab: SlurmLab, postgres_url: str, redis_url: str, folder: Path, **options: Any) -> AsyncIterator[Site]:
    """Yield a site with an empty database; ``options`` are those of ``a_control_plane``."""
    async with a_control_plane(postgres_url, redis_url, folder, **options) as plane:
        site = Site(lab, plane)
        try:
            yield site
        finally:
            site.stop_bridge()


@contextlib.asynccontextmanager
async def a_control_plane(
    postgres_url: str, redis_url: str, folder: Path, *, replay: Mapping[str, str] | None = None, **options: Any
) -> AsyncIterator[ControlPlane]:
    """Yield one with an empty database.

    Args:
        postgres_url, redis_url: Of servers.
        folder: For its files.
        replay: Settings of a carbon service of its own, whose zone is ``ZONE``; without, the grid is the test's to set.
        options: Settings of the scheduler.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database_url = fresh_database(postgres_url)
    own = {
        "WATTSHIFT_NODE_JOIN_TOKEN": JOIN_TOKEN,
        "WATTSHIFT_ZONE": ZONE if replay else "Z",
        "WATTSHIFT_CARBON_URL": "http://127.0.0.1:1",
        "TELEMETRY_NODE_REDIS": "shared",
        "TELEMETRY_LEASE_TTL_S": "8",
    }
    settings = SchedulerSettings(
        WATTSHIFT_SERVICE_TOKEN=TOKEN,
        DATABASE_URL=database_url,
        REDIS_URL=redis_url,
        **{"policy": "fifo", "round_interval_s": 3, "node_return_s": 0, "republish_after_s": 3, **options},
    )
    async with contextlib.AsyncExitStack() as stack:
        found = stack.enter_context(services(folder, database_url, redis_url, **own))
        if replay:
            stack.enter_context(found.started("carbon_service.app", CARBON_ZONES=ZONE, **replay))
        stack.enter_context(found.started("services.telemetry.app"))
        database, redis = await Database.open(database_url), connect(redis_url)
        session = await stack.enter_async_context(new_session())
        kind, zone = (CarbonWatch, ZONE) if replay else (Grid, "Z")
        url, signed = found.urls.get("CARBON", "http://127.0.0.1:1"), tokens("carbon", issuer="scheduler")
        client = ServiceClient(session, url, "carbon", tokens=signed)
        grid = kind(
            Carbon(client, attempts=1), zone, refresh_s=5 if replay else 1e9, window_s=86_400, default_gco2_per_kwh=400
        )
        turning = asyncio.create_task(Scheduler(settings, database, redis, grid).run())
        try:
            yield ControlPlane(database, grid, found.environment, folder)
        finally:
            await end_tasks([turning])
            await redis.flushdb()
            await redis.aclose()
            await database.close()
