"""Queries on what-if runs and on the files they read."""

import gzip
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from typing import Any

from sqlalchemy import Select, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from services.db.background import WorkRepository
from services.db.tables import savings, simulation_submissions, simulations
from services.db.tables import simulation_inputs as inputs
from services.simulator.training import Content

# A file younger than an hour may belong to a run that is being stored.
_FORGET_INPUTS = text("""
    DELETE FROM simulation_inputs i WHERE stored_at < now() - interval '1 hour'
    AND NOT EXISTS (SELECT FROM simulations s WHERE s.inputs @> ARRAY[i.sha256])
""")

SAVINGS_TENANT = "_savings"  #: Whose runs are the replays of days; names of tenants begin with a letter or a digit

_FORGET_ENDED = text("""
    DELETE FROM simulations WHERE ended_at < now() - make_interval(days => 1) * :keep_days AND tenant_id <> :kept
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
        """Store files; those already stored get a new storage time."""
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
        """Delete a tenant's runs that have ended, except the newest ``keep``; no replays behind stored savings."""
        if tenant_id != SAVINGS_TENANT:
            await super().forget_older(tenant_id, keep=keep)

    async def forget_ended(self, keep_days: float) -> int:
        """Delete runs that ended at least ``keep_days`` ago, and files that no run uses; return the number of runs.

        The replays behind stored savings are kept.
        """
        forgotten = await self._change(_FORGET_ENDED.bindparams(keep_days=keep_days, kept=SAVINGS_TENANT))
        await self._change(_FORGET_INPUTS)
        return forgotten

    async def days_of_savings(self, first: date, last: date) -> set[date]:
        return {*await self._scalars(select(savings.c.day).where(savings.c.day.between(first, last)))}

    async def savings(self, first: date | None, end: date | None) -> list[dict[str, Any]]:
        """Return stored savings of the days from ``first`` up to but excluding ``end``, oldest first."""
        query = select(savings.c.figures).order_by(savings.c.day)
        query = query if first is None else query.where(savings.c.day >= first)
        return await self._scalars(query if end is None else query.where(savings.c.day < end))

    async def _scalars(self, query: Select[Any]) -> list[Any]:
        async with self._engine.connect() as connection:
            return [*(await connection.execute(query)).scalars()]

    async def newest_savings(self) -> dict[str, Any] | None:
        return next(iter(await self._scalars(select(savings.c.figures).order_by(savings.c.day.desc()).limit(1))), None)

    async def add_savings(self, day: date, simulation_id: str | None, figures: dict[str, Any]) -> None:
        """Store a day's savings, unless it already has some."""
        row = insert(savings).values(day=day, simulation_id=simulation_id, figures=figures)
        await self._change(row.on_conflict_do_nothing())
