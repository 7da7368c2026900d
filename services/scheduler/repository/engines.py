"""Engines' jobs: reports not folded yet, decisions on their way, and the devices that jobs really hold."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import NamedTuple

from services.contracts.engines import Engine, EngineDay, EngineHours, EngineWaiting
from services.db.database import Connection
from services.db.job_rows import TAKEN
from services.db.rows import fetch_rows
from services.kit.readable import BY_NAME, readable_messages
from services.scheduler.repository.documents import Json, StoredShare

LOCK_UNFOLDED = """
SELECT engine, external_id FROM engine_jobs WHERE unfolded ORDER BY engine, external_id LIMIT $1 FOR UPDATE SKIP LOCKED
"""

# Two engines may have jobs of the same id.
_LOCKED = "(e.engine, e.external_id) IN (SELECT * FROM unnest($1::text[], $2::text[])) AND e.unfolded"

LOCK_JOBS = f"""
SELECT j.id FROM jobs j JOIN engine_jobs e ON e.job_id = j.id WHERE {_LOCKED} ORDER BY j.id FOR UPDATE OF j
"""

UNFOLDED = f"""
SELECT e.engine, g.mode = 'control' AS controls, e.external_id, e.report, e.job_id, e.decision, e.revision,
       j.state AS job_state,
       coalesce(j.cancel_requested OR j.state = 'cancelled' AND j.reason = 'cancelled', false) AS cancel_requested,
       coalesce(j.hold_requested, false) AS hold_requested, coalesce(j.generation, 0) AS generation,
       a.id AS gang_id, a.state AS gang_state, a.shares, a.stop_reason
  FROM engine_jobs e JOIN known_engines g ON g.name = e.engine
  LEFT JOIN jobs j ON j.id = e.job_id
  LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
 WHERE {_LOCKED} ORDER BY e.engine, e.external_id
"""

FOLDED = f"""
UPDATE engine_jobs e SET unfolded = false, watched = g.mode = 'dry_run' FROM known_engines g
 WHERE g.name = e.engine AND {_LOCKED}
"""

FORESEE = """
UPDATE engine_jobs e SET planned = true, would_start_at = w.start_at, would_save_gco2 = w.saves_gco2, rank = w.rank
  FROM unnest($1::text[], $2::timestamptz[], $3::float8[], $4::int[]) AS w (job_id, start_at, saves_gco2, rank)
 WHERE e.job_id = w.job_id AND NOT e.over
   AND NOT (e.planned AND (e.would_start_at, e.would_save_gco2, e.rank)
            IS NOT DISTINCT FROM (w.start_at, w.saves_gco2, w.rank))
"""

ADMIT = f"""
WITH counted AS ({TAKEN.format(ids="$2::text[]", tenant_id="$1")}), admitted AS (
    INSERT INTO jobs (id, tenant_id, name, project, labels, spec, state, reason, detail, submitted_at, queued_at,
                      started_at, engine, external_id, generation, number)
    SELECT n.id, $1, n.spec ->> 'name', n.spec ->> 'project', n.spec -> 'labels', n.spec, n.state, 'submitted',
           'It was submitted to ' || n.engine || '.', n.submitted_at, now(), n.started_at, n.engine, n.external_id,
           CASE WHEN n.state = 'queued' THEN 0 ELSE 1 END, counted.before + n.at
      FROM unnest($2::text[], $3::jsonb[], $4::text[], $5::timestamptz[], $6::timestamptz[], $7::text[], $8::text[])
           WITH ORDINALITY AS n (id, spec, state, submitted_at, started_at, engine, external_id, at)
      LEFT JOIN counted ON true
    RETURNING id, tenant_id, engine, external_id
), known AS (
    UPDATE engine_jobs e SET job_id = a.id, decision = NULL FROM admitted a
     WHERE e.engine = a.engine AND e.external_id = split_part(a.external_id, '#', 1)
)
INSERT INTO job_events (job_id, tenant_id, type, data)
SELECT id, tenant_id, 'job.submitted', jsonb_build_object('engine', engine, 'external_id', external_id) FROM admitted
"""

# Engines are believed for when a run began, but not that it begins later than now, or began before its job was there.
RUNS = """
INSERT INTO allocations (id, job_id, generation, state, gpus, shares, master_port, started_at, running_at)
SELECT $1, id, $3, 'running', $4, $5, 0, began.at, began.at
  FROM jobs, LATERAL (SELECT least(greatest(coalesce($6::timestamptz, now()), jobs.submitted_at), now()) AS at) began
 WHERE id = $2
