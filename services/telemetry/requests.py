"""Requests in the ledger: whose a model server's energy was.

Nothing is added to the ledger for a request: its server's job has lines already. What routers report is the
share of the server's time that requests had; it divides these lines when a report is made. So all requests and the
unattributed rest add up to what the ledger has for the servers, whatever arrives late or twice.
"""

from services.contracts.queries import RequestQuery
from services.contracts.reports import RequestLine, RequestReport, ServersFootprint
from services.db.database import Database
from services.telemetry.repository.reports import period_end
from services.telemetry.repository.requests import request_rows, servers_row


async def request_report(database: Database, query: RequestQuery, tenant_id: str | None) -> RequestReport:
    """Return requests of a period by group; the servers' whole energy and the unattributed rest for operators only.

    Args:
        tenant_id: Whose requests; None for all, for operators.
    """
    async with database.transaction("repeatable_read", readonly=True) as connection:
        end_at = await period_end(connection, query.start, query.end)
        rows = await request_rows(connection, query.group_by, start_at=query.start, end_at=end_at, tenant_id=tenant_id)
        servers = await servers_row(connection, query.start, end_at) if tenant_id is None else None
    divided_j, divided_gco2 = sum(row.energy_j for row in rows), sum(row.carbon_gco2 for row in rows)
    return RequestReport(
        start_at=query.start,
        end_at=end_at,
        group_by=query.group_by,
        lines=[
            RequestLine(
                group=row.name,
                requests=row.requests,
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                estimated_requests=row.estimated_requests,
                energy_j=row.energy_j,
                carbon_gco2=row.carbon_gco2,
                outside_energy_j=row.outside_energy_j,
                outside_carbon_gco2=row.outside_carbon_gco2,
            )
            for row in rows
        ],
        servers=None
        if servers is None
        else ServersFootprint(
            energy_j=servers.energy_j,
            carbon_gco2=servers.carbon_gco2,
            unattributed_energy_j=max(0.0, servers.energy_j - divided_j),
            unattributed_carbon_gco2=servers.carbon_gco2 - divided_gco2,
        ),
    )
