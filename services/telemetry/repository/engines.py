"""What bridges report of their engines: nodes, and jobs for the scheduler to fold."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from services.contracts.engines import EngineDecision, EngineJob, EngineNode, EngineReply, EngineReport, node_name
from services.contracts.nodes import EnergyInterval
from services.core.profiles.boards import board_of
from services.db.database import Connection, Database
from services.db.rows import fetch_row, fetch_rows
from services.telemetry.measured import Hold
from services.telemetry.repository.credentials import sha256

_RENEW = """
WITH before AS (
    SELECT id, state, boot_id, closed FROM nodes WHERE id = $1 AND token_sha256 = $2 AND driver = 'engine' FOR UPDATE
)
UPDATE nodes SET state = 'up', boot_id = $3, closed = $5::text, heartbeat_at = now(),
       lease_until = least(greatest(lease_until, now() + make_interval(secs => $4)),
            clock_timestamp() + make_interval(secs => $4))
  FROM before WHERE nodes.id = before.id
RETURNING before.state <> 'up' OR before.boot_id IS DISTINCT FROM $3 OR before.closed IS DISTINCT FROM $5::text
          AS changed
"""

_SEEN = """
INSERT INTO engines (name, kind, version, places, mode, queues, problem, boot_id, orders)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (name) DO UPDATE SET kind = excluded.kind,
    version = coalesce(nullif(excluded.version, ''), engines.version),
    places = excluded.places, mode = excluded.mode, queues = excluded.queues, problem = excluded.problem,
    boot_id = excluded.boot_id, orders = excluded.orders, reported_at = now()
"""

# Only what the engine has itself: a host with an agent of ours keeps its row, whatever a bridge calls its nodes.
_NODES = """
INSERT INTO nodes AS known (id, token_sha256, address, agent_url, zone, driver, containers, host_power, labels, devices,
                            closed, engine, queues, state, heartbeat_at, lease_until)
SELECT n.id, '', n.name, '', coalesce(n.zone, $2), 'engine', false, 'modelled', '{}', n.devices, n.closed, $1,
       ARRAY(SELECT jsonb_array_elements_text(n.queues)), 'up', now(), now() + make_interval(secs => $3)
  FROM jsonb_to_recordset($4) AS n (id text, name text, devices jsonb, closed text, queues jsonb, zone text)
ON CONFLICT (id) DO UPDATE SET zone = excluded.zone, devices = excluded.devices, closed = excluded.closed,
    queues = excluded.queues, state = 'up', heartbeat_at = now(), lease_until = excluded.lease_until
 WHERE known.engine = excluded.engine
"""

# What the engine has no more is not kept by reports of nothing new.
_END_LEASES = "UPDATE nodes SET lease_until = now() WHERE engine = $1 AND lease_until > now() AND id <> ALL($2::text[])"

_KEEP_LEASES = """
UPDATE nodes SET state = 'up', heartbeat_at = now(), lease_until = now() + make_interval(secs => $2)
 WHERE engine = $1 AND lease_until > now()
"""

# An engine that crashed and has come back with an older state shows runs that are over as waiting or running: what is
# known stands. What was requeued since, or has begun after that end, really runs again.
_OLDER = """
SELECT external_id, e.over
  FROM engine_jobs e JOIN unnest($2::text[], $3::jsonb[]) AS t (external_id, report) USING (external_id)
 WHERE e.engine = $1 AND e.report ->> 'state' <> 'missing'
   AND CASE WHEN e.over THEN (t.report ->> 'requeues')::bigint <= (e.report ->> 'requeues')::bigint
                 AND (t.report ->> 'state' = 'pending'
                      OR (t.report ->> 'started_at')::timestamptz < (e.report ->> 'ended_at')::timestamptz)
            ELSE t.report ->> 'state' = 'running'
                 AND (t.report ->> 'requeues')::bigint < (e.report ->> 'requeues')::bigint END
 ORDER BY 1
"""

_ROLLED_BACK = """
UPDATE engine_jobs SET report = report || '{"rolled_back": true}', unfolded = true, reported_at = now()
 WHERE engine = $1 AND external_id = ANY($2::text[]) AND NOT report @> '{"rolled_back": true}' RETURNING external_id
"""

_JOBS = """
INSERT INTO engine_jobs AS known (engine, external_id, report, over)
SELECT $1, j.external_id, j.report, j.over
  FROM unnest($2::text[], $3::jsonb[], $4::bool[]) AS j (external_id, report, over) ORDER BY 2