"""

TAKE_UP = """
WITH moved AS (
    UPDATE jobs SET state = 'running', reason = 'running', detail = $2, generation = $3, expected_start_at = NULL,
           started_at = coalesce(started_at, now())
     WHERE id = $1 AND state IN ('queued', 'held') RETURNING id, tenant_id
)
INSERT INTO job_events (job_id, tenant_id, type, data) SELECT id, tenant_id, 'job.running', $4 FROM moved
RETURNING job_id
"""

PLACED = (
    "UPDATE allocations SET shares = $2, gpus = $3, state = $4, running_at = coalesce(running_at, now()) WHERE id = $1"
)

RUN_ON = "UPDATE jobs SET state = 'running', reason = 'running', detail = $2 WHERE id = $1 AND state = 'preempting'"

DECIDE = """
UPDATE engine_jobs e SET revision = e.revision + 1, sent_at = now(),
       decision = w.wanted || jsonb_build_object('external_id', e.external_id, 'revision', e.revision + 1)
  FROM unnest($1::text[], $2::jsonb[]) AS w (job_id, wanted), known_engines g
 WHERE e.job_id = w.job_id AND NOT e.over AND g.name = e.engine
   AND (e.decision - 'external_id' - 'revision') IS DISTINCT FROM w.wanted
RETURNING e.engine, g.mode, e.decision
"""

UNFOLLOWED = """
UPDATE engine_jobs e SET sent_at = now() FROM known_engines g
 WHERE g.name = e.engine AND g.mode = 'control' AND NOT e.over AND e.decision IS NOT NULL
   AND (e.report ->> 'revision')::bigint < e.revision AND e.sent_at < now() - make_interval(secs => $1)
   AND (e.report ->> 'steered')::bool
   AND NOT EXISTS (SELECT FROM outbox o WHERE o.stream = $2 || e.engine || $3)
RETURNING e.engine, e.decision
"""

# One that its engine refused to make smaller is stopped instead.
SHRINKABLE = """
SELECT e.job_id FROM engine_jobs e JOIN known_engines g ON g.name = e.engine AND g.mode = 'control'
  JOIN allocations a ON a.job_id = e.job_id AND a.state = 'running'
 WHERE e.job_id = ANY($1::text[]) AND NOT e.over AND e.report @> '{"shrinkable": true, "state": "running"}'
   AND NOT (e.decision @> '{"action": "shrink"}' AND e.report ->> 'refused' <> ''
            AND (e.report ->> 'revision')::bigint >= e.revision)
"""

LIVE_JOBS = """
SELECT e.job_id, e.engine, g.mode, g.kind, coalesce(e.decision ->> 'action', '') AS action,
       coalesce(e.decision IS NULL AND j.queued_at > s.last_active_at, false) AS unplanned, g.orders
  FROM engine_jobs e JOIN known_engines g ON g.name = e.engine JOIN jobs j ON j.id = e.job_id
  LEFT JOIN scheduler_state s ON s.id = 1 WHERE NOT e.over
"""

GATE = """
UPDATE jobs j SET gated = w.blocked FROM unnest($1::text[], $2::bool[]) AS w (id, blocked)
 WHERE j.id = w.id AND j.gated <> w.blocked AND (w.blocked OR coalesce(j.not_before <= now(), true))
"""

WISHES = """
SELECT e.job_id, e.engine, g.kind, j.state, j.cancel_requested, j.hold_requested,
       a.id AS gang_id, a.state AS gang_state,
       coalesce(a.state = 'starting' AND a.started_at < now() - make_interval(secs => $1), false) AS late
  FROM engine_jobs e JOIN jobs j ON j.id = e.job_id JOIN known_engines g ON g.name = e.engine AND g.mode = 'control'
  LEFT JOIN allocations a ON a.job_id = j.id AND a.state <> 'ended'
 WHERE NOT e.over AND NOT e.unfolded
   AND (j.cancel_requested OR j.hold_requested OR j.state = 'cancelled' AND j.reason = 'cancelled' OR j.state = 'held'
        OR a.state = 'starting' AND a.started_at < now() - make_interval(secs => $1))
 ORDER BY e.job_id
"""

COUNT = """
INSERT INTO engine_days AS known (engine, day, what, count)
SELECT c.engine, (now() AT TIME ZONE 'UTC')::date, c.what, c.count
  FROM unnest($1::text[], $2::text[], $3::bigint[]) AS c (engine, what, count)
