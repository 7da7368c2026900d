"""Move jobs from state to state: one guarded update, one event, always together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.core.cycle.lifecycle import check_transition
from services.core.domain.jobs import JobState

MOVE = """
WITH moved AS (
    UPDATE jobs SET state = $3, reason = $4, detail = $5, expected_start_at = NULL,
           exit_code = coalesce($6, exit_code),
           queued_at = CASE WHEN $3 = 'queued' THEN now() ELSE queued_at END,
           ended_at = CASE WHEN $3 IN ('succeeded', 'failed', 'cancelled') THEN now() ELSE ended_at END,
           restarts = restarts + $7, preemptions = preemptions + $8,
           attained_gpu_s = attained_gpu_s + $9,
           hold_requested = hold_requested AND $3 <> 'held'
     WHERE id = $1 AND state = ANY($2::text[])
    RETURNING id, tenant_id
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.' || $3, $10 FROM moved
RETURNING job_id
"""


async def move(
    connection: Any,
    job_id: str,
    sources: Iterable[JobState],
    target: JobState,
    *,
    reason: str,
    detail: str,
    exit_code: int | None = None,
    restarts: int = 0,
    preemptions: int = 0,
    attained_gpu_s: float = 0.0,
    data: dict[str, Any] | None = None,
) -> bool:
    """Move a job to ``target`` if it is in one of ``sources`` now; return whether it was.

    Raises:
        TransitionError: a job can never go from one of ``sources`` to ``target``.
    """
    names = list(sources)
    for source in names:
        check_transition(source, target)
    event = {"reason": reason} | (data or {}) | ({} if exit_code is None else {"exit_code": exit_code})
    moved = await connection.fetchval(
        MOVE,
        job_id,
        [name.value for name in names],
        target.value,
        reason,
        detail,
        exit_code,
        restarts,
        preemptions,
        attained_gpu_s,
        event,
    )
    return moved is not None
