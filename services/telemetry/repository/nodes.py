"""Registration, heartbeats and leases: what a node may run, decided under the lock of its row.

Leases use the database's clock. ``lease_until`` counts from the start of the transaction, which is after the agent sent
its heartbeat and before it receives the answer: the agent's own deadline is never the later one. The scheduler gives up
a node under the same row lock, so that a heartbeat either renews the lease before that, or is answered that the gangs
are no longer the node's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from services.contracts.identity import Identity
from services.contracts.nodes import (
    Heartbeat,
    NodeRegistration,
    PartitionStatus,
    RankState,
    RankStatus,
    WantedPartition,
)
from services.db import gpu_partitions
from services.db.database import Connection, Database
from services.db.gpu_health import UNUSABLE
from services.db.node_power import NODE_POWER
from services.db.rows import fetch_row, fetch_rows
from services.telemetry.repository import gpu_health

Json = dict[str, Any]

_ORDER = {state: position for position, state in enumerate(RankState)}

_REGISTER = """
INSERT INTO nodes
    (id, token_sha256, address, agent_url, zone, driver, containers, host_power, labels, devices, protections, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 'lost')
ON CONFLICT (id) DO UPDATE SET
    token_sha256 = excluded.token_sha256, address = excluded.address, agent_url = excluded.agent_url,
    zone = excluded.zone, driver = excluded.driver, containers = excluded.containers,
    host_power = excluded.host_power, labels = excluded.labels, devices = excluded.devices,
    protections = excluded.protections, readings = '[]', registered_at = now()
"""

_RENEW = """
WITH before AS (
    SELECT id, state, boot_id, closed FROM nodes WHERE id = $1 AND token_sha256 = $2 FOR UPDATE
)
UPDATE nodes SET
    state = 'up', boot_id = $3, readings = $4, closed = $6::text, heartbeat_at = now(),
    lease_until = least(greatest(lease_until, now() + make_interval(secs => $5)),
        clock_timestamp() + make_interval(secs => $5))
FROM before WHERE nodes.id = before.id
RETURNING before.state <> 'up' OR before.boot_id IS DISTINCT FROM $3 OR (before.closed IS NULL) <> ($6::text IS NULL)
    AS changed
"""

# A share's state only ever advances: a repeated or overtaken heartbeat changes nothing.
_NOTE_RANKS = """
INSERT INTO rank_statuses AS known
    (allocation_id, node_id, state, exit_code, ended_by, detail, started_at, ended_at)
SELECT a.id, $1, r.state, r.exit_code, r.ended_by, r.detail, r.started_at, r.ended_at
FROM unnest($2::text[], $3::text[], $4::int[], $5::text[], $6::text[], $7::timestamptz[], $8::timestamptz[])
    AS r (allocation_id, state, exit_code, ended_by, detail, started_at, ended_at)
JOIN allocations a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', $1::text))
ON CONFLICT (allocation_id, node_id) DO UPDATE SET
    state = excluded.state, exit_code = excluded.exit_code, ended_by = excluded.ended_by, detail = excluded.detail,
    started_at = coalesce(excluded.started_at, known.started_at), ended_at = excluded.ended_at, updated_at = now()
WHERE array_position($9::text[], excluded.state) > array_position($9::text[], known.state)
RETURNING allocation_id
"""

# What a node made of its gangs' controls; it may say less than before, for a gang that is over has none.
_NOTE_SETTINGS = """
UPDATE rank_statuses s SET settings = r.settings
FROM unnest($2::text[], $3::jsonb[]) AS r (allocation_id, settings)
WHERE s.allocation_id = r.allocation_id AND s.node_id = $1 AND s.settings IS DISTINCT FROM r.settings
RETURNING s.allocation_id
"""

# What the devices were really set to, and since when: a line per change, as it was first reported.
_RECORD_SETTINGS = """
INSERT INTO settings_in_force (allocation_id, node_id, revision, power_limit_w, clock_mhz, refused, enforced_w, since)
SELECT s.allocation_id, s.node_id, (s.settings ->> 'revision')::int, (s.settings ->> 'power_limit_w')::float8,
       (s.settings ->> 'clock_mhz')::int, s.settings -> 'refused', s.settings -> 'enforced_w',
       (s.settings ->> 'since')::timestamptz