ON CONFLICT (engine, day, what) DO UPDATE SET count = known.count + excluded.count
"""

HELD = """
SELECT a.id, a.state, a.shares, j.engine, extract(epoch FROM a.started_at)::float8 AS started_s
  FROM allocations a JOIN jobs j ON j.id = a.job_id WHERE a.state <> 'ended' AND j.engine <> 'wattshift'
 ORDER BY a.state = 'starting', a.started_at, a.id
"""

DEVICES = """
SELECT n.engine, n.id, (d ->> 'index')::int AS device FROM known_nodes n, jsonb_array_elements(n.devices) d
 WHERE n.engine <> 'wattshift' ORDER BY 2, 3
"""

CLAIMS = """
SELECT c.allocation_id, c.node_id, c.device FROM device_claims c
  JOIN allocations a ON a.id = c.allocation_id JOIN jobs j ON j.id = a.job_id WHERE j.engine <> 'wattshift'
"""

FORGET = "DELETE FROM engine_jobs e WHERE over AND NOT unfolded AND reported_at < now() - interval '7 days'"

DAYS = """
SELECT day::text AS day, coalesce(c.counts, '{{}}') AS counts, s.savings
  FROM (SELECT day, jsonb_object_agg(what, count) AS counts FROM engine_days WHERE engine = {engine} GROUP BY 1) c
  FULL JOIN (SELECT day, to_jsonb(k) - 'engine' - 'day' AS savings FROM engine_savings k WHERE engine = {engine}) s
       USING (day)
 WHERE day > (now() AT TIME ZONE 'UTC')::date - {within_days}::int
"""

ENGINES = f"""
SELECT e.name, e.kind, e.version, e.places, e.mode, to_jsonb(e.queues) AS queues, e.problem, e.reported_at,
       coalesce((SELECT n.heard FROM known_nodes n WHERE n.id = e.name), false) AS heard,
       (SELECT count(*) FROM known_nodes n WHERE n.engine = e.name) AS nodes,
       (SELECT coalesce(sum(jsonb_array_length(n.devices)), 0) FROM known_nodes n WHERE n.engine = e.name) AS gpus,
       (SELECT count(*) FROM device_claims c JOIN known_nodes n ON n.id = c.node_id WHERE n.engine = e.name)
           AS gpus_in_use,
       (SELECT coalesce(jsonb_object_agg(s.state, s.count), '{{}}') FROM (
            SELECT j.state, count(*) AS count FROM jobs j WHERE j.engine = e.name AND j.ended_at IS NULL GROUP BY 1) s
       ) AS jobs,
       (SELECT count(*) FROM engine_jobs k WHERE k.engine = e.name AND e.mode = 'control' AND NOT k.over
           AND k.decision IS NOT NULL AND (k.report ->> 'revision')::bigint < k.revision) AS unfollowed,
       (SELECT coalesce(jsonb_agg(d ORDER BY d.day DESC), '[]') FROM ({DAYS.format(within_days=7, engine="e.name")}) d)
           AS days
  FROM known_engines e WHERE NOT e.revoked ORDER BY e.name
"""

DAYS_OF_ONE = f"{DAYS.format(within_days='$1', engine='$2')} ORDER BY day DESC"

# Those that are held back longest come first; nobody reads more than this.
WAITING = """
SELECT e.report ->> 'number' AS number, e.report ->> 'name' AS name, e.report ->> 'user' AS "user",
       e.report ->> 'queue' AS queue, (e.report ->> 'gpus')::int AS gpus, (e.report ->> 'steered')::bool AS steered,
       coalesce(nullif(e.report ->> 'blocked', ''), e.report ->> 'why_not', '') AS waits_for,
       CASE WHEN e.would_start_at > now() THEN e.would_start_at END AS held_until,
       CASE WHEN e.would_start_at > now() THEN e.would_save_gco2 END AS saves_gco2
  FROM engine_jobs e JOIN jobs j ON j.id = e.job_id
 WHERE e.engine = $1 AND NOT e.over AND j.state IN ('queued', 'held')
   AND (NOT $2 OR e.would_start_at > now())
 ORDER BY held_until DESC NULLS LAST, e.external_id LIMIT 1000
