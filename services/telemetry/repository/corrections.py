"""Returns to idle what a job was charged outside the life of its gang on the node; no node's sum changes."""

from services.contracts.nodes import Basis
from services.db import locks
from services.db.database import Database
from services.db.rows import fetch_rows
from services.kit.logging import Log
from services.telemetry.repository.energy import FootprintRow, add_footprints
from services.telemetry.repository.lines import EARLY_LINES, LATE_DAYS, LATE_LINES, RAW_LINES, RETURNED
from services.telemetry.repository.retention import ADD_TO_DAYS
from services.telemetry.repository.seals import Sign, next_sum, state_sum

log = Log(__name__)

_SUMS = """
SELECT job_id, sum(energy_j) AS energy_j, sum(gpu_energy_j) AS gpu_energy_j,
    sum(estimated_energy_j) AS estimated_energy_j, sum(carbon_gco2) AS carbon_gco2, sum(gpu_s) AS gpu_s
FROM {table} WHERE job_id IS NOT NULL GROUP BY job_id ORDER BY job_id
"""

# A line is never rewritten: one with the opposite amounts takes it from the job, and another gives it to idle.
_RETURN_LINES = """
WITH late AS (
    {lines} LIMIT $1
), given AS (
    INSERT INTO energy_usages (
        node_id, boot_id, sequence, owner, job_id, start_at, end_at, gpus, gpu_energy_j, cpu_energy_j, static_energy_j,
        source, cpu_source, zone, signal, intensity_gco2_per_kwh, intensity_estimated, pue, carbon_gco2, devices,
        provider, intensity_kind, fetched_at, release, basis)
    SELECT node_id, '{returned}' || late.owner || ':' || boot_id, sequence, p.owner, p.job_id, out_from, end_at,
        p.sign * gpus, p.sign * out_share * gpu_energy_j, p.sign * out_share * cpu_energy_j,
        p.sign * out_share * static_energy_j, source, cpu_source, zone, signal, intensity_gco2_per_kwh,
        intensity_estimated, pue, p.sign * out_share * carbon_gco2, devices, provider, intensity_kind, fetched_at,
        release, '{basis}'
    FROM late CROSS JOIN LATERAL (VALUES (late.owner, late.job_id, -1), ('', NULL, 1)) AS p (owner, job_id, sign)
    RETURNING *
), figures AS (
    {figures}
)
{sums}
"""
_RETURN_LATE, _RETURN_EARLY = (
    _RETURN_LINES.format(
        lines=lines,
        returned=RETURNED,
        basis=Basis.RETURNED,
        figures=RAW_LINES.format(raw="given"),
        sums=_SUMS.format(table="figures"),
    )
    for lines in (LATE_LINES, EARLY_LINES)
)

_RETURN_DAYS = f"""
WITH found AS (
    {LATE_DAYS}
), late AS (
    SELECT node_id, p.owner, p.job_id, start_at, end_at, zone, signal, pue, p.sign * energy_j AS energy_j,
        p.sign * gpu_energy_j AS gpu_energy_j, p.sign * estimated_energy_j AS estimated_energy_j,
        p.sign * carbon_gco2 AS carbon_gco2, p.sign * gpu_s AS gpu_s, estimated
    FROM found CROSS JOIN LATERAL (VALUES (found.owner, found.job_id, -1), ('', NULL, 1)) AS p (owner, job_id, sign)
), given AS (
    {ADD_TO_DAYS.format(lines="late")}
)
{_SUMS.format(table="late")}
"""


async def return_late(database: Database, sign: Sign, at_once: int = 1_000) -> int:
    """Return all such charges to idle, ``at_once`` lines per transaction; return the number of jobs affected.

    What was returned is not found again, so a call that is cut off or repeated does no harm.
    """
    jobs: set[str] = set()
    while True:
        async with database.transaction() as connection:
            await connection.execute("SELECT pg_advisory_xact_lock($1)", locks.LEDGER_UPKEEP)
            rows = await fetch_rows(connection, FootprintRow, _RETURN_LATE, at_once)
            rows = rows or await fetch_rows(connection, FootprintRow, _RETURN_EARLY, at_once)
            if not rows:
                number = await next_sum(connection)
                if not (rows := await fetch_rows(connection, FootprintRow, _RETURN_DAYS, number)):
                    return len(jobs)
                await state_sum(connection, number, None, sign)
            await add_footprints(connection, rows)
        jobs.update(row.job_id for row in rows)
        log.warning("ledger.given_back", jobs=[row.job_id for row in rows][:5], energy_j=-sum(r.energy_j for r in rows))
