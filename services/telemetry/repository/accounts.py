"""What the accounts of a report are computed from: energy by zone and board, mean intensities, work that was done."""

from collections import defaultdict
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

from services.contracts.reports import DemandCharge
from services.db.database import Connection
from services.db.rows import fetch_messages, fetch_rows
from services.telemetry.repository.lines import PART_HOURS, RETURNED, SUMS, WHOLE_HOURS
from services.telemetry.repository.reports import BOARDS, OWNED, PERIOD, Dimensions, Subject

PARTS = """
WITH {sums}, {boards}
SELECT {group} AS name, {then} AS then_name, l.job_id IS NULL AS idle, l.zone, b.model,
    sum(l.facility_energy_j) AS facility_energy_j, sum(l.gpu_s) AS gpu_s,
    sum(l.estimated_gco2) AS estimated_gco2, l.signal, l.node_id, sum(l.energy_j) AS energy_j,
    sum(l.estimated_energy_j) AS estimated_energy_j, sum(l.carbon_gco2) AS carbon_gco2,
    sum(l.guessed_gco2) AS guessed_gco2, sum(l.facility_energy_j * p.per_kwh) AS priced_j,
    bool_or(p.per_kwh IS NULL) AS unpriced
FROM sums l LEFT JOIN reported_jobs j ON j.id = l.job_id LEFT JOIN boards b USING (node_id)
    LEFT JOIN hourly_prices p ON p.zone = l.zone AND p.hour = date_trunc('hour', l.start_at, 'UTC')
WHERE {period} AND {owned}
    AND ($5::text[] IS NULL OR l.job_id IS NOT NULL AND ({group}, {then}) IN (SELECT * FROM unnest($5, $6::text[])))
GROUP BY 1, 2, 3, 4, 5, l.signal, l.node_id ORDER BY 1, 2, 3, 4, 5, l.signal, l.node_id
"""

# Every node reports its own interval, with one line per owner: each interval counts once, by its length.
MEANS = """
SELECT l.zone, (sum(l.intensity_s) / nullif(sum(l.length_s), 0))::float8 AS gco2_per_kwh
FROM (
    SELECT hour AS start_at, zone, intensity_s, length_s FROM energy_hours WHERE {whole_hours}
    UNION ALL
    SELECT start_at, zone, intensity_gco2_per_kwh::numeric * length_s, length_s FROM (
        SELECT node_id, boot_id, sequence, zone, intensity_gco2_per_kwh, start_at,
            max(extract(epoch FROM end_at - start_at)) AS length_s
        FROM energy_usages WHERE ({part_hours}) AND NOT starts_with(boot_id, '{returned}') GROUP BY 1, 2, 3, 4, 5, 6
    ) AS parts
) l
WHERE {period}
    AND NOT EXISTS (SELECT FROM energy_days l WHERE {period})
GROUP BY 1 ORDER BY 1
"""

_WHOLE = """
spent AS (
    SELECT l.job_id, b.model, sum(l.energy_j) AS energy_j, sum(l.carbon_gco2) AS carbon_gco2, sum(l.gpu_s) AS gpu_s
    FROM sums l LEFT JOIN boards b USING (node_id) WHERE l.job_id IS NOT NULL AND {period} GROUP BY 1, 2
), whole AS (
    SELECT s.job_id FROM spent s JOIN reported_jobs j ON j.id = s.job_id JOIN job_footprints f ON f.job_id = s.job_id
    WHERE j.state = 'succeeded' AND {owned}
    GROUP BY s.job_id, f.energy_j HAVING abs(sum(s.energy_j)::float8 - f.energy_j) <= 1e-3 * f.energy_j
)
"""
"""Jobs that succeeded and whose energy lies wholly in the period: only their work is known to belong to it."""

_LINES = {"period": PERIOD, "owned": OWNED}
_TEXTS = {"sums": SUMS, "boards": BOARDS, "whole": _WHOLE.format(**_LINES), **_LINES}

SPENT_BY_UNIT = """
WITH {sums}, {boards}, {whole}
SELECT CASE WHEN j.work_done > 0 THEN j.work_unit END AS unit, s.model, sum(s.carbon_gco2)::float8 AS carbon_gco2,
    sum(s.gpu_s)::float8 AS gpu_s
FROM whole w JOIN spent s USING (job_id) JOIN reported_jobs j ON j.id = w.job_id
GROUP BY 1, 2 ORDER BY 1, 2
"""

