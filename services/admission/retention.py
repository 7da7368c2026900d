"""Keeps the database from growing for ever; docs/operating.md says what is forgotten and when."""

from typing import NamedTuple

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository.retention import FORGET_ARRAYS, FORGET_AUDIT, FORGET_KEYS, forget_jobs
from services.kit.logging import Log

log = Log(__name__)

DAY_S = 86_400.0


class Kept(NamedTuple):
    """How long things are kept, days; 0: for ever."""

    jobs: float  #: Jobs, with all that happened to them, after their end
    keys: float  #: Idempotency keys
    audit: float  #: What operators and admins did


async def forget(engine: AsyncEngine, kept: Kept) -> int:
    """Forget everything past its time, as several processes may; return how many jobs were forgotten."""
    jobs = 0
    while kept.jobs:
        async with engine.begin() as connection:
            count = await forget_jobs(connection, kept.jobs * DAY_S)
        if not count:
            break
        jobs += count
    for statement, days in ((FORGET_ARRAYS, kept.jobs), (FORGET_KEYS, kept.keys), (FORGET_AUDIT, kept.audit)):
        if days:
            async with engine.begin() as connection:
                await connection.execute(statement, {"kept_s": days * DAY_S})
    if jobs:
        log.info("jobs.forgotten", jobs=jobs)
    return jobs
