"""The jobs that dry runs of engines have watched, with their energy, and the savings computed from them."""

from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_rows

# A job belongs to the day on which its end was learnt, so that none comes to a day that is settled.
UNSETTLED = """
SELECT DISTINCT e.engine, (j.ended_at AT TIME ZONE 'UTC')::date AS day
  FROM engine_jobs e JOIN jobs j ON j.id = e.job_id
 WHERE e.watched AND e.over AND NOT e.unfolded AND j.started_at IS NOT NULL
   AND j.ended_at >= $1::date::timestamp AT TIME ZONE 'UTC' AND j.ended_at < $2::date::timestamp AT TIME ZONE 'UTC'
   AND NOT EXISTS (SELECT FROM engine_savings s
                    WHERE s.settled AND s.engine = e.engine AND s.day = (j.ended_at AT TIME ZONE 'UTC')::date)
 ORDER BY 2, 1
"""

ENDED = """
SELECT e.job_id, e.planned, extract(epoch FROM e.would_start_at)::float8 AS would_start_s,
       extract(epoch FROM min(coalesce(a.running_at, a.started_at)))::float8 AS started_s
  FROM engine_jobs e JOIN jobs j ON j.id = e.job_id JOIN allocations a ON a.job_id = j.id
 WHERE e.engine = $1 AND e.watched AND e.over AND NOT e.unfolded AND j.started_at IS NOT NULL
   AND (j.ended_at AT TIME ZONE 'UTC')::date = $2
 GROUP BY 1, 2, 3 ORDER BY 1
"""

USED = """
SELECT job_id, zone, signal, extract(epoch FROM min(start_at))::float8 AS start_s,
       extract(epoch FROM max(end_at))::float8 AS end_s,
       sum(energy_j * pue) AS energy_j, sum(carbon_gco2) AS carbon_gco2
  FROM energy_lines WHERE job_id = ANY($1::text[])
 GROUP BY 1, 2, 3, floor(extract(epoch FROM start_at) / 900) ORDER BY start_s, 1, 2
"""

STORE = """
INSERT INTO engine_savings
SELECT (jsonb_populate_record(NULL::engine_savings, $3 || jsonb_build_object('engine', $1::text, 'day', $2::date))).*
ON CONFLICT (engine, day) DO UPDATE SET
    jobs = excluded.jobs, unplanned = excluded.unplanned, unmeasured = excluded.unmeasured,
    unpriced = excluded.unpriced, later = excluded.later, later_h = excluded.later_h,
    carbon_gco2 = excluded.carbon_gco2, would_carbon_gco2 = excluded.would_carbon_gco2, settled = excluded.settled
"""


class EndedRow(NamedTuple):
    """A job that ran under a dry run; times are UTC seconds."""

    job_id: str
    planned: bool  #: Whether any plan knew it while it waited
    would_start_s: float | None  #: Until when the last such plan held it back; None: it did not
    started_s: float  #: When its first run began


class EnergyRow(NamedTuple):
    """What a job used within a quarter of an hour, by the ledger; ``energy_j`` is the facility's, with the PUE."""

    job_id: str
    zone: str
    signal: str
    start_s: float
    end_s: float
    energy_j: float
    carbon_gco2: float


async def unsettled(connection: Connection, since: date, until: date) -> list[tuple[str, date]]:
    """Return engines and days in ``[since, until)`` for which savings are still to be computed."""
    return [(row["engine"], row["day"]) for row in await connection.fetch(UNSETTLED, since, until)]


async def ended(connection: Connection, engine: str, day: date) -> list[EndedRow]:
    """Return the jobs that ended on a UTC day."""
    return await fetch_rows(connection, EndedRow, ENDED, engine, day)


async def used(connection: Connection, job_ids: Sequence[str]) -> list[EnergyRow]:
    """Return the energy that jobs used, oldest first."""
    return await fetch_rows(connection, EnergyRow, USED, list(job_ids))
