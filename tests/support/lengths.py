"""Past jobs that recur, written as admission and the scheduler would have."""

from __future__ import annotations

from typing import Any

JOBS = """
INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, generation, submitted_at, queued_at, ended_at)
SELECT 'job_' || lpad(n::text, 26, '0'), 'acme', 'a', 'p', '{}',
       jsonb_build_object('name', 'a', 'project', 'p', 'command', jsonb_build_array('train', n % $2)), $3, 1,
       now() - interval '1 day', now() - interval '1 day', now() - make_interval(secs => ($4 - n) * 1e-6)
  FROM generate_series($5 + 1, $5 + $1) AS n
"""

ALLOCATIONS = """
INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at, running_at, ended_at,
                         end_reason)
SELECT j.id || '.1', j.id, 1, 'ended', 2, '[]', 0, j.ended_at - make_interval(secs => 10 + $1 + k.seconds),
       j.ended_at - make_interval(secs => $1 + k.seconds), j.ended_at, 'finished'
  FROM jobs j, LATERAL (SELECT (j.spec #>> '{command,1}')::int AS seconds) k
 WHERE j.id > 'job_' || lpad($2::text, 26, '0')
"""


async def past_jobs(
    connection: Any, jobs: int, groups: int, *, state: str = "succeeded", after: int = 0, base_s: float = 100.0
) -> None:
    """Write jobs that ended a microsecond after each other, the last one just now.

    Job n is of group n modulo ``groups``, whose jobs each held two GPUs for ``base_s`` seconds and as many more as the
    group's number, after ten seconds of starting.
    """
    await connection.execute(JOBS, jobs, groups, state, float(after + jobs + 1), after)
    await connection.execute(ALLOCATIONS, base_s, str(after))
