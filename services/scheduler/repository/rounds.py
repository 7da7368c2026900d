"""The policy in force, what it remembers, and the rounds that have been held; and what a restored copy needs."""

from datetime import datetime
from typing import NamedTuple

from services.contracts.engines import QUEUEING
from services.contracts.policies import PlanSummary
from services.db import nodes
from services.db.database import Connection
from services.db.job_specs import MAY_MOVE
from services.db.rows import fetch_messages, fetch_row
from services.kit.readable import Unread, messages_of
from services.scheduler.repository import gangs
from services.scheduler.repository.documents import Json

FIRST_STATE = """
INSERT INTO scheduler_state (id, policy, parameters, policy_changed_by, memory, version)
VALUES (1, $1, '{}', 'installation', '{}', 0) ON CONFLICT DO NOTHING
"""

STATE = """
SELECT version, policy, parameters, CASE WHEN version IS DISTINCT FROM $1 THEN memory END AS memory,
       extract(epoch FROM last_active_at)::float8 AS last_active_s,
       extract(epoch FROM now())::float8 AS now_s, topology
  FROM scheduler_state WHERE id = 1
"""

DUE = """
WITH new AS (
    SELECT max(j.queued_at) AS at FROM engine_jobs e JOIN jobs j ON j.id = e.job_id
      JOIN known_engines g ON g.name = e.engine AND g.kind = ANY($2)
     WHERE NOT e.over AND e.decision IS NULL AND j.state = 'queued' AND NOT j.gated
)
SELECT coalesce(extract(epoch FROM last_active_at)::float8
                + CASE WHEN new.at > last_active_at THEN least($1::float8, $3::float8) ELSE $1::float8 END, 0)
       - extract(epoch FROM now())::float8
  FROM scheduler_state, new WHERE id = 1
"""
"""An active round is held for new jobs of an engine with a queue of its own, too: as a passive one plans no hours, it
would have them started, and an engine stops a job only by starting it again."""

FINGERPRINT = """
SELECT (SELECT count(*) || '/' || coalesce(max(id), '') || '/' || coalesce(max(queued_at)::text, '')
          FROM jobs WHERE state = 'queued' AND cell IS NULL),
       (SELECT count(*) FROM jobs WHERE bound_to IS NOT NULL AND state = 'queued'),
       (SELECT string_agg(id, ',' ORDER BY id) FROM jobs WHERE gated AND state = 'queued' AND not_before > now()),
       (SELECT count(*) FROM device_claims),
       (SELECT count(*) || '/' || coalesce(max(id), '') FROM jobs JOIN tenant_limits USING (tenant_id)
         WHERE max_gpus IS NOT NULL AND cell <> '' AND ended_at IS NULL),
       (SELECT coalesce(string_agg(id || zone || labels || (draining OR closed IS NOT NULL) || registered_at, ','
                                   ORDER BY id), '')
          FROM known_nodes WHERE state = 'up' AND heard AND NOT measures_only),
       (SELECT string_agg(concat_ws('/', node_id, gpu, revision, state, owner), ',' ORDER BY node_id, gpu)
          FROM gpu_partitions),
       (SELECT string_agg(node_id || gpu, ',' ORDER BY node_id, gpu) FROM unusable_gpus),
       (SELECT coalesce(string_agg(node_id || state || pinned || (since + make_interval(secs => $1) <= now()), ','
                                   ORDER BY node_id), '') FROM node_power),
       (SELECT string_agg(id || revision || coalesce(baseline_w, 0), ',' ORDER BY id)
          FROM grid_orders WHERE end_at > now() - interval '1 day'),
       (SELECT string_agg(id, ',' ORDER BY id) FROM reservations WHERE end_at > now() AND cancelled_at IS NULL),
       (SELECT policy || parameters || topology FROM scheduler_state WHERE id = 1),
       (SELECT max(fitted_at) FROM setting_profiles)
"""

# The number of the round whose plan and memory are stored; none if its version is no longer the newest. A memory that
# is null leaves the stored one as it is.
CLAIM_VERSION = """
UPDATE scheduler_state
   SET version = version + 1, memory = coalesce($2, memory),
       last_active_at = CASE WHEN $3 THEN now() ELSE last_active_at END
 WHERE id = 1 AND version = $1 RETURNING version
"""

NEXT_VERSION = """
UPDATE scheduler_state SET version = version + 1 WHERE id = 1 AND version = coalesce($1, version) RETURNING version
"""

RECORD = """
INSERT INTO plans (round, trigger, policy, jobs, starts, preemptions, holds, intensity_gco2_per_kwh, intensity_stale,
                   decide_ms, actions)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
"""

TRIM_PLANS = "DELETE FROM plans WHERE round < (SELECT max(round) FROM plans) - $1"

ACTIVE_POLICY = "SELECT policy, parameters, policy_since, policy_changed_by FROM scheduler_state WHERE id = 1"

SET_POLICY = """
UPDATE scheduler_state
   SET memory = CASE WHEN policy = $1 THEN memory ELSE '{}' END, policy_since = now(), last_active_at = NULL,
       policy = $1, parameters = $2, policy_changed_by = $3, version = version + 1
 WHERE id = 1 RETURNING policy, parameters, policy_since, policy_changed_by
"""