"""

HOURS = """
SELECT CASE WHEN (e.report ->> 'steered')::bool THEN '' ELSE e.report ->> 'why_not' END AS why_not,
       sum(a.gpus * extract(epoch FROM coalesce(a.ended_at, now())
                                       - greatest(a.running_at, now() - interval '7 days')))::float8 / 3600 AS gpu_h
  FROM engine_jobs e JOIN allocations a ON a.job_id = e.job_id
 WHERE e.engine = $1 AND a.running_at IS NOT NULL AND coalesce(a.ended_at, now()) > now() - interval '7 days'
 GROUP BY 1 ORDER BY 2 DESC, 1
"""

IS_KNOWN = "SELECT EXISTS (SELECT FROM known_engines WHERE name = $1)"


class UnfoldedRow(NamedTuple):
    """A report that has not been folded yet, with what is known about its job.

    Attributes:
        decision, revision: What was last decided about it.
        gang_id, gang_state, shares, stop_reason: Of its live allocation, if it has one.
    """

    engine: str
    controls: bool  #: Whether decisions on the engine's jobs are carried out
    external_id: str
    report: Json  #: A ``contracts.engines.EngineJob``
    job_id: str | None
    decision: Json | None
    revision: int
    job_state: str | None
    cancel_requested: bool
    hold_requested: bool
    generation: int
    gang_id: str | None
    gang_state: str | None
    shares: list[StoredShare] | None
    stop_reason: str | None


class NewJob(NamedTuple):
    """A job of an engine, to be stored for the first time."""

    id: str
    spec: Json
    state: str
    submitted_at: datetime
    started_at: datetime | None
    engine: str
    external_id: str


class WishRow(NamedTuple):
    """A job of which somebody wants something, or that was released and has not started."""

    job_id: str
    engine: str
    kind: str
    state: str
    cancel_requested: bool
    hold_requested: bool
    gang_id: str | None
    gang_state: str | None
    late: bool


class LiveRow(NamedTuple):
    """A job that is not over: its engine, that engine's mode and kind, and the action last decided, if any."""

    job_id: str
    engine: str
    mode: str
    kind: str
    action: str
    unplanned: bool = False  #: Nothing was decided yet, and it is newer than the last active round
    orders: bool = False  #: Whether the plan's order of what is released counts there


class HeldRow(NamedTuple):
    """A live allocation of an engine's job; running ones come before planned ones."""

    id: str
    state: str
    shares: list[StoredShare]
    engine: str
    started_s: float


class DecidedRow(NamedTuple):
    """A decision, with the mode of its engine."""

    engine: str
    mode: str
    decision: Json


Claim = tuple[str, str, int]  #: Allocation, node and device
Device = tuple[str, str, int]  #: Engine, node and device


async def lock_unfolded(connection: Connection, limit: int) -> list[UnfoldedRow]:
    """Lock and return reports that have not been folded yet, with their jobs."""
    locked = await connection.fetch(LOCK_UNFOLDED, limit)
    if not locked:
        return []
    names = [list(column) for column in zip(*locked, strict=True)]
    await connection.execute(LOCK_JOBS, *names)
    return await fetch_rows(connection, UnfoldedRow, UNFOLDED, *names)


async def mark_folded(connection: Connection, folded: Sequence[tuple[str, str]]) -> None:
    """Note that reports, by engine and external id, have been folded; their rows are locked."""
    await connection.execute(FOLDED, *map(list, zip(*folded, strict=True)) if folded else ([], []))


async def admit(connection: Connection, tenant_id: str, new: Sequence[NewJob]) -> None:
    """Store jobs that were not known before."""
    if new:
        await connection.execute(ADMIT, tenant_id, *(list(column) for column in zip(*new, strict=True)))


async def add_run(
    connection: Connection,
    gang: str,
    job_id: str,
    generation: int,
    shares: list[StoredShare],
    started_at: datetime | None,
) -> None:
    """Store a run that the engine has begun."""
    gpus = sum(len(share["devices"]) for share in shares)
    await connection.execute(RUNS, gang, job_id, generation, gpus, shares, started_at)


async def take_up(connection: Connection, job_id: str, generation: int, detail: str, event: Json) -> bool:
    """Move a waiting job to ``running``; return whether it was waiting."""
    return await connection.fetchval(TAKE_UP, job_id, detail, generation, event) is not None


async def placed(connection: Connection, gang: str, shares: list[StoredShare], state: str) -> None:
    """Note which devices a run holds."""
    await connection.execute(PLACED, gang, shares, sum(len(share["devices"]) for share in shares), state)


async def decide(connection: Connection, wanted: Mapping[str, Json]) -> list[DecidedRow]:
    """Store what is to become of jobs, where that has changed; return the changes."""
    if not wanted:
        return []
    return await fetch_rows(connection, DecidedRow, DECIDE, list(wanted), list(wanted.values()))


