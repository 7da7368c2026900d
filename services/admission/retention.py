"""Keeps the database from growing for ever; docs/operating.md says what is forgotten and when."""

from dataclasses import dataclass
from typing import Self

from sqlalchemy.ext.asyncio import AsyncEngine

from services.admission.repository import retention
from services.admission.settings import AdmissionSettings
from services.kit.logging import Log

log = Log(__name__)

DAY_S = 86_400.0


@dataclass(frozen=True)
class Kept:
    """How long things are kept, seconds; None: for ever."""

    jobs_s: float | None  #: Jobs, with all that happened to them, after their end
    keys_s: float | None  #: Idempotency keys
    audit_s: float | None  #: What operators and admins did

    @classmethod
    def of(cls, settings: AdmissionSettings) -> Self:
        """Return the retention times in the settings."""
        days = settings.jobs_keep_days, settings.idempotency_keep_days, settings.audit_keep_days
        return cls(*(each * DAY_S if each else None for each in days))


class Retention:
    """Forgets what is old. Several processes may do so at the same time."""

    def __init__(self, engine: AsyncEngine, kept: Kept) -> None:
        self._engine, self._kept = engine, kept

    async def forget(self) -> int:
        """Forget everything past its time; return how many jobs were forgotten."""
        jobs = 0
        if (kept_s := self._kept.jobs_s) is not None:
            while count := await self._forget_jobs(kept_s):
                jobs += count
            async with self._engine.begin() as connection:
                await retention.forget_arrays(connection, kept_s)
        async with self._engine.begin() as connection:
            if self._kept.keys_s is not None:
                await retention.forget_keys(connection, self._kept.keys_s)
            if self._kept.audit_s is not None:
                await retention.forget_audit(connection, self._kept.audit_s)
        if jobs:
            log.info("jobs.forgotten", jobs=jobs)
        return jobs

    async def _forget_jobs(self, kept_s: float) -> int:
        async with self._engine.begin() as connection:
            return await retention.forget_jobs(connection, kept_s)
