"""Sums over the ledger, and a job's energy by intensity."""

from datetime import datetime
from typing import NamedTuple

from services.contracts.jobs import JobFootprint
from services.contracts.queries import GroupBy
from services.contracts.reports import LedgerHour
from services.core.accounting.uncertainty import Cell
from services.db.database import Connection, Database, Record
from services.db.rows import fetch_messages, fetch_rows
from services.telemetry.repository.lines import LEDGER, METERED, SUMS

_NAMES = ("energy_j", "gpu_energy_j", "estimated_energy_j", "carbon_gco2", "gpu_s")
AMOUNTS = ", ".join(f"coalesce(sum(l.{name}), 0)::float8 AS {name}" for name in _NAMES)

BOARDS = """
boards AS (
    SELECT n.id AS node_id,
        CASE WHEN count(DISTINCT d ->> 'model') = 1 AND count(d ->> 'parent') = 0 THEN min(d ->> 'model') END AS model,
        string_agg(DISTINCT d ->> 'model', ' and ' ORDER BY d ->> 'model') AS models
    FROM nodes n CROSS JOIN jsonb_array_elements(n.devices) d GROUP BY n.id
)
"""
"""A node with boards of several models has no one model; nor has one with slices, each of which counts as a GPU, or one
that is not registered any more."""

PERIOD = "($1::timestamptz IS NULL OR l.start_at >= $1) AND ($2::timestamptz IS NULL OR l.start_at < $2)"

OWNED = "($3::text IS NULL OR j.tenant_id = $3) AND ($4::text IS NULL OR j.project = $4)"

_DAY = "date_trunc('day', l.start_at, 'UTC') AT TIME ZONE 'UTC'"

GROUPS: dict[GroupBy, str] = {
    "job": "coalesce(j.array_id, l.job_id)",
    "user": "coalesce(j.user_name, '(unknown)')",
    "project": "j.project",
    "tenant": "j.tenant_id",
    "model": "coalesce(b.models, '(unknown)')",
    "zone": "l.zone",
    "node": "l.node_id",
    "day": f"to_char({_DAY}, 'YYYY-MM-DD')",
    "week": f"""to_char({_DAY}, 'IYYY-"W"IW')""",
    "month": f"to_char({_DAY}, 'YYYY-MM')",
}
"""What a line is grouped by. Days, ISO weeks and months are those of UTC; the user of a job without one is its label
`user`."""

HOURS = f"""
WITH hours AS (SELECT hour AS start_at, node_id, nullif(job_id, '') AS job_id, energy_j, carbon_gco2, length_s,
        facility_energy_j * per_kwh / 3.6e6 AS money
    FROM energy_hours LEFT JOIN hourly_prices USING (zone, hour) WHERE hour >= $1 AND hour < $2)
SELECT l.start_at, c.covered_s, sum(l.energy_j)::float8 AS energy_j, sum(l.carbon_gco2)::float8 AS carbon_gco2,
    coalesce(sum(l.energy_j) FILTER (WHERE l.job_id IS NULL), 0)::float8 AS idle_energy_j,
    coalesce(sum(l.carbon_gco2) FILTER (WHERE l.job_id IS NULL), 0)::float8 AS idle_carbon_gco2,
    CASE WHEN bool_and(l.money IS NOT NULL) AND c.covered_s > 0 THEN sum(l.money)::float8 END AS money
FROM hours l LEFT JOIN reported_jobs j ON j.id = l.job_id
JOIN (
    SELECT start_at, max(length_s)::float8 AS covered_s
    FROM (SELECT start_at, sum(length_s) AS length_s FROM hours GROUP BY start_at, node_id) n GROUP BY 1
) c USING (start_at)
WHERE {OWNED} GROUP BY 1, 2 ORDER BY 1
"""

# Offset 0 keeps the planner from walking through all jobs in the order of their group for the sake of the limit.
LINES = """
WITH {sums}, {boards}
SELECT * FROM (
    SELECT {group} AS name, {then} AS then_name,
        CASE WHEN count(DISTINCT coalesce(j.array_id, l.job_id)) = 1
            THEN coalesce(min(j.array_name), min(j.name)) END AS label,
        count(DISTINCT l.job_id) AS jobs, {amounts}
    FROM sums l JOIN reported_jobs j ON j.id = l.job_id LEFT JOIN boards b USING (node_id)
    WHERE {period} AND {owned} AND ($5::text IS NULL OR ({group}, {then}) > ($5, $6))
    GROUP BY 1, 2 OFFSET 0
) AS found ORDER BY name, then_name LIMIT $7
"""

# The last row is that of all lines: two rounded sums do not add up to the rounded sum.
TOTALS = """
WITH {sums}
SELECT idle, {amounts} FROM (
    SELECT l.*, l.job_id IS NULL AS idle FROM sums l LEFT JOIN reported_jobs j ON j.id = l.job_id
    WHERE {period} AND {owned}
) AS l
GROUP BY GROUPING SETS ((idle), ())
"""

METERED_SUM = """
WITH {metered} SELECT coalesce(sum(l.metered_gpu_energy_j), 0) FROM (
    SELECT start_at, metered_gpu_energy_j FROM metered UNION ALL SELECT hour, gpu_energy_j FROM cell_lines
) l WHERE {period}
"""
"""What jobs used in cells is taken from the cells' ledgers."""

PARTS = {"sums": SUMS, "boards": BOARDS, "amounts": AMOUNTS, "period": PERIOD, "owned": OWNED, "metered": METERED}
"""What the queries above are made of."""