async def unfollowed(connection: Connection, after_s: float, stream: tuple[str, str]) -> list[tuple[str, Json]]:
    """Return decisions sent more than ``after_s`` ago that are not followed, and note that they are sent again.

    Those of an engine with unsent commands are left out; ``stream``: what comes before and after its name there.
    """
    return [(row["engine"], row["decision"]) for row in await connection.fetch(UNFOLLOWED, after_s, *stream)]


async def foresee(
    connection: Connection, starts: Mapping[str, tuple[datetime | None, int | None]], ranks: Mapping[str, int]
) -> None:
    """Store until when jobs are held back, the grams which that saves, and their ranks, where these have changed."""
    if starts:
        columns = [list(column) for column in zip(*starts.values(), strict=True)]
        await connection.execute(FORESEE, list(starts), *columns, [ranks.get(job_id) for job_id in starts])


async def shrinkable(connection: Connection, job_ids: Sequence[str]) -> frozenset[str]:
    """Return which of these jobs run and can give up GPUs without being stopped."""
    return frozenset(row["job_id"] for row in await connection.fetch(SHRINKABLE, list(job_ids)))


async def gate(connection: Connection, blocked: Mapping[str, bool]) -> None:
    """Note which jobs their engine does not start, no matter how many GPUs are free."""
    if blocked:
        await connection.execute(GATE, list(blocked), list(blocked.values()))


async def live_jobs(connection: Connection) -> dict[str, LiveRow]:
    """Return the jobs that are not over, by our job ids."""
    return {row.job_id: row for row in await fetch_rows(connection, LiveRow, LIVE_JOBS)}


async def wishes(connection: Connection, late_after_s: float) -> list[WishRow]:
    """Return jobs whose users want something, and those released more than ``late_after_s`` ago that do not run yet."""
    return await fetch_rows(connection, WishRow, WISHES, late_after_s)


async def count(connection: Connection, counted: Mapping[tuple[str, str], int]) -> None:
    """Add to today's counts, by engine and name."""
    if counted:
        names = sorted(counted)
        columns = [name[0] for name in names], [name[1] for name in names], [counted[name] for name in names]
        await connection.execute(COUNT, *columns)


async def holders(connection: Connection) -> list[HeldRow]:
    """Return the live allocations of engines' jobs."""
    return await fetch_rows(connection, HeldRow, HELD)


async def devices(connection: Connection) -> list[Device]:
    return [(row[0], row[1], row[2]) for row in await connection.fetch(DEVICES)]


async def claims(connection: Connection) -> set[Claim]:
    return {(row[0], row[1], row[2]) for row in await connection.fetch(CLAIMS)}


async def replace_claims(connection: Connection, gone: Collection[Claim], new: Collection[Claim]) -> None:
    """Release devices, and then claim others."""
    if gone:
        await connection.executemany(
            "DELETE FROM device_claims WHERE allocation_id = $1 AND node_id = $2 AND device = $3", sorted(gone)
        )
    if new:
        await connection.executemany(
            "INSERT INTO device_claims (allocation_id, node_id, device) VALUES ($1, $2, $3)", sorted(new)
        )


async def engines(connection: Connection) -> list[Engine]:
    """Return the engines that have ever been reported."""
    return readable_messages(Engine, await connection.fetch(ENGINES), BY_NAME)


async def days(connection: Connection, within_days: int, engine: str) -> list[EngineDay]:
    """Return the last days of an engine, newest first."""
    rows = await connection.fetch(DAYS_OF_ONE, within_days, engine)
    return readable_messages(EngineDay, rows, itemgetter("day"))


async def waiting(connection: Connection, engine: str, *, held: bool) -> list[EngineWaiting]:
    """Return jobs that wait, those that are held back longest first; with ``held`` these alone."""
    rows = await connection.fetch(WAITING, engine, held)
    return readable_messages(EngineWaiting, rows, lambda row: str(row["number"]))


async def hours(connection: Connection, engine: str) -> list[EngineHours]:
    """Return the GPU hours of the last seven days by why their jobs were left alone."""
    return readable_messages(EngineHours, await connection.fetch(HOURS, engine), lambda row: str(row["why_not"]))


async def is_known(connection: Connection, engine: str) -> bool:
    """Return whether an engine of this name has ever been reported."""
    return bool(await connection.fetchval(IS_KNOWN, engine))