FROM rank_statuses s
WHERE s.node_id = $1 AND s.allocation_id = ANY($2::text[]) AND s.settings ->> 'since' IS NOT NULL
ON CONFLICT DO NOTHING
"""

# A minute is sent with every heartbeat while it lasts; the report with the most decisions counts. Of a minute in which
# the agent was replaced, that is the longer part.
_NOTE_CLOCKS = """
INSERT INTO server_clocks AS known
    (job_id, node_id, start_at, policy, dry_run, decisions, exceeded, mean_mhz, lowest_mhz, highest_mhz, last_mhz,
     model_error, unused)
SELECT DISTINCT ON (a.job_id, r.start_at) a.job_id, $1, r.start_at, r.policy, r.dry_run, r.decisions, r.exceeded,
    r.mean_mhz, r.lowest_mhz, r.highest_mhz, r.last_mhz, r.model_error, r.unused
FROM jsonb_to_recordset($2) AS r (allocation_id text, start_at timestamptz, policy text, dry_run boolean,
    decisions int, exceeded int, mean_mhz float8, lowest_mhz float8, highest_mhz float8, last_mhz float8,
    model_error float8, unused text)
JOIN allocations a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', $1::text))
ORDER BY a.job_id, r.start_at, r.decisions DESC
ON CONFLICT (job_id, start_at, node_id) DO UPDATE SET
    policy = excluded.policy, dry_run = excluded.dry_run, decisions = excluded.decisions, exceeded = excluded.exceeded,
    mean_mhz = excluded.mean_mhz, lowest_mhz = excluded.lowest_mhz, highest_mhz = excluded.highest_mhz,
    last_mhz = excluded.last_mhz, model_error = excluded.model_error, unused = excluded.unused
WHERE excluded.decisions > known.decisions
"""

_NOTE_PROGRESS = """
INSERT INTO job_progress AS known (job_id, done, total, noise_scale)
SELECT a.job_id, max(r.done), max(r.total), max(r.noise_scale)
FROM unnest($2::text[], $3::float8[], $4::float8[], $5::float8[]) AS r (allocation_id, done, total, noise_scale)
JOIN allocations a ON a.id = r.allocation_id
    AND a.shares @> jsonb_build_array(jsonb_build_object('node_id', $1::text))
GROUP BY a.job_id ORDER BY a.job_id
ON CONFLICT (job_id) DO UPDATE SET
    done = greatest(known.done, excluded.done), total = coalesce(excluded.total, known.total),
    noise_scale = coalesce(excluded.noise_scale, known.noise_scale), updated_at = now()
WHERE excluded.done > known.done OR (excluded.total IS NOT NULL AND excluded.total IS DISTINCT FROM known.total)
    OR (excluded.noise_scale IS NOT NULL AND excluded.noise_scale IS DISTINCT FROM known.noise_scale)
"""

_LIVE_HERE = """
SELECT DISTINCT c.allocation_id FROM device_claims c JOIN allocations a ON a.id = c.allocation_id
WHERE c.node_id = $1 AND a.state <> 'ended'
  AND NOT EXISTS (SELECT FROM rank_ends e WHERE e.allocation_id = a.id AND e.node_id = $1)
ORDER BY 1
"""

# An agent reports every share it has until it is asked to forget it. One that it had and no longer reports, though it
# has been up for longer than any lease it may have left behind, is gone with its state.
_GONE = """
UPDATE rank_statuses s SET
    state = 'exited', ended_by = 'host', detail = 'Its node does not know of it any more.', updated_at = now()
FROM nodes n
WHERE n.id = $1 AND s.node_id = $1 AND s.allocation_id = ANY($2::text[]) AND s.state <> 'exited'
    AND n.registered_at < now() - make_interval(secs => 2 * $3::float8)
RETURNING s.allocation_id
"""

_NODES = f"""
SELECT n.id, n.state, n.draining, n.closed, n.address, n.agent_url, n.zone, n.driver, n.containers, n.protections,
    CASE WHEN $4 THEN n.devices ELSE (
        SELECT coalesce(jsonb_agg(d - 'clocks_mhz' ORDER BY place), '[]')
        FROM jsonb_array_elements(n.devices) WITH ORDINALITY AS listed (d, place)) END AS devices,
    n.readings,
    (SELECT coalesce(jsonb_agg(to_jsonb(p) - 'node_id' ORDER BY p.gpu), '[]') FROM gpu_partitions p
     WHERE p.node_id = n.id) AS partitions,
    (SELECT coalesce(jsonb_agg(to_jsonb(h) - 'node_id' - 'fault_id' - 'returned_fault_id' ORDER BY h.gpu), '[]')
     FROM gpu_health h WHERE h.node_id = n.id AND {UNUSABLE}) AS gpu_health,
    (SELECT count(DISTINCT coalesce(c.parent, c.device)) FROM device_claims c WHERE c.node_id = n.id) AS gpus_in_use,
    n.heartbeat_at, n.lease_until, coalesce(n.lease_until > now(), false) AS leased,
    CASE WHEN k.node_id IS NULL THEN 'shared' WHEN k.revoked_at IS NULL THEN 'own' ELSE 'revoked' END AS credential,
    coalesce(k.revoked_at, k.enrolled_at) AS credential_since
