"""Combines old raw lines into one per day, node and owner, without changing any sum; deletes other old records.

These are the records of controls and of model servers' clocks.
"""

from services.db import locks
from services.db.database import Database
from services.kit.logging import Log
from services.telemetry.repository.lines import RAW_LINES
from services.telemetry.repository.seals import Sign, foldable_day, next_sum, state_sum

log = Log(__name__)

# Whole UTC days only, so that a day is folded once but for what comes very late.
_BEFORE = "date_trunc('day', now() - make_interval(secs => $1), 'UTC')"

_OLDEST = f"""
SELECT min(start_at) FROM (
    SELECT start_at FROM energy_usages WHERE batch = 0 UNION ALL SELECT start_at FROM energy_intervals
) AS known WHERE start_at < {_BEFORE}
"""

ADD_TO_DAYS = """
INSERT INTO energy_days
    (day, node_id, owner, zone, signal, pue, job_id, start_at, end_at, energy_j, gpu_energy_j, estimated_energy_j,
     carbon_gco2, gpu_s, estimated, sum_number)
SELECT date_trunc('day', start_at, 'UTC'), node_id, owner, zone, signal, pue, min(job_id), min(start_at),
    max(end_at), sum(energy_j), sum(gpu_energy_j), sum(estimated_energy_j), sum(carbon_gco2), sum(gpu_s),
    bool_or(estimated), $1
FROM {lines} GROUP BY 1, 2, 3, 4, 5, 6
"""
"""Adds the sums of ``lines`` by day, under a number of their own."""

_FOLD_LINES = f"""
WITH gone AS (
    SELECT * FROM take_folded_lines($2, $3)
), ledger AS (
    {RAW_LINES.format(raw="gone")}
)
{ADD_TO_DAYS.format(lines="ledger")}
"""
"""Only that function of the database may delete lines."""

_HAS_OLD_LINES = "SELECT EXISTS (SELECT FROM energy_usages WHERE batch = 0 AND start_at < $1)"

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
DELETE FROM settings_in_force s USING gangs a
 WHERE a.id = s.allocation_id AND a.ended_at < now() - make_interval(secs => $1)
"""


_FORGET_CLOCKS = "DELETE FROM server_clocks WHERE start_at < now() - make_interval(secs => $1)"


async def forget_settings(database: Database, retention_s: float) -> None:
    """Delete the control records of gangs that ended that long ago."""
    await database.execute(_FORGET_SETTINGS, retention_s)


async def forget_clocks(database: Database, keep_days: float) -> None:
    """Delete records of model servers' clocks that are that old."""
    await database.execute(_FORGET_CLOCKS, keep_days * 86_400.0)


async def fold(database: Database, sign: Sign, retention_s: float) -> int:
    """Combine lines that are older than ``retention_s``, by whole days; return the number of transactions it took.

    The lines that a statement of the ledger covers are replaced together, once all of them are that old, by a sum that
    names the statement's hash. Lines from before there were statements, and intervals, are combined by day. Nodes
    deliver their intervals in order, so everything up to the highest combined one was stored before.
    """
    done = 0
    while True:
        async with database.transaction() as connection:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
            before = await connection.fetchval(f"SELECT {_BEFORE}", retention_s)
            number = await next_sum(connection)
            if (day := await foldable_day(connection, before)) is not None:
                await connection.execute(_FOLD_LINES, number, day.number, None)
                await state_sum(connection, number, day, sign)
                log.info("ledger.folded", day=day.number)
            elif (oldest := await connection.fetchval(_OLDEST, retention_s)) is not None:
                until = await connection.fetchval(_NEXT_DAY, retention_s, oldest)
                if await connection.fetchval(_HAS_OLD_LINES, until):
                    await connection.execute(_FOLD_LINES, number, None, until)
                    await state_sum(connection, number, None, sign)
                await connection.execute(_FOLD_INTERVALS, until)
                log.info("ledger.folded", until=until.isoformat())
            else:
                return done
        done += 1
