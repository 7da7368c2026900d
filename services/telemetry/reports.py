"""Footprints: sums over the ledger by job, project, tenant or node, and what one job used under which intensity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy
from services.contracts.reports import FootprintLine, FootprintReport, IntensityUse, JobFootprintReport
from services.db.database import Database
from services.kit.cursors import read_cursor, write_cursor
from services.telemetry.lines import LEDGER, METERED

_AMOUNTS = """
    coalesce(sum(l.energy_j), 0) AS energy_j, coalesce(sum(l.gpu_energy_j), 0) AS gpu_energy_j,
    coalesce(sum(l.estimated_energy_j), 0) AS estimated_energy_j, coalesce(sum(l.carbon_gco2), 0) AS carbon_gco2,
    coalesce(sum(l.gpu_s), 0) AS gpu_s
"""

_PERIOD = "($1::timestamptz IS NULL OR l.start_at >= $1) AND ($2::timestamptz IS NULL OR l.start_at < $2)"

_GROUPS: dict[GroupBy, str] = {"job": "l.job_id", "project": "j.project", "tenant": "j.tenant_id", "node": "l.node_id"}

_LINES = """
WITH {ledger}
SELECT {group} AS name, count(DISTINCT l.job_id) AS jobs, {amounts}
FROM ledger l JOIN jobs j ON j.id = l.job_id
WHERE {period} AND ($3::text IS NULL OR j.tenant_id = $3) AND ($4::text IS NULL OR {group} > $4)
GROUP BY 1 ORDER BY 1 LIMIT $5
"""

_TOTALS = """
WITH {ledger}
SELECT l.job_id IS NULL AS idle, {amounts}
FROM ledger l LEFT JOIN jobs j ON j.id = l.job_id
WHERE {period} AND ($3::text IS NULL OR j.tenant_id = $3)
GROUP BY 1
"""

_METERED = """
WITH {metered}
SELECT coalesce(sum(l.metered_gpu_energy_j), 0) FROM metered l WHERE {period}
"""

# Consecutive lines under one intensity are one use; a job's lines are numbered by where the intensity changes.
_USES = """
WITH {ledger}, marked AS (
    SELECT l.*, (lag(intensity_gco2_per_kwh) OVER w, lag(estimated) OVER w)
        IS DISTINCT FROM (intensity_gco2_per_kwh, estimated) AS changes
    FROM ledger l WHERE job_id = $1 WINDOW w AS (ORDER BY start_at, node_id, end_at)
), numbered AS (
    SELECT *, count(*) FILTER (WHERE changes) OVER (ORDER BY start_at, node_id, end_at) AS number FROM marked
)
SELECT number, min(start_at) AS start_at, max(end_at) AS end_at, sum(energy_j) AS energy_j,
    min(intensity_gco2_per_kwh) AS intensity, sum(carbon_gco2) AS carbon_gco2, bool_or(estimated) AS estimated
FROM numbered WHERE number > $2 GROUP BY number ORDER BY number LIMIT $3
"""

_LAST_TERMS = """
WITH {ledger} SELECT zone, signal, pue FROM ledger WHERE job_id = $1 ORDER BY start_at DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Question:
    """What a footprint report is about; ``tenant_id`` None is everybody."""

    group_by: GroupBy
    start_at: datetime | None
    end_at: datetime | None
    tenant_id: str | None
    cursor: str | None
    limit: int


async def footprint_report(database: Database, question: Question) -> FootprintReport:
    """Return sums over a period, a page of groups at a time; idle and total are those of the whole period.

    A line belongs to the period in which it begins (a folded one, with its whole day). A tenant sees its own jobs, no
    idle share, and as metered what its lines say.
    """
    after = read_cursor(question.cursor, r"[^\x00]{1,200}")
    about = (question.start_at, question.end_at, question.tenant_id)
    parts = {
        "ledger": LEDGER,
        "amounts": _AMOUNTS,
        "period": _PERIOD,
        "metered": METERED,
        "group": _GROUPS[question.group_by],
    }
    async with database.transaction("repeatable_read", readonly=True) as connection:
        rows = await connection.fetch(_LINES.format(**parts), *about, after, question.limit + 1)
        totals = {row["idle"]: row for row in await connection.fetch(_TOTALS.format(**parts), *about)}
        metered_j = await connection.fetchval(_METERED.format(**parts), *about[:2])
    idle, used = _footprint(totals.get(True)), _footprint(totals.get(False))
    total = _sum([idle, used])
    page = rows[: question.limit]
    return FootprintReport(
        start_at=question.start_at,
        end_at=question.end_at,
        group_by=question.group_by,
        lines=[FootprintLine(group=row["name"], footprint=_footprint(row), jobs=row["jobs"]) for row in page],
        idle=idle,
        total=total,
        metered_gpu_energy_j=metered_j if question.tenant_id is None else total.gpu_energy_j,
        next_cursor=write_cursor(page[-1]["name"]) if len(rows) > question.limit else None,
    )


async def job_footprint(database: Database, job_id: str, cursor: str | None, limit: int) -> JobFootprintReport:
    """Return a job's footprint and what it used under which intensity, in order of time."""
    after = int(read_cursor(cursor, r"[0-9]{1,12}") or 0)
    async with database.transaction("repeatable_read", readonly=True) as connection:
        footprint = await connection.fetchrow("SELECT * FROM job_footprints WHERE job_id = $1", job_id)
        terms = await connection.fetchrow(_LAST_TERMS.format(ledger=LEDGER), job_id)
        rows = await connection.fetch(_USES.format(ledger=LEDGER), job_id, after, limit + 1)
    page = rows[:limit]
    return JobFootprintReport(
        job_id=job_id,
        footprint=_footprint(footprint),
        zone=terms["zone"] if terms else None,
        signal=terms["signal"] if terms else None,
        pue=terms["pue"] if terms else None,
        intervals=[
            IntensityUse(
                start_at=row["start_at"],
                end_at=row["end_at"],
                energy_j=row["energy_j"],
                intensity_gco2_per_kwh=row["intensity"],
                carbon_gco2=row["carbon_gco2"],
                estimated=row["estimated"],
            )
            for row in page
        ],
        next_cursor=write_cursor(str(page[-1]["number"])) if len(rows) > limit else None,
    )


async def owner_of(database: Database, job_id: str) -> str | None:
    """Return the tenant whose job this is, or None if there is no such job."""
    async with database.connection() as connection:
        return await connection.fetchval("SELECT tenant_id FROM jobs WHERE id = $1", job_id)


def _footprint(row: Any | None) -> JobFootprint:
    if row is None:
        return JobFootprint()
    return JobFootprint(**{name: row[name] for name in JobFootprint.model_fields})


def _sum(parts: Sequence[JobFootprint]) -> JobFootprint:
    return JobFootprint(**{name: sum(getattr(part, name) for part in parts) for name in JobFootprint.model_fields})
