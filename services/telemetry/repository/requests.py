"""Requests as routers report them, and what was measured of their servers, divided among them."""

from datetime import datetime

from services.contracts.queries import RequestGroup
from services.contracts.reports import RequestLine
from services.contracts.routing import RequestUsage, UsageReport
from services.db.database import Connection, Database
from services.db.rows import fetch_messages

FORGET = "DELETE FROM request_usages WHERE router = $1 AND start_at = $2"

_COLUMNS = ", ".join(("router", "start_at", *RequestUsage.model_fields))
ADD = f"""
INSERT INTO request_usages ({_COLUMNS})
SELECT $1, $2, * FROM unnest($3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bigint[], $9::bigint[],
    $10::bigint[], $11::bigint[], $12::float8[], $13::float8[], $14::float8[])
ON CONFLICT (router, start_at, job_id, tenant_id, key_id, model, request_class) DO NOTHING
"""

FOLD = f"""
WITH gone AS (
    DELETE FROM request_usages
     WHERE start_at < date_trunc('day', now() - make_interval(secs => $1), 'UTC') AND router <> '' RETURNING *
)
INSERT INTO request_usages AS known ({_COLUMNS})
SELECT '', date_trunc('day', start_at, 'UTC'), job_id, tenant_id, key_id, model, request_class, sum(requests),
    sum(input_tokens), sum(output_tokens), sum(estimated_requests), sum(share_s), sum(energy_j), sum(carbon_gco2)
FROM gone GROUP BY 2, 3, 4, 5, 6, 7
ON CONFLICT (router, start_at, job_id, tenant_id, key_id, model, request_class) DO UPDATE SET
    requests = known.requests + excluded.requests, input_tokens = known.input_tokens + excluded.input_tokens,
    output_tokens = known.output_tokens + excluded.output_tokens,
    estimated_requests = known.estimated_requests + excluded.estimated_requests,
    share_s = known.share_s + excluded.share_s,
    energy_j = known.energy_j + excluded.energy_j, carbon_gco2 = known.carbon_gco2 + excluded.carbon_gco2
"""

GROUPS: dict[RequestGroup, str] = {
    "key": "key_id",
    "model": "model",
    "class": "request_class",
    "tenant": "tenant_id",
    "day": "to_char(date_trunc('day', start_at, 'UTC') AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
}

# A server's energy in an hour is divided among the requests that ended in it, by their shares of the server's time.
# Where shares add up to less than the time that the ledger has lines for, the rest is nobody's: the server was idle.
# Days of which only sums are kept are divided as a whole.
DIVIDED = """
WITH servers AS (
    SELECT job_id FROM pool_instances WHERE job_id IS NOT NULL UNION SELECT job_id FROM request_usages
), spent AS (
    SELECT job_id, date_bin('1 hour', start_at, 'epoch') AS from_at, interval '1 hour' AS length,
        sum(gpu_energy_j + cpu_energy_j + static_energy_j) AS energy_j, sum(carbon_gco2) AS carbon_gco2,
        sum(greatest(0, extract(epoch FROM end_at - start_at)))::float8 AS seconds
    FROM energy_usages l
    WHERE job_id IN (SELECT job_id FROM servers)
        AND ($1::timestamptz IS NULL OR start_at >= $1) AND ($2::timestamptz IS NULL OR start_at < $2)
    GROUP BY 1, 2
    UNION ALL
    SELECT job_id, day, interval '1 day', sum(energy_j), sum(carbon_gco2),
        sum(greatest(0, extract(epoch FROM end_at - start_at)))::float8
    FROM energy_days
    WHERE job_id IN (SELECT job_id FROM servers)
        AND ($1::timestamptz IS NULL OR day >= $1) AND ($2::timestamptz IS NULL OR day < $2)
    GROUP BY 1, 2
), used AS (
    SELECT u.*, s.from_at, s.energy_j AS spent_j, s.carbon_gco2 AS spent_gco2,
        greatest(s.seconds, sum(u.share_s) OVER (PARTITION BY s.job_id, s.from_at, s.length)) AS whole_s
    FROM request_usages u LEFT JOIN spent s
        ON s.job_id = u.job_id AND u.start_at >= s.from_at AND u.start_at < s.from_at + s.length
    WHERE ($1::timestamptz IS NULL OR u.start_at >= $1) AND ($2::timestamptz IS NULL OR u.start_at < $2)
)
"""

LINES = (
    DIVIDED
    + """
SELECT {group} AS "group", sum(requests)::bigint AS requests, sum(input_tokens)::bigint AS input_tokens,
    sum(output_tokens)::bigint AS output_tokens, sum(estimated_requests)::bigint AS estimated_requests,
    coalesce(sum(spent_j * share_s / nullif(whole_s, 0)), 0)::float8 AS energy_j,
    coalesce(sum(spent_gco2 * share_s / nullif(whole_s, 0)), 0)::float8 AS carbon_gco2,
    coalesce(sum(energy_j) FILTER (WHERE spent_j IS NULL), 0)::float8 AS outside_energy_j,
    coalesce(sum(carbon_gco2) FILTER (WHERE spent_j IS NULL), 0)::float8 AS outside_carbon_gco2
FROM used WHERE $3::text IS NULL OR tenant_id = $3
GROUP BY 1 ORDER BY 1 LIMIT 10000
"""
)

SERVERS = (
    DIVIDED
    + """
SELECT coalesce(sum(energy_j), 0)::float8 AS energy_j, coalesce(sum(carbon_gco2), 0)::float8 AS carbon_gco2 FROM spent
"""
)


async def replace_usages(database: Database, report: UsageReport) -> None:
    """Write what a router saw in a window, replacing what it reported of it before."""
    columns = [[getattr(usage, name) for usage in report.usages] for name in RequestUsage.model_fields]
    async with database.transaction() as connection:
        await connection.execute(FORGET, report.router, report.start_at)
        await connection.execute(ADD, report.router, report.start_at, *columns)


async def request_rows(
    connection: Connection, group_by: RequestGroup, start_at: datetime | None, end_at: datetime, tenant_id: str | None
) -> list[RequestLine]:
    """Return what the requests of each group used in a period, by name."""
    query = LINES.format(group=GROUPS[group_by])
    return await fetch_messages(connection, RequestLine, query, start_at, end_at, tenant_id)


async def of_servers(connection: Connection, start_at: datetime | None, end_at: datetime | None) -> tuple[float, float]:
    """Return the energy, joules, and the emissions, gCO2, that the ledger has for all servers of pools in a period."""
    (found,) = await connection.fetch(SERVERS, start_at, end_at)
    return found["energy_j"], found["carbon_gco2"]


async def fold_requests(database: Database, keep_s: float) -> None:
    """Combine old windows into one a day, as the ledger's lines are."""
    await database.execute(FOLD, keep_s)
