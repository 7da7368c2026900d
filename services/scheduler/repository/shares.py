"""What tenants hold, are due and wait for."""

from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_rows

SHARES = """
SELECT j.tenant_id, coalesce(min(t.share_weight), 1) AS weight,
       coalesce(sum(a.gpus), 0)::int AS gpus, count(*) FILTER (WHERE j.state = 'queued')::int AS waiting_jobs
  FROM jobs j
  LEFT JOIN tenant_limits t ON t.tenant_id = j.tenant_id
  LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
 WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
 GROUP BY j.tenant_id ORDER BY j.tenant_id
"""


class ShareRow(NamedTuple):
    """A tenant that has jobs, including service instances and jobs on slices."""

    tenant_id: str
    weight: float
    gpus: int
    waiting_jobs: int


async def shares(connection: Connection) -> list[ShareRow]:
    """Return the tenants that have jobs, ordered by id."""
    return await fetch_rows(connection, ShareRow, SHARES)