ON CONFLICT (engine, external_id) DO UPDATE SET
    report = excluded.report, over = excluded.over, unfolded = true, reported_at = now()
 WHERE known.report IS DISTINCT FROM excluded.report
RETURNING external_id
"""

_UNREPORTED = """
SELECT external_id FROM engine_jobs WHERE engine = $1 AND NOT over AND NOT external_id = ANY($2::text[]) ORDER BY 1
"""

_DECISIONS = """
SELECT decision FROM engine_jobs WHERE engine = $1 AND NOT over AND decision IS NOT NULL ORDER BY external_id
"""

# What a plan has started already comes before what it would start next.
_ORDER = """
SELECT e.external_id FROM engine_jobs e LEFT JOIN gangs a ON a.job_id = e.job_id AND a.state = 'starting'
 WHERE e.engine = $1 AND NOT e.over AND e.report @> '{"state": "pending", "steered": true}'
   AND e.decision ->> 'action' = 'release' AND (a.id IS NOT NULL OR e.rank IS NOT NULL)
 ORDER BY a.started_at, e.rank, e.external_id LIMIT 1000
"""

_HOLDERS = """
SELECT e.external_id, a.id AS allocation_id, a.started_at
  FROM engine_jobs e JOIN gangs a ON a.job_id = e.job_id
 WHERE e.engine = $1 AND e.external_id = ANY($2::text[]) ORDER BY a.started_at
"""

# An agent on the engine's node measures it; its credential speaks for the host of that very name.
_PLACE = """
SELECT e.zone, (SELECT coalesce(sum((d ->> 'power_limit_w')::float8), 0) FROM jsonb_array_elements(devices) d)
       AS limit_w, EXISTS (
    SELECT FROM nodes n LEFT JOIN node_credentials k ON k.node_id = n.id
     WHERE n.engine_node = e.id AND e.id = e.engine || '.' || n.id AND n.measures_only AND k.revoked_at IS NULL)
       AS is_measured
  FROM nodes e WHERE e.id = $1 AND e.engine = $2
"""
# A run began and ended when its engine says so, where that is within what we know of it, and not when we heard of it.
_HOLDS = """
WITH near AS (
    SELECT a.* FROM gangs a WHERE a.state <> 'ended' AND a.started_at < $3
    UNION ALL SELECT a.* FROM gangs a WHERE a.state = 'ended' AND a.ended_at > $2 AND a.started_at < $3
), runs AS (
    SELECT a.id, a.shares, coalesce(a.ended_at, 'infinity') AS ended_at,
           CASE WHEN (r.report ->> 'started_at')::timestamptz BETWEEN a.started_at AND coalesce(a.ended_at, 'infinity')
                THEN (r.report ->> 'started_at')::timestamptz ELSE coalesce(a.running_at, a.started_at) END AS began_at,
           (r.report ->> 'ended_at')::timestamptz AS said_at
      FROM near a JOIN engine_jobs r ON r.job_id = a.job_id WHERE a.state <> 'starting' OR a.running_at IS NOT NULL
)
SELECT r.id AS allocation_id, d.device::int AS device, extract(epoch FROM r.began_at)::float8 AS start_s,
       extract(epoch FROM CASE WHEN r.said_at BETWEEN r.began_at AND r.ended_at THEN r.said_at
                               ELSE r.ended_at END)::float8 AS end_s
  FROM runs r, jsonb_array_elements(r.shares) s, jsonb_array_elements_text(s -> 'devices') d (device)
 WHERE s ->> 'node_id' = $1 ORDER BY 1, 2
"""


class Place(NamedTuple):
    """The grid zone of an engine's node, the sum of its GPUs' power limits, and whether an agent measures it."""

    zone: str
    limit_w: float
    is_measured: bool


async def mirror(
    database: Database, engine: str, token: str, report: EngineReport, lease_ttl_s: float, default_zone: str
) -> tuple[EngineReply, bool] | None:
    """Store a report in one transaction; return the answer, and whether the scheduler has something to look at.

    Return None if the token is not that of the engine's bridge; one of a node with an agent is not.
    """
    async with database.transaction() as connection:
        row = await connection.fetchrow(_RENEW, engine, sha256(token), report.boot_id, lease_ttl_s, report.problem)
        if row is None:
            return None
        changed = bool(row["changed"])
        queues = list(report.queues)
        await connection.execute(
            _SEEN, engine, report.kind, report.version, report.places, report.mode, queues, report.problem,
            report.boot_id, report.orders,
        )  # fmt: skip
        if report.nodes is not None:
            newest = {node.name: node for node in report.nodes}
            rows = [_node_row(engine, node) for node in newest.values()]
            await connection.execute(_NODES, engine, report.zone or default_zone, lease_ttl_s, rows)
            await connection.execute(_END_LEASES, engine, [row["id"] for row in rows])
            changed = True
        elif report.problem is None:
            await connection.execute(_KEEP_LEASES, engine, lease_ttl_s)
        older: dict[str, bool] = {}
        if report.jobs:
            stored, older = await _store(connection, engine, report.jobs)
            changed = stored or changed
        reply = await _answer(connection, engine, report, older)
    return reply, changed


async def place_of(database: Database, engine: str, node_id: str) -> Place | None:
    """Return where an engine's node is and what its GPUs are limited to; None if it has no such node."""
    return await database.run(fetch_row, Place, _PLACE, node_id, engine)


