"""A planner on a real database, and a hand in place of the workers that make its plans."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine

from services.contracts.background import WorkFailure
from services.contracts.carbon import CurrentIntensity, IntensityPoint
from services.contracts.pools import PoolsResult
from services.contracts.serving import PlanForecasts, PoolPlanResult
from services.core.domain.signal import Signal
from services.core.domain.solving import Backend, SolveStatus
from services.db.database import connect
from services.db.engine import create_engine
from services.serving.carbon import Intensities
from services.serving.planning.planner import EventWatch, Planner
from services.serving.planning.plans import Plans
from services.serving.repository import ServingRepository
from services.serving.repository.plans import plan_repository
from services.serving.settings import ServingSettings
from services.serving.upkeep import rectify
from tests.serving.pools import a_spec, add_pool

ANSWER = PoolPlanResult(
    forecasts=PlanForecasts(step_s=300, demand={}, intensity={}, gpus={}),
    plan=PoolsResult(status=SolveStatus.OPTIMAL, solver=Backend.HIGHS, partition="one"),
).model_dump(mode="json")


class Grid(Intensities):
    """Knows the intensities of zones that a test gives it, and asks for none."""

    def __init__(self) -> None:
        self.gco2_per_kwh: dict[str, float] = {}

    async def of(self, wanted: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], CurrentIntensity]:
        return {key: self._current(key[0]) for key in wanted if key[0] in self.gco2_per_kwh}

    def _current(self, zone: str) -> CurrentIntensity:
        now = datetime.now(UTC)
        point = IntensityPoint(start_at=now, end_at=now + timedelta(hours=1), gco2_per_kwh=self.gco2_per_kwh[zone])
        signal = Signal.AVERAGE_DIRECT
        return CurrentIntensity(
            zone=zone, signal=signal, provider="p", point=point, fetched_at=now, age_s=0, is_stale=False
        )


@dataclass
class World:
    """A planner, its database, and a hand in place of the worker."""

    engine: AsyncEngine
    database: Any
    plans: Plans
    watch: EventWatch
    grid: Grid
    settings: ServingSettings

    async def look(self) -> None:
        await rectify(ServingRepository(self.engine))
        await Planner(self.plans, self.watch, 1).look()

    async def of(self, pool: str) -> list[Any]:
        return await self.database.fetch("SELECT * FROM pool_plans WHERE pool = $1 ORDER BY id", pool)

    async def outcomes(self, pool: str) -> list[tuple[str, str | None]]:
        return [(plan["state"], plan["outcome"]) for plan in await self.of(pool)]

    async def in_force(self, pool: str) -> str | None:
        return await self.database.fetchval("SELECT plan_id FROM pools WHERE name = $1", pool)

    async def answer(self, plan_id: str, answer: Any = None) -> bool:
        store = plan_repository(self.engine)
        assert await store.claim(plan_id, "hand", 60)
        if isinstance(answer, WorkFailure):
            return await store.fail(plan_id, "hand", answer)
        return await store.succeed(plan_id, "hand", answer or ANSWER)

    async def answered(self, pool: str, answer: Any = None) -> str:
        """Have the newest plan answered and judged; return its id."""
        plan_id = (await self.of(pool))[-1]["id"]
        await self.answer(plan_id, answer)
        await self.look()
        return plan_id

    async def planned(self, pool: str, **spec: Any) -> str:
        """Make a pool and have its first plan answered and judged; return the plan's id."""
        await add_pool(self.database, pool, a_spec(**spec))
        await self.look()
        return await self.answered(pool)

    async def shift(self, pool: str, by: timedelta) -> None:
        """Have all that happened to a pool's plans have happened so much earlier."""
        slots = timedelta(weeks=by // timedelta(weeks=1))
        await self.database.execute(
            "UPDATE pool_plans SET slot_at = slot_at - $2::interval WHERE pool = $1", pool, slots
        )
        for column in ("from_at", "deadline_at", "submitted_at", "started_at", "ended_at", "decided_at"):
            await self.database.execute(
                f"UPDATE pool_plans SET {column} = {column} - $2::interval WHERE pool = $1", pool, by
            )
        await self.database.execute("UPDATE pools SET created_at = created_at - $2::interval WHERE name = $1", pool, by)
        made_at = "problem = jsonb_set(problem, '{made_at}', to_jsonb((SELECT created_at FROM pools WHERE name = $1)))"
        await self.database.execute(f"UPDATE pool_plans SET {made_at} WHERE pool = $1", pool)


@asynccontextmanager
async def a_world(database_url: str, **changes: Any) -> AsyncIterator[World]:
    """Yield a world without pools."""
    made = {"database_url": database_url, "plan_interval_s": 604_800, "plan_lead_s": 0, **changes}
    settings = ServingSettings(WATTSHIFT_SERVICE_TOKEN="x" * 16, plan_retry_s=1e-6, **made)  # type: ignore[arg-type]
    engine = create_engine(database_url, pool_size=10)
    database = await connect(database_url, application_name="test")
    await database.execute("TRUNCATE pools, pool_plans, audit_log")
    repository = ServingRepository(engine)
    grid = Grid()
    watch = EventWatch(repository, grid, settings)
    try:
        yield World(engine, database, Plans(repository, plan_repository(engine), settings), watch, grid, settings)
    finally:
        await database.close()
        await engine.dispose()
