"""The inputs of plans: a pool's traffic and instances, and the nodes with what others hold of them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.contracts.pools import PoolsResult
from services.contracts.routing import EVERY_TENANT
from services.contracts.serving import PoolPartition, PoolSpec
from services.core.domain.serving import WINDOW_S
from services.db.database import connect
from services.db.job_specs import PREEMPTIBLE
from services.kit.readable import readable
from services.serving.instances import APP_PREFIX, InstanceTerms
from services.serving.planning.cluster import Cluster, ClusterNode, Need, PoolNeeds
from services.serving.planning.demand import HISTORY_S, RequestLog
from services.serving.planning.problem import Running

PAGE = 24

TRAFFIC = f"""
SELECT jsonb_agg(jsonb_build_array(((extract(epoch FROM start_at) - $2) / {WINDOW_S})::int, counts)) AS windows
  FROM pool_traffic
 WHERE pool = $1 AND start_at >= to_timestamp($2) AND start_at < to_timestamp($3)
 GROUP BY date_bin('1 hour', start_at, 'epoch')
"""
"""A row for each hour: with one for each window, two weeks take several times as long to read."""

CLUSTER = text(f"""
SELECT
  (SELECT jsonb_agg(jsonb_build_array(n.id, n.zone, n.labels, (
            SELECT coalesce(jsonb_agg(d), '[]') FROM jsonb_array_elements(n.devices) d
             WHERE d ->> 'parent' IS NULL AND NOT coalesce((d ->> 'mig_enabled')::bool, false)
               AND NOT EXISTS (SELECT FROM unusable_gpus h WHERE h.node_id = n.id AND h.gpu = (d ->> 'index')::int)
               AND NOT EXISTS (SELECT FROM gpu_partitions g
                                WHERE g.node_id = n.id AND g.gpu = (d ->> 'index')::int
                                  AND (g.owner IS NOT NULL OR g.state IN ('pending', 'busy'))))) ORDER BY n.id)
     FROM usable_nodes n WHERE n.engine = 'wattshift' AND NOT n.draining) AS nodes,
  (SELECT jsonb_agg(jsonb_build_array(j.node_id, j.device,
          (SELECT min(i.pool) FROM pool_instances i WHERE i.job_id = j.job_id AND i.state <> 'ended')))
     FROM held_devices j WHERE NOT {PREEMPTIBLE}) AS held,
  (SELECT jsonb_agg(jsonb_build_array(i.pool, i.terms) ORDER BY i.id)
     FROM pool_instances i LEFT JOIN live_gangs a ON a.job_id = i.job_id
    WHERE i.state IN ('wanted', 'starting') AND a.id IS NULL AND NOT starts_with(i.pool, '{APP_PREFIX}')) AS awaited,
  (SELECT jsonb_agg(jsonb_build_array(q.name, q.spec, p.instances, f.instances))
     FROM pools q
     JOIN LATERAL (
          SELECT result #> '{{plan,instances}}' AS instances FROM pool_plans
           WHERE pool = q.name AND revision = q.revision AND state = 'succeeded'
             AND (id = q.plan_id OR outcome IS NULL AND q.spec ->> 'mode' = 'automatic')
           ORDER BY submitted_at DESC LIMIT 1) p ON true
     LEFT JOIN pool_plans g ON g.id = q.plan_id AND g.revision = q.revision
     CROSS JOIN LATERAL (SELECT g.result #> '{{plan,instances}}' AS instances) f
    WHERE q.deleted_at IS NULL) AS planned,
  (SELECT jsonb_agg(jsonb_build_array(m.pool, m.place, m.mode, m.count))
     FROM (SELECT pool, place, mode, count(*) AS count FROM pool_instances
            WHERE state IN ('wanted', 'starting', 'ready') GROUP BY pool, place, mode) m) AS made,
  (SELECT jsonb_agg(DISTINCT zone) FROM orders_in_force) AS ordered
""")
"""Everything in one statement, so that it is of one moment. ``nodes``: with their whole GPUs that are kept for nobody.
``held``: devices of jobs that may not be preempted. ``planned``: what pools are to have, by the newest plan that is or
is about to be in force, and by the one in force."""

OWN = text("""
SELECT extract(epoch FROM now())::float8 AS now_s,
  (SELECT jsonb_agg(jsonb_build_array(place, mode, terms,
                                      extract(epoch FROM now() - coalesce(ready_at, created_at))) ORDER BY id)
     FROM pool_instances WHERE pool = :pool AND state IN ('wanted', 'starting', 'ready')) AS instances,
  (SELECT p.result -> 'plan' FROM pools q JOIN pool_plans p ON p.id = q.plan_id WHERE q.name = :pool) AS in_force
""")


@dataclass(frozen=True)
class OwnState:
    """What a pool has."""

    now_s: float  #: The moment, UTC seconds
    instances: list[Running]  #: Those that run or are starting
    in_force: PoolsResult | None  #: The plan in force


async def read_own(connection: AsyncConnection, pool: str) -> OwnState:
    """Return a pool's instances and its plan in force."""
    row: Any = (await connection.execute(OWN, {"pool": pool})).one()
    return OwnState(
        now_s=row.now_s,
        instances=[
            Running(place, mode, InstanceTerms.as_stored(terms), up_s)
            for place, mode, terms, up_s in _rows(row.instances)
        ],
        in_force=None if row.in_force is None else PoolsResult.as_stored(row.in_force),
    )


FLOORS = text("""
WITH asked AS (
     SELECT key_id, sum(requests)::float8 AS requests FROM key_usages
      WHERE start_at >= now() - interval '1 day' AND model = ANY(CAST(:models AS text[])) GROUP BY 1)
SELECT f.least_accuracy_pct AS floor, coalesce(sum(a.requests), 0) AS asked,
       (SELECT coalesce(sum(requests), 0) FROM asked) AS all_asked
  FROM key_floors f LEFT JOIN asked a ON a.key_id = ANY(f.key_ids)
 WHERE (f.tenant_id = ANY(CAST(:tenants AS text[])) OR :every = ANY(CAST(:tenants AS text[]))
        OR f.tenant_id = (SELECT tenant_id FROM pools WHERE name = :pool))
   AND (f.models IS NULL OR f.aliases IS NOT NULL OR f.models ?| CAST(:models AS text[]))
 GROUP BY 1
""")
LEAST_FLOOR_SHARE = 0.01  #: Of a pool's requests, for keys that ask for an accuracy and have hardly asked yet


async def read_traffic(database_url: str, pool: str, spec: PoolSpec) -> tuple[float, dict[str, RequestLog]]:
    """Return the present, UTC seconds, and two weeks of logs by partition, read on a connection of its own."""
    connection: Any = await connect(database_url, application_name="serving-planner")
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            now_s: float = await connection.fetchval("SELECT extract(epoch FROM now())::float8")
            return now_s, await read_logs(connection, pool, spec.partitions, now_s)
    finally:
        await connection.close()


async def read_logs(
    connection: Any, pool: str, partitions: Sequence[PoolPartition], now_s: float
) -> dict[str, RequestLog]:
    """Return two weeks of logs, by partition; the connection must be in a transaction."""
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


async def read_floors(connection: AsyncConnection, pool: str, spec: PoolSpec) -> dict[float, float]:
    """Return the accuracies that keys ask of a pool's variants, each with its share of the last day's requests."""
    if all(mode.accuracy_pct is None for mode in spec.modes):
        return {}
    values: dict[str, Any] = {"pool": pool, "every": EVERY_TENANT}
    values |= {"tenants": list(spec.tenants), "models": list(spec.models)}
    found = (await connection.execute(FLOORS, values)).all()
    return {row.floor: max(row.asked / max(row.all_asked, 1), LEAST_FLOOR_SHARE) for row in found}


async def read_cluster(connection: AsyncConnection) -> Cluster:
    """Return the nodes that accept work, and who has or needs their GPUs."""
    row: Any = (await connection.execute(CLUSTER)).one()
    needs: dict[str, PoolNeeds] = defaultdict(PoolNeeds)
    made = Counter({(pool, place, mode): count for pool, place, mode, count in _rows(row.made)})

    def awaits(found: tuple[str, Any]) -> None:
        pool, of = found[0], InstanceTerms.as_stored(found[1])
        if of.place.cluster is None:
            needs[pool].awaited.append(Need(of.place.zone, of.place.node_labels, of.mode.gpu_model, of.mode.gpus))

    def plans(found: tuple[str, Any, list[Any], list[Any] | None]) -> None:
        pool, document, planned, in_force = found
        spec = PoolSpec.as_stored(document)
        needs[pool].planned.extend(_not_made(pool, spec, planned, made))
        needs[pool].in_force.extend(_not_made(pool, spec, in_force or [], made))

    readable(_rows(row.awaited), awaits, "instance of", itemgetter(0))
    readable(_rows(row.planned), plans, "pool", itemgetter(0))
    return Cluster(
        nodes=[
            ClusterNode(node, zone, labels, {each["index"]: each["model"] for each in devices})
            for node, zone, labels, devices in _rows(row.nodes)
        ],
        held={(node, device): pool for node, device, pool in _rows(row.held)},
        needs=needs,
        ordered=frozenset(_rows(row.ordered)),
    )


def _rows(aggregated: list[Any] | None) -> list[Any]:
    return aggregated or []  # jsonb_agg of no row is null


def _not_made(
    pool: str, spec: PoolSpec, planned: Sequence[Mapping[str, Any]], made: Mapping[tuple[str, str, str], int]
) -> list[Need]:
    """Return the needs of a pool's instances that are planned but not created yet.

    All pools are planned at the same time: one must not count on GPUs that were planned for another.
    """
    places, modes = {each.name: each for each in spec.places}, {each.name: each for each in spec.modes}
    target = Counter[tuple[str, str]]()
    for each in planned:
        target[each["location"], each["mode"]] += each["count"]
    needs: list[Need] = []
    for (location, mode_name), count in target.items():
        place, mode = places[location], modes[mode_name]
        missing = count - made.get((pool, location, mode_name), 0) if place.cluster is None else 0
        needs += [Need(place.zone, place.node_labels, mode.gpu_model, mode.gpus)] * missing
    return needs
