"""The inputs of a plan: a pool's traffic, nodes and instances as the database has them at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.contracts.pools import PoolsResult
from services.contracts.serving import PoolPartition, PoolSpec
from services.core.profiles.traffic import WINDOW_S
from services.db.database import connect
from services.db.job_specs import PREEMPTIBLE
from services.serving.instances import InstanceTerms
from services.serving.planning.demand import HISTORY_S, RequestLog
from services.serving.planning.problem import Need, Node, Running, without_needs

PAGE = 24

TRAFFIC = f"""
SELECT jsonb_agg(jsonb_build_array(((extract(epoch FROM start_at) - $2) / {WINDOW_S})::int, counts)) AS windows
  FROM pool_traffic
 WHERE pool = $1 AND start_at >= to_timestamp($2) AND start_at < to_timestamp($3)
 GROUP BY date_bin('1 hour', start_at, 'epoch')
"""
"""A row for each hour: with one for each window, two weeks take several times as long to read."""

NODES = """
SELECT n.id, n.zone, n.labels, n.devices
  FROM nodes n LEFT JOIN node_power p ON p.node_id = n.id
 WHERE n.state = 'up' AND NOT n.draining AND coalesce(p.state, 'on') <> 'failed'
   AND (n.lease_until > now() OR p.state IN ('off', 'waking'))
 ORDER BY n.id
"""

HELD = f"""
SELECT c.node_id, c.device
  FROM device_claims c JOIN allocations a ON a.id = c.allocation_id JOIN jobs j ON j.id = a.job_id
 WHERE NOT {PREEMPTIBLE}
   AND NOT EXISTS (SELECT FROM pool_instances i WHERE i.job_id = j.id AND i.pool = $1 AND i.state <> 'ended')
"""
"""Devices held by jobs that may not be preempted, except this pool's instances."""

AWAITED = """
SELECT i.terms
  FROM pool_instances i LEFT JOIN allocations a ON a.job_id = i.job_id AND a.state <> 'ended'
 WHERE i.pool <> $1 AND i.state IN ('wanted', 'starting') AND a.id IS NULL
 ORDER BY i.id
"""

PLANNED = """
SELECT q.name, q.spec, p.instances
  FROM pools q
  JOIN LATERAL (
       SELECT result #> '{plan,instances}' AS instances FROM pool_plans
        WHERE pool = q.name AND revision = q.revision AND state = 'succeeded'
          AND (id = q.plan_id OR outcome IS NULL AND q.spec ->> 'mode' = 'automatic')
        ORDER BY submitted_at DESC LIMIT 1) p ON true
 WHERE q.name <> $1 AND q.deleted_at IS NULL
 ORDER BY q.name
"""
"""What other pools are to have: as the plan in force says, or one that is about to be."""

MADE = """
SELECT pool, place, mode, count(*) AS count FROM pool_instances
 WHERE pool <> $1 AND state IN ('wanted', 'starting', 'ready') GROUP BY pool, place, mode
"""

INSTANCES = """
SELECT place, mode, terms, extract(epoch FROM now() - coalesce(ready_at, created_at))::float8 AS up_s
  FROM pool_instances WHERE pool = $1 AND state IN ('wanted', 'starting', 'ready') ORDER BY id
"""

IN_FORCE = """
SELECT p.result -> 'plan' FROM pools q JOIN pool_plans p ON p.id = q.plan_id WHERE q.name = $1
"""


@dataclass(frozen=True)
class Known:
    """The data in the database at one moment.

    Attributes:
        now_s: That moment, UTC seconds.
        logs: Of requests, by partition.
        nodes: Those that accept work, with the GPUs that the pool may have.
        instances: The pool's own.
        in_force: The plan in force.
    """

    now_s: float
    logs: Mapping[str, RequestLog]
    nodes: list[Node]
    instances: list[Running]
    in_force: PoolsResult | None


async def read_known(database_url: str, pool: str, spec: PoolSpec) -> Known:
    """Return the data of a pool, in one consistent view."""
    connection: Any = await connect(database_url, application_name="serving-planner")
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            now_s: float = await connection.fetchval("SELECT extract(epoch FROM now())::float8")
            in_force = await connection.fetchval(IN_FORCE, pool)
            return Known(
                now_s=now_s,
                logs=await read_logs(connection, pool, spec.partitions, now_s),
                nodes=await _nodes(connection, pool),
                instances=[
                    Running(place, mode, InstanceTerms.model_validate(terms), up_s)
                    for place, mode, terms, up_s in await connection.fetch(INSTANCES, pool)
                ],
                in_force=None if in_force is None else PoolsResult.model_validate(in_force),
            )
    finally:
        await connection.close()


async def read_logs(
    connection: Any, pool: str, partitions: Sequence[PoolPartition], now_s: float
) -> dict[str, RequestLog]:
    """Return the logs of two weeks, by partition; within a transaction."""
    end_s = now_s // WINDOW_S * WINDOW_S
    start_s = end_s - HISTORY_S
    logs = {part.name: RequestLog.empty(len(part.classes), end_s) for part in partitions}
    classes = {part.name: {each.name: index for index, each in enumerate(part.classes)} for part in partitions}
    async for row in connection.cursor(TRAFFIC, pool, start_s, end_s, prefetch=PAGE):
        for at, counts in row["windows"]:
            for part in partitions:
                counted = counts.get(part.counted_as)
                if counted is None:  # by thresholds that the spec did not have then
                    continue
                log = logs[part.name]
                log.is_known[at] = True
                for each, count in counted.items():
                    log.counts[at, classes[part.name][each]] += count
    return logs


async def _nodes(connection: Any, pool: str) -> list[Node]:
    held = {(row["node_id"], row["device"]) for row in await connection.fetch(HELD, pool)}
    nodes = [
        Node(
            row["zone"],
            row["labels"],
            Counter(each["model"] for each in row["devices"] if (row["id"], each["index"]) not in held),
        )
        for row in await connection.fetch(NODES)
    ]
    return without_needs(nodes, [*await _awaited(connection, pool), *await _planned(connection, pool)])


async def _awaited(connection: Any, pool: str) -> list[Need]:
    """Return the GPUs that other pools' instances wait for."""
    awaited = [InstanceTerms.model_validate(terms) for (terms,) in await connection.fetch(AWAITED, pool)]
    return [Need(of.place.zone, of.place.node_labels, of.mode.gpu_model, of.mode.gpus) for of in awaited]


async def _planned(connection: Any, pool: str) -> list[Need]:
    """Return the GPUs for other pools' instances that are planned and not created yet.

    All pools are planned at the same time: one must not count on GPUs that were planned for another.
    """
    made = Counter({tuple(row[:3]): row["count"] for row in await connection.fetch(MADE, pool)})
    needs: list[Need] = []
    for name, document, planned in await connection.fetch(PLANNED, pool):
        spec = PoolSpec.model_validate(document)
        places, modes = {each.name: each for each in spec.places}, {each.name: each for each in spec.modes}
        target = Counter[tuple[str, str]]()
        for each in planned:
            target[each["location"], each["mode"]] += each["count"]
        for (location, mode_name), count in target.items():
            place, mode = places[location], modes[mode_name]
            missing = count - made[name, location, mode_name]
            needs += [Need(place.zone, place.node_labels, mode.gpu_model, mode.gpus)] * missing
    return needs