FROM nodes n LEFT JOIN node_credentials k ON k.node_id = n.id
WHERE ($1::text IS NULL OR n.id = $1) AND ($2::text IS NULL OR n.id > $2)
ORDER BY n.id LIMIT $3
"""

# How far a node is with what is wanted of its GPUs; what it says of an earlier revision is out of date.
_NOTE_PARTITIONS = """
UPDATE gpu_partitions p SET
    state = r.state, detail = r.detail, applied_at = CASE WHEN r.state = 'applied' THEN now() ELSE p.applied_at END
FROM unnest($2::int[], $3::bigint[], $4::text[], $5::text[]) AS r (gpu, revision, state, detail)
WHERE p.node_id = $1 AND p.gpu = r.gpu AND p.revision = r.revision AND (p.state, p.detail) <> (r.state, r.detail)
RETURNING p.gpu
"""

# The agent of a node that cuts nothing is not asked: a GPU that is to be as it is, is, once nothing runs on it.
_NOTE_UNCUT = """
WITH found AS (
    SELECT p.gpu, p.sizes = (
        SELECT coalesce(jsonb_agg(coalesce(d -> 'sevenths', '7') ORDER BY (d ->> 'start')::int), '[]')
        FROM jsonb_array_elements(n.devices) d WHERE (d ->> 'parent')::int = p.gpu
    ) AS is_so
    FROM gpu_partitions p JOIN nodes n ON n.id = p.node_id
    WHERE p.node_id = $1 AND p.state IN ('pending', 'busy') AND NOT EXISTS (
        SELECT FROM device_claims c WHERE c.node_id = $1 AND coalesce(c.parent, c.device) = p.gpu)
)
UPDATE gpu_partitions p SET
    state = CASE WHEN found.is_so THEN 'applied' ELSE 'failed' END,
    detail = CASE WHEN found.is_so THEN '' ELSE 'The agent of this node cannot cut GPUs.' END,
    applied_at = CASE WHEN found.is_so THEN now() END
FROM found WHERE p.node_id = $1 AND p.gpu = found.gpu
RETURNING p.gpu
"""

_WANTED_PARTITIONS = "SELECT gpu, revision, sizes FROM gpu_partitions WHERE node_id = $1 ORDER BY gpu"

_KNOWN = """
SELECT n.zone, n.host_power, coalesce((
    SELECT jsonb_agg(jsonb_build_array(extract(epoch FROM z.since), z.zone) ORDER BY z.since)
    FROM node_zones z WHERE z.node_id = n.id), '[]') AS zones
FROM nodes n WHERE n.id = $1 AND n.token_sha256 = $2
"""

_BEFORE = "SELECT zone, registered_at, driver FROM nodes WHERE id = $1 FOR UPDATE"

# The first change also records where the node was until then.
_CHANGE_ZONE = """
INSERT INTO node_zones (node_id, since, zone)
SELECT $1, $2, $3 WHERE NOT EXISTS (SELECT FROM node_zones WHERE node_id = $1)
UNION ALL SELECT $1, now(), $4
"""

_DRAIN = "UPDATE nodes SET draining = $2 WHERE id = $1 AND draining IS DISTINCT FROM $2 RETURNING id"

_AUDIT = "INSERT INTO audit_log (tenant_id, key_id, action, target) VALUES ($1, $2, $3, $4)"
_AUDIT_PARTITION = """
INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ($1, $2, 'node.partition', $3, $4)
"""
_AUDIT_ZONE = """
INSERT INTO audit_log (tenant_id, key_id, action, target, data) VALUES ('', '', 'node.zone_changed', $1, $2)
"""
"""No key is named: the node itself registered so."""


class KnownNode(NamedTuple):
    """What is needed to price a node's energy, and the source of its host's power.

    ``zones`` has every zone the node was ever in with the time since when, UTC seconds, oldest first; it is empty for a
    node that was always in ``zone``.
    """

    zone: str
    host_power: str
    zones: list[tuple[float, str]]


class NodeRow(NamedTuple):
    """A node by its last heartbeat; devices and readings are those of ``contracts.nodes``, as JSON values."""

    id: str
    state: str
    draining: bool
    closed: str | None
    address: str
    agent_url: str
    zone: str
    driver: str
    containers: bool
    protections: list[Json]
    devices: list[Json]
    readings: list[Json]
    partitions: list[Json]
    gpu_health: list[Json]
    gpus_in_use: int
    heartbeat_at: datetime | None
    lease_until: datetime | None
    leased: bool
    credential: str
    credential_since: datetime | None


class PowerRow(NamedTuple):
    """A node's power state, as ``contracts.nodes.NodePower`` has it."""

    node_id: str
    state: str
    since: datetime | None
    pinned_awake: bool
    reason: str | None
    detail: str | None
    attempts: int
    wakes: int
    off_s: float
    waking_s: float
    estimated_energy_j: float


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of a heartbeat.

    Attributes:
        allocations: The gangs the node may run.
        changed: What the scheduler should process: ``rank``, ``node``, or nothing.
        partitions: How its GPUs are to be cut; none for a node that does not say how they are.
        returned_faults: What an operator has returned GPUs after.
    """

    allocations: list[str]
    changed: str | None
    partitions: list[WantedPartition]
    returned_faults: list[str]


class OtherKindError(Exception):
    """A node with an agent would become an engine's bridge, which may report jobs of others, or the other way round."""