# Consecutive lines under one intensity are one use; a job's lines are numbered by where the intensity changes. A line
# that was given back to idle is none of them: it and its opposite leave nothing.
USES = """
WITH {ledger}, kept AS (
    SELECT node_id, start_at, end_at, intensity_gco2_per_kwh, estimated, sum(energy_j) AS energy_j,
        sum(carbon_gco2) AS carbon_gco2
    FROM ledger WHERE job_id = $1 GROUP BY 1, 2, 3, 4, 5, owner HAVING count(*) = 1 OR sum(energy_j) <> 0
), marked AS (
    SELECT l.*, (lag(intensity_gco2_per_kwh) OVER w, lag(estimated) OVER w)
        IS DISTINCT FROM (intensity_gco2_per_kwh, estimated) AS changes
    FROM kept l WINDOW w AS (ORDER BY start_at, node_id, end_at)
), numbered AS (
    SELECT *, count(*) FILTER (WHERE changes) OVER (ORDER BY start_at, node_id, end_at) AS number FROM marked
)
SELECT number, min(start_at) AS start_at, max(end_at) AS end_at, sum(energy_j) AS energy_j,
    min(intensity_gco2_per_kwh) AS intensity_gco2_per_kwh, sum(carbon_gco2) AS carbon_gco2,
    bool_or(estimated) AS estimated
FROM numbered WHERE number > $2 GROUP BY number ORDER BY number LIMIT $3
"""

PERIOD_END = "SELECT greatest(least($2::timestamptz, now()), $1::timestamptz)"
"""Least and greatest leave out what is not given."""

LAST_TERMS = "WITH {ledger} SELECT zone, signal, pue FROM ledger WHERE job_id = $1 ORDER BY start_at DESC LIMIT 1"

FOOTPRINT = """
SELECT energy_j, gpu_energy_j, estimated_energy_j, carbon_gco2, gpu_s FROM job_footprints WHERE job_id = $1
"""

CELLS = """
WITH {ledger} SELECT node_id, zone, sum(energy_j) AS energy_j, sum(estimated_energy_j) AS modelled_j,
    sum(carbon_gco2) AS carbon_gco2, sum(guessed_gco2) AS guessed_gco2
FROM ledger WHERE job_id = $1 GROUP BY 1, 2 ORDER BY 1, 2
"""
"""What a job used by node and zone."""


class Subject(NamedTuple):
    """Which lines are summed, as ``PERIOD`` and ``OWNED`` take it.

    Attributes:
        start_at, end_at: The period; None if it is open at that end.
        tenant_id, project: Whose jobs; None for those of all tenants or projects.
    """

    start_at: datetime | None
    end_at: datetime | None
    tenant_id: str | None
    project: str | None


class GroupRow(NamedTuple):
    """What the jobs of one group used; ``jobs`` is their number, ``label`` the name of the only job or array.

    ``then_name`` is the group of the second dimension, empty without one.
    """

    name: str
    then_name: str
    label: str | None
    jobs: int
    energy_j: float
    gpu_energy_j: float
    estimated_energy_j: float
    carbon_gco2: float
    gpu_s: float


class Dimensions(NamedTuple):
    """What lines are summed by: one dimension, or two at once; all together without any."""

    group_by: GroupBy | None = None
    then_by: GroupBy | None = None

    @property
    def columns(self) -> dict[str, str]:
        """The expressions of ``group`` and ``then``."""
        group, then = (GROUPS[each] if each else "''" for each in self)
        return {"group": group, "then": then}


async def period_end(connection: Connection, start_at: datetime | None, end_at: datetime | None) -> datetime:
    """Return the end of a period for a report as of now: no later than now, nor earlier than its start."""
    return await connection.fetchval(PERIOD_END, start_at, end_at)


async def totals(connection: Connection, about: Subject) -> tuple[dict[bool | None, JobFootprint], float]:
    """Return what was used in a period, idle, by jobs, and in all (None), and the energy by all devices' counters."""
    rows = await connection.fetch(TOTALS.format(**PARTS), *about)
    sums = {row["idle"]: JobFootprint.as_stored(dict(row)) for row in rows}
    return sums, await connection.fetchval(METERED_SUM.format(**PARTS), *about[:2])


async def hour_rows(database: Database, about: Subject) -> list[LedgerHour]:
    """Return what was used in each hour of a period, which must have both ends."""
    return await database.run(fetch_messages, LedgerHour, HOURS, *about)


async def group_rows(
    connection: Connection,
    by: Dimensions,
    about: Subject,
    *,
    after: tuple[str, str] | None = None,
    limit: int | None = None,
) -> list[GroupRow]:
    """Return the sums of each group, by name."""
    query = LINES.format(**PARTS, **by.columns)
    return await fetch_rows(connection, GroupRow, query, *about, *(after or (None, None)), limit)


async def uses_of(
    database: Database, job_id: str, *, after: int, limit: int
) -> tuple[JobFootprint, list[Cell], Record | None, list[Record]]:
    """Return a job's footprint, its part on each node, the terms of its newest line, and a page of its uses.

    The page has at most ``limit`` uses, after the number ``after``: what it used without a break under one intensity.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        footprint = await fetch_messages(connection, JobFootprint, FOOTPRINT, job_id)
        cells = await fetch_rows(connection, Cell, CELLS.format(ledger=LEDGER), job_id)
        terms = await connection.fetchrow(LAST_TERMS.format(ledger=LEDGER), job_id)
        uses = await connection.fetch(USES.format(ledger=LEDGER), job_id, after, limit)
    return footprint[0] if footprint else JobFootprint(), cells, terms, uses
