"""What has changed besides jobs, for those who watch: one reader per process, however many watch."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.events import read_writes
from services.contracts.changes import ChangeKind
from services.db.engine import is_connection_error
from services.kit.logging import Log

log = Log(__name__)

TABLES: Mapping[ChangeKind, tuple[str, ...]] = {
    ChangeKind.NODES: ("nodes", "node_power", "gpu_health", "gpu_partitions", "device_claims", "node_credentials"),
    ChangeKind.POLICIES: ("scheduler_state",),
    ChangeKind.POOLS: ("pools", "pool_plans", "pool_instances", "model_endpoints", "request_usages"),
    ChangeKind.APPS: ("apps", "fleets", "fleet_plans", "pool_instances", "app_observations"),
    ChangeKind.CARBON: ("carbon_points", "carbon_forecasts", "carbon_learned_forecasts", "carbon_replays"),
    ChangeKind.FOOTPRINTS: ("job_footprints", "energy_intervals"),
}
OPERATORS_ONLY = frozenset({ChangeKind.NODES})


class Changes:
    """Reads which tables were written to, as long as anyone follows."""

    def __init__(self, engine: AsyncEngine, *, poll_s: float) -> None:
        self._engine, self._poll_s = engine, poll_s
        self._tables = sorted({table for tables in TABLES.values() for table in tables})
        self._writes: dict[str, int] = {}
        self._moved = asyncio.Event()
        self._followers = 0
        self._task: asyncio.Task[None] | None = None

    async def follow(self, kinds: Collection[ChangeKind]) -> AsyncIterator[list[ChangeKind]]:
        """Yield those of ``kinds`` that have changed, endlessly; changes found together are yielded together."""
        self._followers += 1
        if self._task is None:
            self._writes = {}
            self._task = asyncio.create_task(self._read_on(), name="changes")
        try:
            before: Mapping[str, int] = {}
            while True:
                moved, now = self._moved, self._writes
                if before:
                    found = {table for table, writes in now.items() if before.get(table) != writes}
                    if changed := [kind for kind in kinds if not found.isdisjoint(TABLES[kind])]:
                        yield changed
                before = now
                if self._writes is now:
                    await moved.wait()
        finally:
            self._followers -= 1

    async def _read_on(self) -> None:
        try:
            while self._followers:
                await self._read()
                await asyncio.sleep(self._poll_s)
        finally:
            self._task = None

    async def _read(self) -> None:
        try:
            async with self._engine.connect() as connection:
                found = await read_writes(connection, self._tables)
        except Exception as error:
            if not is_connection_error(error):
                log.exception("changes.not_read")
            return
        if found != self._writes:
            self._writes = found
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()