def token_sha256(token: str) -> bytes:
    """Return the stored hash of a node's token."""
    return hashlib.sha256(token.encode()).digest()


async def register(
    database: Database,
    registration: NodeRegistration,
    secret: str,
    token: str,
    default_zone: str,
    admit: Callable[[Connection, str, str], Awaitable[None]],
) -> None:
    """Store a node that ``admit`` lets in by its secret, and its new token, which invalidates the old one.

    Registering renews no lease and restores no gang: only a heartbeat does, under the node's row lock. A new node
    counts as lost until its first heartbeat. A node that comes back in another grid zone is recorded in the audit log,
    and its energy from now on is that of the new zone.

    Raises:
        OtherKindError: It is known as an engine's bridge and would be a node with an agent, or the other way round.
    """
    devices = [device.model_dump(mode="json") for device in registration.devices]
    zone = registration.zone or default_zone
    async with database.transaction() as connection:
        await admit(connection, registration.node_id, secret)
        before = await connection.fetchrow(_BEFORE, registration.node_id)
        if before is not None and (before["driver"] == "engine") != (registration.driver == "engine"):
            raise OtherKindError(registration.node_id)
        if before is not None and before["zone"] != zone:
            known = before["registered_at"], before["zone"]
            await connection.execute(_CHANGE_ZONE, registration.node_id, *known, zone)
            await connection.execute(_AUDIT_ZONE, registration.node_id, {"before": before["zone"], "after": zone})
        await connection.execute(
            _REGISTER,
            registration.node_id,
            token_sha256(token),
            registration.address,
            registration.agent_url,
            zone,
            registration.driver,
            registration.containers,
            registration.host_power,
            registration.labels,
            devices,
            [each.model_dump(mode="json") for each in registration.protections],
        )
        await connection.execute(gpu_health.REPLACED, registration.node_id)


async def renew(
    database: Database, node_id: str, token: str, heartbeat: Heartbeat, lease_ttl_s: float
) -> Renewal | None:
    """Store a heartbeat and renew the node's lease, in one transaction; None if the token is not the node's."""
    readings = [reading.model_dump(mode="json") for reading in heartbeat.devices]
    wanted: list[WantedPartition] = []
    ranks = _newest(heartbeat.ranks)
    progress = [rank for rank in ranks if rank.progress_done is not None]
    async with database.transaction() as connection:
        row = await connection.fetchrow(
            _RENEW, node_id, token_sha256(token), heartbeat.boot_id, readings, lease_ttl_s, heartbeat.closed
        )
        if row is None:
            return None
        changed = "node" if row["changed"] else None
        if ranks and await connection.fetch(_NOTE_RANKS, node_id, *_columns(ranks), list(RankState)):
            changed = "rank"
        settings = {rank.allocation_id: rank.settings.model_dump(mode="json") for rank in ranks if rank.settings}
        if settings and await connection.fetch(_NOTE_SETTINGS, node_id, list(settings), list(settings.values())):
            changed = "rank"
            await connection.execute(_RECORD_SETTINGS, node_id, list(settings))
        if progress:
            await connection.execute(
                _NOTE_PROGRESS,
                node_id,
                [rank.allocation_id for rank in progress],
                [rank.progress_done for rank in progress],
                [rank.progress_total for rank in progress],
                [rank.noise_scale for rank in progress],
            )
        if clocks := _clock_rows(ranks):
            await connection.execute(_NOTE_CLOCKS, node_id, clocks)
        if heartbeat.partitions is not None:
            if await connection.fetch(_NOTE_PARTITIONS, node_id, *_partition_columns(heartbeat.partitions)):
                changed = changed or "node"
            found = await connection.fetch(_WANTED_PARTITIONS, node_id)
            wanted = [WantedPartition.model_validate(dict(record)) for record in found]
        elif await connection.fetch(_NOTE_UNCUT, node_id):
            changed = changed or "node"
        live = [record["allocation_id"] for record in await connection.fetch(_LIVE_HERE, node_id)]
        unsaid = sorted(set(live) - {rank.allocation_id for rank in ranks})
        if unsaid and await connection.fetch(_GONE, node_id, unsaid, lease_ttl_s):
            changed = "rank"
        returned: list[str] = []
        if heartbeat.gpu_faults is not None:
            has_changed, returned = await gpu_health.note(connection, node_id, heartbeat.gpu_faults)
            changed = changed or ("node" if has_changed else None)
    return Renewal(live, changed, wanted, returned)


