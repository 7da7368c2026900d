"""The site's engines, as operators see them."""

from typing import Annotated

from fastapi import APIRouter, Query

from services.contracts import engines as contracts
from services.contracts.queries import EngineDaysQuery, EngineJobsQuery
from services.contracts.schema import Name
from services.db.database import Database
from services.kit.identity import Operator
from services.kit.problems import not_found
from services.kit.routes import from_state
from services.scheduler.repository import engines

router = APIRouter(prefix="/v1", tags=["nodes"])

Stored = Annotated[Database, from_state("database")]


@router.get("/engines")
async def list_engines(_: Operator, database: Stored) -> contracts.EngineList:
    """List engines.

    Engines are other systems that run jobs on the site, such as Slurm; each comes with what was decided about its
    jobs, day by day.
    """
    return contracts.EngineList(items=await database.run(engines.engines))


@router.get("/engines/{name}/days")
async def list_days_of_engine(
    name: Name, _: Operator, database: Stored, query: Annotated[EngineDaysQuery, Query()]
) -> contracts.EngineDays:
    """List days of an engine.

    What was decided about its jobs on each of the last days, and what a dry run would have saved on those that ended
    then.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        if not await engines.is_known(connection, name):
            raise not_found("engine")
        return contracts.EngineDays(items=await engines.days(connection, query.days, name))


@router.get("/engines/{name}/jobs")
async def list_jobs_of_engine(
    name: Name, _: Operator, database: Stored, query: Annotated[EngineJobsQuery, Query()]
) -> contracts.EngineJobList:
    """List jobs that wait in an engine.

    Until when each is held back for a greener hour, or would be if this were no dry run, and the emissions that this
    is expected to save; and how much of the engine's work can be steered at all.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        if not await engines.is_known(connection, name):
            raise not_found("engine")
        items = await engines.waiting(connection, name, held=query.held)
        return contracts.EngineJobList(items=items, hours=await engines.hours(connection, name))
