"""Footprints: sums over the ledger by job, project, tenant or node, and what one job used under which intensity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy
from services.contracts.reports import FootprintLine, FootprintReport, IntensityUse, JobFootprintReport
from services.core.domain.signal import Signal
from services.db.database import Database
from services.kit.cursors import read_cursor, write_cursor
from services.telemetry.accounts import Inputs, accounts_of, functional_units, known_means, zone_intensities
from services.telemetry.repository import accounts, reports
from services.telemetry.repository.reports import Amounts, GroupRow, Subject, TotalRow
from services.telemetry.settings import TelemetrySettings


@dataclass(frozen=True, slots=True)
class Question:
    """The subject of a footprint report; None as ``tenant_id`` or ``project``: all of them."""

    group_by: GroupBy
    start_at: datetime | None
    end_at: datetime | None
    tenant_id: str | None
    project: str | None
    cursor: str | None
    limit: int


async def footprint_report(database: Database, question: Question, settings: TelemetrySettings) -> FootprintReport:
    """Return sums over a period, a page of groups at a time; idle and total are those of the whole period.

    A line belongs to the period in which it begins (a folded one, with its whole day). A tenant or a project sees
    its own jobs, no idle share, and the sum of its lines as metered energy.
    """
    after = read_cursor(question.cursor, r"[^\x00]{1,200}")
    about = Subject(question.start_at, question.end_at, question.tenant_id, question.project)
    async with database.transaction("repeatable_read", readonly=True) as connection:  # all figures of one moment
        found = await reports.sums(connection, question.group_by, about, after=after, limit=question.limit + 1)
        rows = await accounts.account_rows(connection, question.group_by, about)
    totals = {row.idle: row for row in found.totals}
    idle, used = _footprint(totals.get(True)), _footprint(totals.get(False))
    total = _sum([idle, used])
    page = found.groups[: question.limit]
    inputs = Inputs(
        settings.market_gco2_per_kwh, settings.embodied_kgco2, settings.device_lifetime_s, known_means(rows.means)
    )
    parts = accounts.groups_named(rows.parts, [row.name for row in page])
    units = functional_units(rows.spent, rows.done, inputs)
    return FootprintReport(
        start_at=question.start_at,
        end_at=question.end_at,
        group_by=question.group_by,
        lines=[
            FootprintLine(
                group=row.name,
                name=row.label if question.group_by == "job" else None,
                footprint=_footprint(row),
                jobs=row.jobs,
                accounts=accounts_of(parts[row.name], inputs),
            )
            for row in page
        ],
        idle=idle,
        total=total,
        idle_accounts=accounts_of((part for part in rows.parts if part.idle), inputs),
        total_accounts=accounts_of(rows.parts, inputs),
        signals=sorted({Signal(part.signal) for part in rows.parts}),
        zones=zone_intensities(rows.parts, inputs),
        units=units,
        metered_gpu_energy_j=found.metered_gpu_energy_j if question.tenant_id is None else total.gpu_energy_j,
        next_cursor=write_cursor(page[-1].name) if len(found.groups) > question.limit else None,
    )


async def job_footprint(database: Database, job_id: str, cursor: str | None, limit: int) -> JobFootprintReport:
    """Return a job's footprint and what it used under which intensity, in order of time."""
    after = int(read_cursor(cursor, r"[0-9]{1,12}") or 0)
    footprint, terms, uses = await reports.uses_of(database, job_id, after=after, limit=limit + 1)
    page = uses[:limit]
    return JobFootprintReport(
        job_id=job_id,
        footprint=_footprint(footprint),
        zone=terms.zone if terms else None,
        signal=Signal(terms.signal) if terms else None,
        pue=terms.pue if terms else None,
        intervals=[
            IntensityUse(
                start_at=use.start_at,
                end_at=use.end_at,
                energy_j=use.energy_j,
                intensity_gco2_per_kwh=use.intensity_gco2_per_kwh,
                carbon_gco2=use.carbon_gco2,
                estimated=use.estimated,
            )
            for use in page
        ],
        next_cursor=write_cursor(str(page[-1].number)) if len(uses) > limit else None,
    )


def _footprint(row: Amounts | GroupRow | TotalRow | None) -> JobFootprint:
    if row is None:
        return JobFootprint()
    return JobFootprint(**{name: getattr(row, name) for name in Amounts._fields})


def _sum(parts: Sequence[JobFootprint]) -> JobFootprint:
    return JobFootprint(**{name: sum(getattr(part, name) for part in parts) for name in JobFootprint.model_fields})
