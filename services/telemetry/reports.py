"""Reports: sums over the ledger by job, project and so on, one job's, requests', past jobs, and the rules that hold."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy, PastJobsQuery, RequestQuery
from services.contracts.reports import (
    FootprintLine,
    FootprintQuery,
    FootprintReport,
    FootprintTable,
    HalfWidth,
    HourlyReport,
    IntensityUse,
    Invariant,
    InvariantReport,
    JobFootprintReport,
    PastJobs,
    RequestReport,
    ServersFootprint,
)
from services.core.accounting.uncertainty import half_widths
from services.core.domain.signal import Signal
from services.db.database import Database
from services.kit.routes import one_page, read_cursor
from services.telemetry.accounts import (
    Inputs,
    accounts_of,
    functional_units,
    zone_intensities,
)
from services.telemetry.repository import accounts, jobs, reports
from services.telemetry.repository.accounts import PartRow
from services.telemetry.repository.reports import Dimensions, GroupRow, Subject, period_end
from services.telemetry.repository.requests import of_servers, request_rows
from services.telemetry.repository.rules import breaches_of
from services.telemetry.settings import TelemetrySettings


async def footprint_report(
    database: Database, query: FootprintQuery, tenant_id: str | None, project: str | None, settings: TelemetrySettings
) -> FootprintReport:
    """Return sums over a period, a page of groups at a time; idle and total are those of the whole period.

    A line belongs to the period in which it begins (a folded one, with its whole day). A tenant or a project sees
    its own jobs, no idle share, and the sum of its lines as metered energy.

    Args:
        tenant_id, project: Whose jobs; None for those of all tenants or projects.
        settings: What the operator states about the installation.
    """
    after, by = _after(query.cursor), Dimensions(query.group_by, query.then_by)
    async with database.transaction("repeatable_read", readonly=True) as connection:  # all figures of one moment
        end_at = await reports.period_end(connection, query.start, query.end)
        about = Subject(query.start, end_at, tenant_id, project)
        groups = await reports.group_rows(connection, by, about, after=after, limit=query.limit + 1)
        sums, metered_gpu_energy_j = await reports.totals(connection, about)
        page, following = one_page(groups, query.limit, lambda group: "\0".join(group[:2]))
        parts = await accounts.part_rows(connection, by, about, [group[:2] for group in page])
        rows = await accounts.account_rows(connection, about)
        others: dict[GroupBy, tuple[list[GroupRow], list[PartRow]]] = {
            group: (
                await reports.group_rows(connection, Dimensions(group), about),
                await accounts.part_rows(connection, Dimensions(group), about),
            )
            for group in query.also
        }
    idle, total = sums.get(True, JobFootprint()), sums.get(None, JobFootprint())
    stated = (settings.market_gco2_per_kwh, settings.embodied_kgco2, settings.device_lifetime_s)
    means = {zone: mean for zone, mean in rows.means.items() if mean is not None}
    inputs = Inputs(*stated, means, rows.currency, bool(rows.means))
    sees_all = tenant_id is project is None
    return FootprintReport(
        start_at=query.start,
        end_at=end_at,
        group_by=query.group_by,
        then_by=query.then_by,
        lines=_lines(by, page, parts, inputs),
        also=[
            FootprintTable(group_by=group, lines=_lines(Dimensions(group), groups, parts, inputs))
            for group, (groups, parts) in others.items()
        ],
        idle=idle,
        total=total,
        idle_accounts=accounts_of((part for part in rows.parts if part.idle), inputs),
        total_accounts=accounts_of(rows.parts, inputs),
        signals=sorted({Signal(part.signal) for part in rows.parts}),
        zones=zone_intensities(rows.parts, inputs),
        units=functional_units(rows.spent, rows.done, inputs),
        currency=rows.currency,
        demand=rows.demand if sees_all and inputs.hourly else [],
        metered_gpu_energy_j=metered_gpu_energy_j if sees_all else total.gpu_energy_j,
        next_cursor=following,
    )


def _lines(by: Dimensions, rows: Sequence[GroupRow], parts: Sequence[PartRow], inputs: Inputs) -> list[FootprintLine]:
    of_groups = accounts.parts_of_groups(parts)
    return [
        FootprintLine(
            group=row.name,
            then_group=row.then_name if by.then_by else None,
            name=row.label if by.group_by == "job" else None,
            footprint=JobFootprint.of(row),
            jobs=row.jobs,
            accounts=accounts_of(of_groups[row.name, row.then_name], inputs),
        )
        for row in rows
    ]


async def hourly_report(
    database: Database, start_at: datetime, end_at: datetime, tenant_id: str | None, project: str | None
) -> HourlyReport:
    """Return what was used in each hour of a period; the idle part only for a caller who sees everything."""
    rows = await reports.hour_rows(database, Subject(start_at, end_at, tenant_id, project))
    if tenant_id is None and project is None:
        return HourlyReport(items=rows)
    hidden = {"idle_energy_j": None, "idle_carbon_gco2": None}
    return HourlyReport(items=[row.model_copy(update=hidden) for row in rows])


async def job_footprint(database: Database, job_id: str, cursor: str | None, limit: int) -> JobFootprintReport:
    """Return a job's footprint, and its use under each intensity in order of time."""
    after = int(read_cursor(cursor, r"[0-9]{1,12}") or 0)
    footprint, cells, terms, uses = await reports.uses_of(database, job_id, after=after, limit=limit + 1)
    page, following = one_page(uses, limit, lambda use: str(use["number"]))
    priced: dict[str, Any] = dict(terms) if terms else dict.fromkeys(("zone", "signal", "pue"))
    return JobFootprintReport(
        job_id=job_id,
        footprint=footprint,
        half_width=HalfWidth.of(half_widths(cells)),
        **priced,
        intervals=[IntensityUse.as_stored(dict(use)) for use in page],
        next_cursor=following,
    )


