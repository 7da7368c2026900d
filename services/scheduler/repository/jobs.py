"""Jobs: from state to state, with an event each time; one guarded update and one event, always together."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from services.core.domain.jobs import JobState, check_transition
from services.core.domain.reasons import Reason
from services.db.database import Connection
from services.db.job_rows import SPEC_TO_RUN
from services.db.job_specs import CHECKPOINT_DIR
from services.scheduler.repository.documents import Json

KEEPS_CHECKPOINTS = f"(j.engine = 'wattshift' AND {CHECKPOINT_DIR} IS NULL AND j.spec -> 'service' IS NULL)"
"""Whether the checkpoints of a job ``j`` are where its nodes keep them: it names no folder of its own."""

MOVE = """
WITH moved AS (
    UPDATE jobs SET state = $3, reason = $4, detail = $5, expected_start_at = NULL,
           exit_code = coalesce($6, exit_code),
           queued_at = CASE WHEN $3 = 'queued' THEN now() ELSE queued_at END,
           ended_at = CASE WHEN $3 IN ('succeeded', 'failed', 'cancelled') THEN now() ELSE ended_at END,
           restarts = restarts + $7, preemptions = preemptions + $8,
           attained_gpu_s = attained_gpu_s + $9, node_losses = coalesce($11, node_losses),
           hold_requested = hold_requested AND $3 <> 'held',
           not_before = now() + make_interval(secs => $12), gated = gated OR $12 > 0
     WHERE id = $1 AND state = ANY($2::text[])
    RETURNING id, tenant_id
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.' || $3, $10 FROM moved
RETURNING job_id
"""

HOLD = """
UPDATE jobs SET reason = h.reason, detail = h.detail, expected_start_at = h.expected_start_at
  FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[]) AS h(id, reason, detail, expected_start_at)
 WHERE jobs.id = h.id AND jobs.state = 'queued' AND jobs.cell IS NULL
   AND (jobs.reason, jobs.detail, jobs.expected_start_at) IS DISTINCT FROM (h.reason, h.detail, h.expected_start_at)
"""

WAITING = """
SELECT array_agg(id) AS ids FROM jobs WHERE state = 'queued' AND cell IS NULL
 GROUP BY coalesce(array_id, id) ORDER BY min(submitted_at), coalesce(array_id, id)
"""

SET_ASIDE = """
UPDATE jobs SET reason = $2, detail = NULL, expected_start_at = NULL, gated = true,
       not_before = now() + make_interval(secs => $3)
 WHERE id = ANY($1::text[]) AND state = 'queued' AND cell IS NULL
"""

EVENT = "INSERT INTO job_events (job_id, tenant_id, type, data) SELECT id, tenant_id, $2, $3 FROM jobs WHERE id = $1"

START = """
WITH started AS (
    UPDATE jobs SET state = 'starting', reason = s.reason, detail = s.detail, expected_start_at = NULL,
           generation = generation + 1, started_at = coalesce(started_at, now())
      FROM unnest($1::text[], $2::text[], $3::text[], $4::jsonb[]) AS s(id, reason, detail, event)
     WHERE jobs.id = s.id AND jobs.state = 'queued'
    RETURNING jobs.id, jobs.tenant_id, s.event
)
INSERT INTO job_events (job_id, tenant_id, type, data) SELECT id, tenant_id, 'job.starting', event FROM started
"""

# A gang that ended by itself counts as stopped, so that its job may be put on hold.
MARK_PREEMPTING = "UPDATE jobs SET state = 'preempting' WHERE id = $1 AND state IN ('starting', 'running')"


class Waiting(NamedTuple):
    """Why a job keeps waiting: a stable code and a sentence, and when its policy will let it start, if known."""

    job_id: str
    reason: str
    detail: str
    expected_start_at: datetime | None


class Starting(NamedTuple):
    """A job that is given a gang: why now, as a stable code and a sentence, and its event."""

    job_id: str
    reason: str
    detail: str
    event: Json


async def start(connection: Connection, starting: Sequence[Starting]) -> None:
    """Move waiting jobs to ``starting``, all in one statement, and count a gang for each."""
    if starting:
        await connection.execute(START, *(list(column) for column in zip(*starting, strict=True)))


async def move(
    connection: Connection,
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
    node_losses: int | None = None,
    pause_s: float = 0.0,
    data: Json | None = None,
) -> bool:
    """Move a job to ``target`` if it is now in one of ``sources``; return whether it was.

    Raises:
        TransitionError: a job can never go from one of ``sources`` to ``target``.
    """
    names = list(sources)
    for source in names:
        check_transition(source, target)
    event: Json = {"reason": reason} | (data or {}) | ({} if exit_code is None else {"exit_code": exit_code})
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
        node_losses,
        pause_s,
    )
    return moved is not None


async def hold(connection: Connection, waiting: Sequence[Waiting]) -> None:
    """Store why jobs that still wait do so."""
    if waiting:
        await connection.execute(HOLD, *(list(column) for column in zip(*waiting, strict=True)))


async def waiting(connection: Connection) -> list[list[str]]:
    """Return the jobs that wait, oldest first; the tasks of an array are one entry."""
    return [row["ids"] for row in await connection.fetch(WAITING)]


async def set_aside(connection: Connection, ids: Sequence[str], lasts_s: float) -> None:
    """Leave waiting jobs out of rounds for a time."""
    await connection.execute(SET_ASIDE, ids, Reason.SET_ASIDE.value, lasts_s)


async def note(connection: Connection, job_id: str, event: str, data: Json) -> None:
    await connection.execute(EVENT, job_id, event, data)


async def lock(connection: Connection, job_id: str) -> None:
    """Wait for concurrent changes to a job, and lock it until this transaction ends."""
    await connection.fetchval("SELECT id FROM jobs WHERE id = $1 FOR UPDATE", job_id)


async def spec(connection: Connection, job_id: str) -> Json:
    """Return what a job's user asked for, in the form that nodes get."""
    return await connection.fetchval(f"SELECT {SPEC_TO_RUN} FROM jobs j WHERE j.id = $1", job_id)