async def holds(database: Database, node_id: str, start_at: datetime, end_at: datetime) -> list[Hold]:
    """Return which of an engine's jobs held which devices of a node between two moments."""
    return await database.run(fetch_rows, Hold, _HOLDS, node_id, start_at, end_at)


async def by_allocation(database: Database, engine: str, intervals: Sequence[EnergyInterval]) -> list[EnergyInterval]:
    """Return intervals whose usages name allocations instead of the engine's jobs.

    What a job used belongs to the last of its runs that had begun when the interval ended; if no run of the job is
    known yet, it counts as idle.
    """
    named = {usage.allocation_id for each in intervals for usage in each.usages if usage.allocation_id}
    async with database.connection() as connection:
        known = await connection.fetch(_HOLDERS, engine, sorted(named))
    runs: dict[str, list[tuple[str, datetime]]] = {}
    for external_id, allocation_id, started_at in known:
        runs.setdefault(external_id, []).append((allocation_id, started_at))

    def run_at(external_id: str | None, end_at: datetime) -> str | None:
        begun = [allocation for allocation, started_at in runs.get(external_id or "", ()) if started_at <= end_at]
        return begun[-1] if begun else None

    def of_allocations(each: EnergyInterval) -> EnergyInterval:
        runs_then = ((usage, run_at(usage.allocation_id, each.end_at)) for usage in each.usages)
        usages = [usage.model_copy(update={"allocation_id": run}) for usage, run in runs_then]
        return each.model_copy(update={"usages": usages})

    return [of_allocations(each) for each in intervals]


async def _store(connection: Connection, engine: str, jobs: Sequence[EngineJob]) -> tuple[bool, dict[str, bool]]:
    """Store reports; return whether any was new and, for jobs whose reported run is over, whether the job is too."""
    newest = {job.external_id: job for job in jobs}
    documents = {name: job.model_dump(mode="json") for name, job in newest.items()}
    live = [name for name, job in newest.items() if not job.state.is_over]
    found = await connection.fetch(_OLDER, engine, live, [documents[name] for name in live]) if live else []
    older = {record["external_id"]: record["over"] for record in found}
    marked = await connection.fetch(_ROLLED_BACK, engine, list(older)) if older else []
    names = [name for name in newest if name not in older]
    overs = [newest[name].state.is_over for name in names]
    stored = await connection.fetch(_JOBS, engine, names, [documents[name] for name in names], overs)
    return bool(marked or stored), older


async def _answer(connection: Connection, engine: str, report: EngineReport, older: Mapping[str, bool]) -> EngineReply:
    unreported: list[str] = []
    decisions: list[EngineDecision] = []
    if report.present is not None:
        unreported = [record[0] for record in await connection.fetch(_UNREPORTED, engine, list(report.present))]
    if report.wants_decisions:
        found = await connection.fetch(_DECISIONS, engine)
        decisions = [EngineDecision.as_stored(record[0]) for record in found]
    ordered = await connection.fetch(_ORDER, engine) if report.orders and report.nodes is not None else []
    return EngineReply(
        unreported=unreported,
        ended=[name for name, is_over in older.items() if is_over],
        stopped=[name for name, is_over in older.items() if not is_over],
        decisions=decisions,
        order=[record[0] for record in ordered],
    )


def _node_row(engine: str, node: EngineNode) -> dict[str, Any]:
    peak_w = board_of(node.gpu_model).peak_w
    devices = [
        {
            "index": index,
            "uuid": f"{node.name}/{index}",
            "model": node.gpu_model,
            "memory_gib": node.memory_gib,
            "power_limit_w": peak_w,
        }
        for index in range(node.gpus)
    ]
    told = node.model_dump(include={"name", "closed", "queues", "zone"})
    return {"id": node_name(engine, node.name), "devices": devices, **told}