def _newest(ranks: list[RankStatus]) -> list[RankStatus]:
    """Return one status per allocation, the furthest of each; in order of their ids, so that locks are too."""
    furthest: dict[str, RankStatus] = {}
    for rank in ranks:
        known = furthest.get(rank.allocation_id)
        if known is None or _ORDER[rank.state] > _ORDER[known.state]:
            furthest[rank.allocation_id] = rank
    return [furthest[allocation_id] for allocation_id in sorted(furthest)]


def _clock_rows(ranks: list[RankStatus]) -> list[Json]:
    return [
        {"allocation_id": rank.allocation_id, **minute.model_dump(mode="json")}
        for rank in ranks
        for minute in rank.clocks
    ]


def _partition_columns(partitions: list[PartitionStatus]) -> list[list[Any]]:
    return [
        [each.gpu for each in partitions],
        [each.revision for each in partitions],
        [each.state for each in partitions],
        [each.detail for each in partitions],
    ]


def _columns(ranks: list[RankStatus]) -> list[list[Any]]:
    return [
        [rank.allocation_id for rank in ranks],
        [rank.state for rank in ranks],
        [rank.exit_code for rank in ranks],
        [rank.ended_by for rank in ranks],
        [rank.detail for rank in ranks],
        [rank.started_at for rank in ranks],
        [rank.ended_at for rank in ranks],
    ]


async def known_node(database: Database, node_id: str, token: str) -> KnownNode | None:
    """Return what is needed to price the energy of the node whose token this is, or None."""
    async with database.connection() as connection:
        return await fetch_row(connection, KnownNode, _KNOWN, node_id, token_sha256(token))


async def nodes(
    database: Database,
    node_id: str | None = None,
    *,
    after: str | None = None,
    limit: int | None = None,
    clocks: bool = True,
) -> list[tuple[NodeRow, PowerRow | None]]:
    """Return every node, or one, or at most ``limit`` after that of a name, with its power state, by name.

    Without ``clocks``, which are most of what there is to read, devices do not name theirs.
    """
    async with database.connection() as connection:
        power = {row.node_id: row for row in await fetch_rows(connection, PowerRow, NODE_POWER, node_id)}
        found = await fetch_rows(connection, NodeRow, _NODES, node_id, after, limit, clocks)
    return [(row, power.get(row.id)) for row in found]


async def set_draining(database: Database, node_id: str, draining: bool, operator: Identity) -> bool:
    """Drain a node or return it to service, and record who did; return whether that changed anything."""
    action = "node.drain" if draining else "node.resume"
    async with database.transaction() as connection:
        changed = await connection.fetchval(_DRAIN, node_id, draining)
        if changed:
            await connection.execute(_AUDIT, operator.tenant_id, operator.key_id, action, node_id)
    return changed is not None


async def want_partition(database: Database, node_id: str, gpu: int, sizes: Sequence[int], operator: Identity) -> bool:
    """Want a GPU cut, and record who did; return False if it is reserved for a fleet."""
    async with database.transaction() as connection:
        if not await gpu_partitions.want(connection, node_id, gpu, sizes, None):
            return False
        data = {"gpu": gpu, "sizes": list(sizes)}
        await connection.execute(_AUDIT_PARTITION, operator.tenant_id, operator.key_id, node_id, data)
    return True