SET_TOPOLOGY = "UPDATE scheduler_state SET topology = $1, version = version + 1 WHERE id = 1 RETURNING id"

PLANS = """
SELECT round, at, trigger, policy, jobs, starts, preemptions, holds, intensity_gco2_per_kwh, intensity_stale, decide_ms,
       actions
  FROM plans
"""


class State(NamedTuple):
    """What a round starts from; times are UTC seconds by the database's clock.

    ``memory`` is None if the caller already has that of this version.
    """

    version: int
    policy: str
    parameters: Json
    memory: Json | None
    last_active_s: float | None
    now_s: float
    topology: str = ""  #: The operator's file of the network's levels


class ActivePolicyRow(NamedTuple):
    """The policy in force, and who put it in force."""

    policy: str
    parameters: Json
    policy_since: datetime
    policy_changed_by: str


class NewPlan(NamedTuple):
    """A round that was just held, to be stored."""

    round: int
    trigger: str
    policy: str
    jobs: int
    starts: int
    preemptions: int
    holds: int
    intensity_gco2_per_kwh: float | None
    intensity_stale: bool
    decide_ms: float
    actions: list[Json]


async def state(connection: Connection, known_version: int | None = None) -> State:
    """Return the state that a round starts from, after ``prepare``, without the memory of ``known_version``."""
    found = await fetch_row(connection, State, STATE, known_version)
    assert found is not None
    return found


async def due_in_s(connection: Connection, interval_s: float, new_jobs_s: float) -> float:
    """Return in how many seconds the next active round is due; 0 or less: now.

    It is due ``interval_s`` after the last one, or ``new_jobs_s`` where engines have new jobs.
    """
    return await connection.fetchval(DUE, interval_s, sorted(QUEUEING), new_jobs_s) or 0.0


async def fingerprint(connection: Connection, node_min_on_s: float) -> tuple[object, ...]:
    """Return what a passive round's outcome depends on: as long as it stays the same, so does the outcome."""
    return tuple(await connection.fetchrow(FINGERPRINT, node_min_on_s) or ())


async def next_version(connection: Connection, after: int | None = None) -> bool:
    """Make stale any plan that is being made at the same time; return whether ``after``, if given, was the newest."""
    return await connection.fetchval(NEXT_VERSION, after) is not None


async def active_policy(connection: Connection) -> ActivePolicyRow | None:
    """Return the policy in force; None before the scheduler's first turn."""
    return await fetch_row(connection, ActivePolicyRow, ACTIVE_POLICY)


async def set_policy(connection: Connection, name: str, parameters: Json, key_id: str) -> ActivePolicyRow | None:
    """Put a policy in force from the next round on, which is an active one; None before the scheduler's first turn.

    The memory of another policy is deleted; the same policy goes on from what it remembers.
    """
    return await fetch_row(connection, ActivePolicyRow, SET_POLICY, name, parameters, key_id)


async def topology(connection: Connection) -> str:
    """Return the operator's file of the network's levels."""
    return await connection.fetchval("SELECT topology FROM scheduler_state WHERE id = 1") or ""


async def plans(connection: Connection, before: int | None, limit: int) -> list[PlanSummary | Unread]:
    """Return recorded rounds, newest first, below number ``before``."""
    query = f"{PLANS} WHERE $1::bigint IS NULL OR round < $1 ORDER BY round DESC LIMIT $2"
    rows = await connection.fetch(query, before, limit)
    return messages_of(PlanSummary, rows, lambda row: str(row["round"]))


async def plan(connection: Connection, number: int) -> list[PlanSummary]:
    """Return one recorded round, if there is one of that number."""
    return await fetch_messages(connection, PlanSummary, f"{PLANS} WHERE round = $1", number)


LIVE_NODES = """
SELECT id FROM known_nodes WHERE state = 'up'
UNION SELECT node_id FROM device_claims
UNION SELECT share ->> 'node_id' FROM allocations, jsonb_array_elements(shares) share WHERE state <> 'ended'
"""

# A number is added once: after that, the newest gang is older than the job's number by more than one.
RENUMBER = """
UPDATE jobs j SET generation = generation + $1
 WHERE j.state NOT IN ('succeeded', 'failed', 'cancelled')
   AND j.generation < $1 + coalesce((SELECT max(a.generation) FROM allocations a WHERE a.job_id = j.id), 0)
"""


# Which cell has a job that might be in one is to be asked of the cells before it is started here (admission).
UNPLACE = f"""
UPDATE jobs j SET cell = '' WHERE cell IS NULL AND spec ? 'cells'
   AND (state IN ('queued', 'held') AND generation = 0 OR {MAY_MOVE} AND ended_at IS NULL)
"""


async def make_fit(connection: Connection, generations: int) -> int:
    """Give up every node and its shares of gangs, and all commands; return how many gangs were live.

    Args:
        generations: By how much the numbers of the gangs that unfinished jobs will get are raised.
    """
    live = await connection.fetchval("SELECT count(*) FROM allocations WHERE state <> 'ended'")
    of_gangs = [record[0] for record in await connection.fetch(LIVE_NODES)]
    known = await nodes.lock(connection)
    await gangs.lose_nodes(connection, sorted({*of_gangs, *known}), "stopped")
    await connection.execute("DELETE FROM outbox")
    await connection.execute(UNPLACE)
    await connection.execute(RENUMBER, generations)
    return live