DONE_BY_UNIT = """
WITH {sums}, {boards}, {whole}
SELECT CASE WHEN j.work_done > 0 THEN j.work_unit END AS unit, count(*) AS jobs,
    coalesce(sum(j.work_done), 0) AS done
FROM whole w JOIN reported_jobs j ON j.id = w.job_id
GROUP BY 1 ORDER BY 1
"""


DEMAND = """
WITH {sums}, hours AS (
    SELECT l.zone, date_trunc('hour', l.start_at, 'UTC') AS hour, sum(l.facility_energy_j) / 3.6e6 AS kw
    FROM sums l WHERE {period} GROUP BY 1, 2
)
SELECT DISTINCT ON (zone, month) zone, to_char(hour AT TIME ZONE 'UTC', 'YYYY-MM') AS month, hour AS peak_at,
    kw::float8 AS peak_kw, (kw * demand_per_kw_month)::float8 AS money
FROM hours JOIN hourly_prices USING (zone, hour) WHERE demand_per_kw_month > 0
ORDER BY zone, month, kw DESC, hour
"""

CURRENCY = "SELECT currency FROM hourly_prices LIMIT 1"


class PartRow(NamedTuple):
    """Energy of one group on one node in one zone; the idle share has no group if jobs are grouped."""

    name: str | None
    then_name: str | None
    idle: bool
    zone: str
    model: str | None
    facility_energy_j: Decimal
    gpu_s: Decimal
    estimated_gco2: Decimal
    signal: str
    node_id: str
    energy_j: Decimal
    estimated_energy_j: Decimal
    carbon_gco2: Decimal
    guessed_gco2: Decimal
    priced_j: Decimal | None  #: Facility energy times its prices per kWh; None if none is known
    unpriced: bool  #: Whether any hour of it has no price


class SpentRow(NamedTuple):
    """What whole jobs emitted, by the unit of their work; None for work without a unit or without reports."""

    unit: str | None
    model: str | None
    carbon_gco2: float
    gpu_s: float


class DoneRow(NamedTuple):
    """How much work those jobs did."""

    unit: str | None
    jobs: int
    done: float


class AccountRows(NamedTuple):
    """All of these rows, and what energy costs."""

    parts: list[PartRow]
    means: dict[str, float | None]  #: Mean intensity of each zone, gCO2/kWh, weighted by time
    spent: list[SpentRow]
    done: list[DoneRow]
    currency: str | None  #: That of the prices; None: none are known
    demand: list[DemandCharge]


async def account_rows(connection: Connection, about: Subject) -> AccountRows:
    """Return what the accounts of a period are computed from, in all.

    There are no means if daily sums of old lines are part of the period: a sum does not tell when the energy was used.
    """
    means = MEANS.format(period=PERIOD, whole_hours=WHOLE_HOURS, part_hours=PART_HOURS, returned=RETURNED)
    return AccountRows(
        parts=await part_rows(connection, Dimensions(), about),
        means={row["zone"]: row["gco2_per_kwh"] for row in await connection.fetch(means, *about[:2])},
        spent=await fetch_rows(connection, SpentRow, SPENT_BY_UNIT.format(**_TEXTS), *about),
        done=await fetch_rows(connection, DoneRow, DONE_BY_UNIT.format(**_TEXTS), *about),
        currency=await connection.fetchval(CURRENCY),
        demand=await fetch_messages(connection, DemandCharge, DEMAND.format(**_TEXTS), *about[:2]),
    )


async def part_rows(
    connection: Connection, by: Dimensions, about: Subject, groups: Sequence[tuple[str, str]] | None = None
) -> list[PartRow]:
    """Return the energy of each group by node and zone; of some groups, by their names, without the idle share."""
    names = (None, None) if groups is None else [[each[place] for each in groups] for place in (0, 1)]
    return await fetch_rows(connection, PartRow, PARTS.format(**_TEXTS, **by.columns), *about, *names)


def parts_of_groups(rows: Sequence[PartRow]) -> dict[tuple[str | None, str | None], list[PartRow]]:
    """Return the parts of each group by its names, without the idle share."""
    found: dict[tuple[str | None, str | None], list[PartRow]] = defaultdict(list)
    for row in rows:
        if not row.idle:
            found[row.name, row.then_name].append(row)
    return found
