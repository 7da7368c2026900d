"""Queries on what-if runs and on the files they read."""

from __future__ import annotations

import gzip
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from services.db.background import WorkRepository
from services.db.tables.simulator import simulation_inputs as inputs
from services.db.tables.simulator import simulation_submissions, simulations
from services.simulator.files import Content

# A file younger than an hour may belong to a run that is being stored.
_FORGET_INPUTS = text("""
    DELETE FROM simulation_inputs i WHERE stored_at < now() - interval '1 hour'
    AND NOT EXISTS (SELECT FROM simulations s WHERE s.inputs @> ARRAY[i.sha256])
""")

_FORGET_OLDER = text("""
    DELETE FROM simulations WHERE tenant_id = :tenant_id AND state NOT IN ('queued', 'running')
    AND id NOT IN (SELECT id FROM simulations WHERE tenant_id = :tenant_id ORDER BY id DESC LIMIT :keep)
""")

_SUMMARY = (
    *(simulations.c[name] for name in ("done", "total", "run_s")),
    simulations.c.problem["policy"].label("policies"),
)


class SimulationRepository(WorkRepository):
    """The queries common to all work, and those on files."""

    def __init__(self, engine: AsyncEngine) -> None:
        super().__init__(engine, simulations, simulation_submissions, "simulation", _SUMMARY)

    async def keep(self, contents: Iterable[Content]) -> None:
        """Store files; for those that are stored already the time of storing is renewed."""
        async with self._engine.begin() as connection:
            for content in contents:
                row = insert(inputs).values(sha256=content.sha256, content=content.packed())
                again = row.on_conflict_do_update(index_elements=[inputs.c.sha256], set_={"stored_at": func.now()})
                await connection.execute(again)

    async def fetch(self, hashes: Collection[str]) -> Mapping[str, bytes]:
        """Return the unpacked contents of stored files by their hashes."""
        query = select(inputs.c.sha256, inputs.c.content).where(inputs.c.sha256.in_(hashes))
        async with self._engine.connect() as connection:
            return {row.sha256: gzip.decompress(row.content) for row in await connection.execute(query)}

    async def forget_older(self, tenant_id: str, *, keep: int) -> None:
        """Delete a tenant's runs that have ended, except for the newest."""
        await self._change(_FORGET_OLDER.bindparams(tenant_id=tenant_id, keep=keep))

    async def forget_ended(self, keep_days: float) -> int:
        """Delete runs that ended ``keep_days`` ago or earlier, and files that no run uses; return how many runs."""
        forgotten = await super().forget_ended(keep_days)
        await self._change(_FORGET_INPUTS)
        return forgotten
