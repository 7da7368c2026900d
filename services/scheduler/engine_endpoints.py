"""The engines that the site has, as operators see them."""

from __future__ import annotations

from fastapi import APIRouter, Request

from services.contracts.engines import Engine, EngineDay, EngineList
from services.db.database import Database
from services.kit.identity import Operator
from services.scheduler.repository import engines
from services.scheduler.repository.engines import EngineRow

router = APIRouter(prefix="/v1")


@router.get("/engines")
async def list_engines(request: Request, _: Operator) -> EngineList:
    """Return every engine that a bridge has reported."""
    database: Database = request.app.state.database
    async with database.transaction("repeatable_read", readonly=True) as connection:
        found = await engines.engines(connection)
    return EngineList(items=[_engine(row) for row in found])


def _engine(row: EngineRow) -> Engine:
    days: dict[str, dict[str, int]] = {}
    for day in row.days:
        days.setdefault(day["day"], {})[day["what"]] = day["count"]
    shown = row._asdict() | {"days": [EngineDay(day=day, counts=counts) for day, counts in days.items()]}
    return Engine.model_validate(shown)
