"""Jobs that may have to wait: for other jobs, as tasks of a limited array do, or for something in their engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.core.cycle.gates import GatedJob, Need, Withheld
from services.core.domain.dependencies import Condition, Ends
from services.core.domain.reasons import Reason
from services.db.database import Connection
from services.db.rows import fetch_rows

GATED = """
SELECT j.id, j.array_id, coalesce(j.array_index, 0) AS array_index, j.state <> 'queued' AS holds_gpus,
       j.generation > 0 AS has_run, j.reason, j.detail, a.max_running,
       coalesce(e.report ->> 'blocked', '') AS blocked,
       CASE WHEN j.not_before > now() THEN to_char(j.not_before AT TIME ZONE 'UTC', 'HH24:MI:SS "UTC"') ELSE '' END
         AS paused
  FROM jobs j LEFT JOIN job_arrays a ON a.id = j.array_id LEFT JOIN engine_jobs e ON e.job_id = j.id
 WHERE j.gated AND j.state IN ('queued', 'starting', 'running', 'preempting') ORDER BY j.id
"""

NEEDS = """
WITH waiting AS (
    SELECT id FROM jobs WHERE gated AND state IN ('queued', 'held')
    UNION
    SELECT array_id FROM jobs WHERE gated AND state IN ('queued', 'held') AND array_id IS NOT NULL
), needs AS MATERIALIZED (
    SELECT d.dependent_id, d.needs_id, d.condition FROM waiting w JOIN job_dependencies d ON d.dependent_id = w.id
), needed AS MATERIALIZED (
    SELECT DISTINCT needs_id AS id FROM needs
), ends AS (
    SELECT j.id, j.name, (j.state NOT IN ('succeeded', 'failed', 'cancelled'))::int AS live,
           (j.state IN ('failed', 'cancelled'))::int AS not_ok
      FROM needed n JOIN jobs j ON j.id = n.id
    UNION ALL
    SELECT a.id, a.name, t.live, t.not_ok
      FROM needed n JOIN job_arrays a ON a.id = n.id
     CROSS JOIN LATERAL (
        SELECT (count(*) FILTER (WHERE state NOT IN ('succeeded', 'failed', 'cancelled')))::int AS live,
               (count(*) FILTER (WHERE state IN ('failed', 'cancelled')))::int AS not_ok
          FROM jobs WHERE array_id = a.id) t
)
SELECT d.dependent_id, d.needs_id, d.condition, e.name, e.live, e.not_ok
  FROM needs d JOIN ends e ON e.id = d.needs_id ORDER BY 1, 2, 3
"""

CANCEL = """
WITH ending AS (
    SELECT j.id, e.detail FROM unnest($1::text[], $2::text[]) AS e(id, detail) JOIN jobs j ON j.id = e.id
    UNION ALL
    SELECT j.id, e.detail FROM unnest($1::text[], $2::text[]) AS e(id, detail) JOIN jobs j ON j.array_id = e.id
), cancelled AS (
    UPDATE jobs SET state = 'cancelled', reason = $3, detail = e.detail, ended_at = now(), expected_start_at = NULL
      FROM ending e WHERE jobs.id = e.id AND jobs.gated AND jobs.state IN ('queued', 'held')
    RETURNING jobs.id, jobs.tenant_id, jobs.detail
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.cancelled', jsonb_build_object('state', 'cancelled', 'reason', $3::text, 'detail', detail)
  FROM cancelled RETURNING job_id
"""


class GatedRow(NamedTuple):
    """A job that is queued or holds GPUs, with its present reason and the limit of its array."""

    id: str
    array_id: str | None
    array_index: int
    holds_gpus: bool
    has_run: bool
    reason: str | None
    detail: str | None
    max_running: int | None
    blocked: str
    paused: str


@dataclass(frozen=True)
class Gates:
    """What decides which queued jobs must not start yet."""

    rows: list[GatedRow]
    needs: list[Need]

    @property
    def jobs(self) -> list[GatedJob]:
        """The jobs."""
        return [
            GatedJob(*row[:5], row.blocked, row.paused, set_aside=row.reason == Reason.SET_ASIDE) for row in self.rows
        ]

    @property
    def limits(self) -> dict[str, int]:
        """The most tasks of an array that may hold GPUs at once."""
        return {row.array_id: row.max_running for row in self.rows if row.array_id and row.max_running is not None}

    def unexplained(self, withheld: Sequence[Withheld]) -> list[Withheld]:
        """Return the jobs whose stored reason is a different one."""
        said = {row.id: (row.reason, row.detail) for row in self.rows}
        return [each for each in withheld if said[each.id] != (each.reason.value, each.detail)]


async def gates(connection: Connection) -> Gates:
    """Return the jobs that may have to wait, and their dependencies."""
    rows = await fetch_rows(connection, GatedRow, GATED)
    return Gates(rows, await needs(connection) if rows else [])


async def needs(connection: Connection) -> list[Need]:
    """Return the dependencies of all jobs that wait or are on hold, and of the arrays that those jobs are tasks of."""
    return [
        Need(dependent, needed, Condition(condition), name, Ends(live, not_ok))
        for dependent, needed, condition, name, live, not_ok in await connection.fetch(NEEDS)
    ]


async def cancel(connection: Connection, ended: Sequence[tuple[str, str]], reason: str) -> int:
    """Cancel jobs, or all tasks of arrays, that have not started, each with its detail; return how many there were."""
    return len(await connection.fetch(CANCEL, [each for each, _ in ended], [said for _, said in ended], reason))
