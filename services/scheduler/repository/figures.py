"""What the scheduler's ``/metrics`` shows, each from a partial index: counts of live rows; and tenants' shares."""

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import NamedTuple

from services.db.database import Connection
from services.db.rows import fetch_row, fetch_rows

# Jobs that have ended are counted as they do, not here: there may be millions.
COUNTS = """
SELECT 'jobs', ARRAY[state, coalesce(reason, '')], count(*)::float8 FROM jobs
 WHERE state NOT IN ('succeeded', 'failed', 'cancelled') GROUP BY 2
UNION ALL SELECT 'gangs', ARRAY[state], count(*) FROM allocations WHERE state <> 'ended' GROUP BY 2
UNION ALL SELECT 'gpus', ARRAY[state], sum(gpus) FROM allocations WHERE state <> 'ended' GROUP BY 2
UNION ALL SELECT 'nodes', ARRAY[state], count(*) FROM node_power GROUP BY 2
"""

STATE = """
SELECT s.policy, s.last_active_at,
       (SELECT count(*) FROM outbox) AS commands,
       (SELECT extract(epoch FROM now() - min(created_at))::float8 FROM outbox) AS oldest_command_s,
       (SELECT extract(epoch FROM now() - min(coalesce(queued_at, submitted_at)))::float8 FROM jobs
         WHERE state = 'queued') AS longest_wait_s
  FROM scheduler_state s WHERE s.id = 1
"""

NODES = "SELECT id FROM known_nodes WHERE state = 'up' ORDER BY id"


class SchedulerState(NamedTuple):
    """The policy in force, and what waits: commands for nodes, and the job that has waited longest."""

    policy: str
    last_active_at: datetime | None
    commands: int
    oldest_command_s: float | None
    longest_wait_s: float | None


async def counts(connection: Connection) -> Mapping[str, list[tuple[tuple[str, ...], float]]]:
    """Return ``jobs`` by state and reason, and ``gangs``, their ``gpus`` and ``nodes`` ever powered down by state."""
    found: dict[str, list[tuple[tuple[str, ...], float]]] = defaultdict(list)
    for what, labels, count in await connection.fetch(COUNTS):
        found[what].append((tuple(labels), count))
    return found


async def state(connection: Connection) -> SchedulerState | None:
    """Return the policy and what waits; None before the scheduler's first turn."""
    return await fetch_row(connection, SchedulerState, STATE)


async def nodes_up(connection: Connection) -> list[str]:
    """Return the nodes whose agents read commands."""
    return [record[0] for record in await connection.fetch(NODES)]


SHARES = """
WITH live AS (
    SELECT j.tenant_id, coalesce(sum(a.gpus), 0)::int AS gpus, count(*) FILTER (WHERE j.state = 'queued')::int AS waits
      FROM jobs j LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
     WHERE j.state IN ('queued', 'starting', 'running', 'preempting')
     GROUP BY j.tenant_id)
SELECT tenant_id, coalesce(t.share_weight, 1) AS weight, coalesce(l.gpus, 0) AS gpus,
       coalesce(l.waits, 0) AS waiting_jobs, coalesce(t.guaranteed_gpus, 0) AS guaranteed_gpus, t.max_gpus
  FROM live l FULL JOIN tenant_limits t USING (tenant_id)
 WHERE l.tenant_id IS NOT NULL OR t.guaranteed_gpus > 0 ORDER BY tenant_id
"""


class ShareRow(NamedTuple):
    """A tenant that has jobs, including service instances and jobs on slices, or guaranteed GPUs."""

    tenant_id: str
    weight: float
    gpus: int
    waiting_jobs: int
    guaranteed_gpus: int
    max_gpus: int | None


async def shares(connection: Connection) -> list[ShareRow]:
    """Return these tenants, ordered by id."""
    return await fetch_rows(connection, ShareRow, SHARES)
