"""Combine old raw lines into one per day, node and owner, without changing any sum; delete old records of controls and
clocks."""

from __future__ import annotations

from services.db import locks
from services.db.database import Database
from services.kit.logging import Log
from services.telemetry.repository.lines import RAW_LINES

log = Log(__name__)

# Whole UTC days only, so that a day is folded once but for what comes very late.
_BEFORE = "date_trunc('day', now() - make_interval(secs => $1), 'UTC')"

_OLDEST = f"""
SELECT min(start_at) FROM (
    SELECT min(start_at) AS start_at FROM energy_usages UNION ALL SELECT min(start_at) FROM energy_intervals
) AS known WHERE start_at < {_BEFORE}
"""

ADD_TO_DAYS = """
INSERT INTO energy_days AS known
    (day, node_id, owner, zone, signal, pue, job_id, start_at, end_at, energy_j, gpu_energy_j, estimated_energy_j,
     carbon_gco2, gpu_s, estimated)
SELECT date_trunc('day', start_at, 'UTC'), node_id, {owner}, zone, signal, pue, min({job_id}), min(start_at),
    max(end_at), sum(energy_j), sum(gpu_energy_j), sum(estimated_energy_j), sum(carbon_gco2), sum(gpu_s),
    bool_or(estimated)
FROM {lines} GROUP BY 1, 2, 3, 4, 5, 6
ON CONFLICT (day, node_id, owner, zone, signal, pue) DO UPDATE SET
    start_at = least(known.start_at, excluded.start_at), end_at = greatest(known.end_at, excluded.end_at),
    energy_j = known.energy_j + excluded.energy_j, gpu_energy_j = known.gpu_energy_j + excluded.gpu_energy_j,
    estimated_energy_j = known.estimated_energy_j + excluded.estimated_energy_j,
    carbon_gco2 = known.carbon_gco2 + excluded.carbon_gco2, gpu_s = known.gpu_s + excluded.gpu_s,
    estimated = known.estimated OR excluded.estimated
"""
"""Adds ``lines`` to the sums of their days."""

_FOLD_LINES = f"""
WITH gone AS (
    DELETE FROM energy_usages WHERE start_at < $1 RETURNING *
), ledger AS (
    {RAW_LINES.format(raw="gone")}
)
{ADD_TO_DAYS.format(owner="owner", job_id="job_id", lines="ledger")}
"""

_FOLD_INTERVALS = """
WITH gone AS (
    DELETE FROM energy_intervals WHERE start_at < $1 RETURNING *
), marked AS (
    INSERT INTO folded_intervals AS known (node_id, boot_id, through_sequence)
    SELECT node_id, boot_id, max(sequence) FROM gone GROUP BY 1, 2
    ON CONFLICT (node_id, boot_id) DO UPDATE
        SET through_sequence = greatest(known.through_sequence, excluded.through_sequence)
)
INSERT INTO metered_days AS known (day, node_id, metered_gpu_energy_j)
SELECT date_trunc('day', start_at, 'UTC'), node_id, sum(metered_gpu_energy_j) FROM gone GROUP BY 1, 2
ON CONFLICT (day, node_id) DO UPDATE
    SET metered_gpu_energy_j = known.metered_gpu_energy_j + excluded.metered_gpu_energy_j
"""

_NEXT_DAY = "SELECT least(date_trunc('day', $2::timestamptz, 'UTC') + interval '1 day', " + _BEFORE + ")"


_FORGET_SETTINGS = """
DELETE FROM settings_in_force s USING allocations a
 WHERE a.id = s.allocation_id AND a.ended_at < now() - make_interval(secs => $1)
"""


_FORGET_CLOCKS = "DELETE FROM server_clocks WHERE start_at < now() - make_interval(secs => $1)"


async def forget_settings(database: Database, retention_s: float) -> None:
    """Delete the records of controls of gangs that ended that long ago."""
    async with database.connection() as connection:
        await connection.execute(_FORGET_SETTINGS, retention_s)


async def forget_clocks(database: Database, keep_days: float) -> None:
    """Delete the minutes of model servers' clocks that are that old."""
    async with database.connection() as connection:
        await connection.execute(_FORGET_CLOCKS, keep_days * 86_400.0)


async def fold(database: Database, retention_s: float) -> int:
    """Combine the lines of every whole day older than ``retention_s``, one day per transaction; return the number of
    days.

    Nodes deliver their intervals in order, so everything up to the highest combined one was stored before.
    """
    days = 0
    while True:
        async with database.transaction() as connection:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
            oldest = await connection.fetchval(_OLDEST, retention_s)
            if oldest is None:
                return days
            until = await connection.fetchval(_NEXT_DAY, retention_s, oldest)
            await connection.execute(_FOLD_LINES, until)
            await connection.execute(_FOLD_INTERVALS, until)
        days += 1
        log.info("ledger.folded", until=until.isoformat())
