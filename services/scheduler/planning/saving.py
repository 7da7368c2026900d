"""What dry runs would have saved: each day's jobs, shifted to when they would have been allowed to start.

Computed when a day is over, and again until the ledger has its energy and the hours in which its jobs would have run
are over: the state is in the tables, so that the work may be interrupted anywhere.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta

from services.contracts.engines import EngineSavings
from services.core.domain.carbon import Measured
from services.core.domain.units import J_PER_KWH
from services.db.database import Database
from services.kit.logging import Log
from services.kit.repeating import repeat
from services.scheduler.planning.carbon import CarbonWatch
from services.scheduler.repository import savings
from services.scheduler.repository.savings import EndedRow, EnergyRow

log = Log(__name__)

EVERY_S = 600.0
LATE_S = 6 * 3_600.0  #: Energy that was used before the end of a day is in the ledger so long after it
KEPT_DAYS = 5
"""So long, what was mirrored of all of a day's jobs is surely kept; then a day is settled, whatever is missing."""


def delay_s(job: EndedRow) -> float:
    """Return how much later a job would have begun, seconds."""
    return max((job.would_start_s or 0.0) - job.started_s, 0.0)


def reckoned(
    jobs: Sequence[EndedRow],
    used: Sequence[EnergyRow],
    pasts: Mapping[str, Measured | None],
    now_s: float,
    *,
    late: bool,
) -> EngineSavings:
    """Return what would have been saved on the jobs of a day.

    Args:
        jobs: Those that ended on the day.
        used: Their energy, by part of an hour.
        pasts: Measured intensities, by zone, over the time in which the delayed ones would have run.
        late: Whether no more energy of the day is expected.
    """
    by_job: dict[str, list[EnergyRow]] = {}
    for each in used:
        by_job.setdefault(each.job_id, []).append(each)
    unmeasured = unpriced = 0
    pairs: list[tuple[float, float]] = []
    for job in jobs:
        rows, shift_s = by_job.get(job.job_id, []), delay_s(job)
        would = would_emit(rows, pasts, shift_s, now_s) if shift_s else sum(row.carbon_gco2 for row in rows)
        if not rows:
            unmeasured += 1
        elif would is None or any(row.signal != used[-1].signal for row in rows):
            unpriced += 1
        else:
            pairs.append((sum(row.carbon_gco2 for row in rows), would))
    planned = [delay_s(job) for job in jobs if job.planned]
    return EngineSavings(
        jobs=len(jobs),
        unplanned=len(jobs) - len(planned),
        later=sum(each > 0 for each in planned),
        later_h=sum(planned) / 3_600 if planned else None,
        unmeasured=unmeasured,
        unpriced=unpriced,
        carbon_gco2=sum(pair[0] for pair in pairs) if pairs else None,
        would_carbon_gco2=sum(pair[1] for pair in pairs) if pairs else None,
        settled=late and not unpriced,
    )


def would_emit(
    rows: Sequence[EnergyRow], pasts: Mapping[str, Measured | None], shift_s: float, now_s: float
) -> float | None:
    """Return what a job's energy would have emitted ``shift_s`` later, gCO2; None as long as that is unknown."""
    total = 0.0
    for row in rows:
        past, end_s = pasts.get(row.zone), row.end_s + shift_s
        mean = past.mean(row.start_s + shift_s, end_s) if past and end_s <= now_s else None
        if mean is None:
            return None
        total += row.energy_j / J_PER_KWH * mean
    return total


class Savings:
    """Computes what the dry runs of engines would have saved, day by day."""

    def __init__(self, database: Database, carbon: CarbonWatch) -> None:
        self._database = database
        self._carbon = carbon

    async def run(self) -> None:
        """Compute savings until cancelled."""
        await repeat(lambda: self.look(time.time()), EVERY_S, failed="savings.failed", traceback=True)

    async def look(self, now_s: float) -> int:
        """Compute the savings of the days before that of ``now_s`` that are not settled; return how many days."""
        today = datetime.fromtimestamp(now_s, UTC).date()
        due = await self._database.run(savings.unsettled, today - timedelta(days=KEPT_DAYS), today)
        for engine, day in due:
            await self._reckon(engine, day, today, now_s)
        return len(due)

    async def _reckon(self, engine: str, day: date, today: date, now_s: float) -> None:
        async with self._database.transaction("repeatable_read", readonly=True) as connection:
            jobs = await savings.ended(connection, engine, day)
            used = await savings.used(connection, [job.job_id for job in jobs])
        pasts = await self._pasts(jobs, used, now_s)
        day_end_s = datetime.combine(day, datetime.min.time(), UTC).timestamp() + 86_400
        found = reckoned(jobs, used, pasts, now_s, late=now_s >= day_end_s + LATE_S)
        if today - day >= timedelta(days=KEPT_DAYS):
            found = found.model_copy(update={"settled": True})
        await self._database.execute(savings.STORE, engine, day, found.model_dump())
        log.info("savings.reckoned", engine=engine, day=str(day), jobs=found.jobs, settled=found.settled)

    async def _pasts(
        self, jobs: Sequence[EndedRow], used: Sequence[EnergyRow], now_s: float
    ) -> dict[str, Measured | None]:
        """Return measured intensities over the time in which delayed jobs would have run, by zone."""
        delays = {job.job_id: delay for job in jobs if (delay := delay_s(job))}
        windows: dict[str, tuple[str, float, float]] = {}
        for row in used:
            if (shift_s := delays.get(row.job_id)) is not None:
                _, start_s, end_s = windows.get(row.zone, (row.signal, row.start_s + shift_s, 0.0))
                windows[row.zone] = (
                    row.signal,
                    min(start_s, row.start_s + shift_s),
                    max(end_s, min(row.end_s + shift_s, now_s)),
                )
        return {
            zone: await self._carbon.past(zone, signal, start_s, end_s) if end_s > start_s else None
            for zone, (signal, start_s, end_s) in windows.items()
        }