def _after(cursor: str | None) -> tuple[str, str] | None:
    """Return the names of the last group of the previous page."""
    text = read_cursor(cursor, r"[^\x00]*\x00[^\x00]*")  # no name has this character
    if text is None:
        return None
    name, _, then_name = text.partition("\0")
    return name, then_name


async def past_jobs(database: Database, query: PastJobsQuery, tenant_id: str | None, project: str | None) -> PastJobs:
    """Return one page of the jobs submitted in a period, those that have not ended too, without service instances.

    Args:
        tenant_id, project: Whose jobs; None for those of all tenants or projects.

    Raises:
        ProblemError: 422 for an invalid cursor.
    """
    after = read_cursor(query.cursor, r"[A-Za-z0-9_]{1,100}")
    rows = await jobs.past_jobs(database, query, tenant_id, project, after)
    items, following = one_page(rows, query.limit, lambda job: job.job_id)
    return PastJobs(items=items, next_cursor=following)


async def request_report(database: Database, query: RequestQuery, tenant_id: str | None) -> RequestReport:
    """Return requests of a period by group; the servers' whole energy and the unattributed rest for operators only.

    Nothing is added to the ledger for a request: its server's job has lines already. What routers report is the share
    of the server's time that requests had; it divides these lines when a report is made. So all requests and the
    unattributed rest add up to what the ledger has for the servers, whatever arrives late or twice.

    Args:
        tenant_id: Whose requests; None for all, for operators.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        end_at = await period_end(connection, query.start, query.end)
        rows = await request_rows(connection, query.group_by, query.start, end_at, tenant_id)
        of_all = await of_servers(connection, query.start, end_at) if tenant_id is None else None
    servers: ServersFootprint | None = None
    if of_all is not None:
        energy_j, carbon_gco2 = of_all
        servers = ServersFootprint(
            energy_j=energy_j,
            carbon_gco2=carbon_gco2,
            unattributed_energy_j=max(0.0, energy_j - sum(row.energy_j for row in rows)),
            unattributed_carbon_gco2=carbon_gco2 - sum(row.carbon_gco2 for row in rows),
        )
    return RequestReport(start_at=query.start, end_at=end_at, group_by=query.group_by, lines=rows, servers=servers)


BREACHES_SHOWN = 3  #: Of a rule


async def invariant_report(database: Database) -> InvariantReport:
    """Return every rule and whether it holds now."""
    invariants: list[Invariant] = []
    for rule, breaches in await breaches_of(database, BREACHES_SHOWN + 1):
        detail = "; ".join(breaches[:BREACHES_SHOWN]) if breaches else rule.holds
        more = "; ..." if len(breaches) > BREACHES_SHOWN else ""
        invariants.append(Invariant(name=rule.name, holds=not breaches, detail=detail + more))
    return InvariantReport(holds=all(invariant.holds for invariant in invariants), invariants=invariants)
