"""Nodes: how they register, what they are, and what operators want of them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from services.contracts.identity import Identity
from services.contracts.nodes import NodeRegistration
from services.core.accounting.meters import UNKNOWN_HOST_W, board_most_w
from services.db import audit, gpu_partitions
from services.db.database import Connection, Database, Record
from services.db.nodes import NODE_POWER
from services.db.rows import fetch_rows
from services.telemetry.repository import gpu_health
from services.telemetry.repository.credentials import sha256

_REGISTER = """
INSERT INTO nodes AS known
    (id, token_sha256, zone, devices, protections, most_gpu_w, address, agent_url, driver, containers, host_power,
     labels, measures_only, engine_node, checkpoints, most_host_w, state)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, 'lost')
ON CONFLICT (id) DO UPDATE SET
    token_sha256 = excluded.token_sha256, address = excluded.address, agent_url = excluded.agent_url,
    zone = excluded.zone, driver = excluded.driver, containers = excluded.containers,
    host_power = excluded.host_power, labels = excluded.labels, devices = excluded.devices,
    protections = excluded.protections, measures_only = excluded.measures_only, engine_node = excluded.engine_node,
    checkpoints = excluded.checkpoints, readings = '[]', registered_at = now(),
    most_gpu_w = greatest(known.most_gpu_w, excluded.most_gpu_w),
    most_host_w = greatest(known.most_host_w, excluded.most_host_w)
"""

_TOLD = (
    *("address", "agent_url", "driver", "containers", "host_power", "labels", "measures_only", "engine_node"),
    *("checkpoints", "most_host_w"),
)
"""What a node says of itself and is stored as it is, in the order of these columns."""

_NODES = """
SELECT n.id, n.state, n.draining, n.closed, n.address, n.agent_url, n.zone, n.driver, n.measures_only, n.engine_node,
    n.containers, n.checkpoints, n.protections,
    CASE WHEN $4 THEN n.devices ELSE (
        SELECT coalesce(jsonb_agg(d - 'clocks_mhz' ORDER BY place), '[]')
        FROM jsonb_array_elements(n.devices) WITH ORDINALITY AS listed (d, place)) END AS devices,
    n.readings,
    (SELECT coalesce(jsonb_agg(to_jsonb(p) - 'node_id' ORDER BY p.gpu), '[]') FROM gpu_partitions p
     WHERE p.node_id = n.id) AS partitions,
    (SELECT coalesce(jsonb_agg(to_jsonb(h) - 'node_id' ORDER BY h.gpu), '[]') FROM unusable_gpus h
     WHERE h.node_id = n.id) AS gpu_health,
    (SELECT count(DISTINCT c.gpu) FROM held_devices c WHERE c.node_id = n.id) AS gpus_in_use,
    n.marked_intervals, n.heartbeat_at, n.lease_until, coalesce(n.lease_until > now(), false) AS leased,
    CASE WHEN k.node_id IS NULL THEN 'shared' WHEN k.revoked_at IS NULL THEN 'own' ELSE 'revoked' END AS credential,
    coalesce(k.revoked_at, k.enrolled_at) AS credential_since
FROM nodes n LEFT JOIN node_credentials k ON k.node_id = n.id
WHERE CASE WHEN $1::text IS NULL THEN n.lease_until > now() OR NOT EXISTS (
            SELECT FROM node_credentials r WHERE r.node_id IN (n.id, n.engine) AND r.revoked_at IS NOT NULL)
      ELSE n.id = $1 END AND ($2::text IS NULL OR n.id > $2)
ORDER BY n.id LIMIT $3
"""

_REPORTERS = """
SELECT n.id AS node_id, n.zone, n.host_power, n.most_gpu_w, coalesce(n.most_host_w, $3) AS most_host_w, (
    SELECT e.id FROM nodes e WHERE e.id = n.engine_node AND e.id = e.engine || '.' || n.id) AS engine_node, coalesce((
    SELECT jsonb_agg(jsonb_build_array(extract(epoch FROM z.since), z.zone) ORDER BY z.since)
    FROM node_zones z WHERE z.node_id = n.id), '[]') AS zones
FROM nodes n JOIN unnest($1::text[], $2::bytea[]) AS w (id, token_sha256) USING (id, token_sha256)
"""

_BEFORE = "SELECT zone, registered_at FROM nodes WHERE id = $1 FOR UPDATE"

# The first change also records where the node was until then.
_CHANGE_ZONE = """
INSERT INTO node_zones (node_id, since, zone)
SELECT $1, $2, $3 WHERE NOT EXISTS (SELECT FROM node_zones WHERE node_id = $1)
UNION ALL SELECT $1, now(), $4
"""

_DRAIN = "UPDATE nodes SET draining = $2 WHERE id = $1 AND draining IS DISTINCT FROM $2 RETURNING id"


class Reporter(NamedTuple):
    """The node that energy comes from.

    ``most_gpu_w`` and ``most_host_w`` are the most that its GPUs, and the rest of it, can draw; None for no limit.
    ``zones`` has every zone that it was ever in with the time when that began, UTC seconds, oldest first; it is empty
    for a node that was always in ``zone``.
    """

    node_id: str
    zone: str
    host_power: str
    most_gpu_w: float | None = None
    most_host_w: float | None = None
    engine_node: str | None = None
    zones: Sequence[tuple[float, str]] = ()

    @property
    def held_as(self) -> str:
        """The node on which its gangs have their shares: the engine's, if it measures one."""
        return self.engine_node or self.node_id

    def zone_at(self, time_s: float) -> str:
        """Return the zone the node was in at ``time_s``, UTC seconds."""
        began = [zone for since_s, zone in self.zones if since_s <= time_s]
        return began[-1] if began else self.zones[0][1] if self.zones else self.zone


async def register(
    database: Database,
    registration: NodeRegistration,
    secret: str,
    token: str,
    default_zone: str,
    admit: Callable[[Connection, NodeRegistration, str], Awaitable[None]],
) -> None:
    """Store a node that ``admit`` lets in by its secret, and its new token, which invalidates the old one.

    The most it can draw is the most that it was ever registered with: what it still has to report may be from then.
    Registering renews no lease and restores no gang: only a heartbeat does, under the node's row lock. A new node
    counts as lost until its first heartbeat. A node that comes back in another grid zone is recorded in the audit log,
    and its energy from now on is that of the new zone.
    """
    devices = [device.model_dump(mode="json") for device in registration.devices]
    gpus = [device for device in registration.devices if device.parent is None]
    most_gpu_w = sum(board_most_w(each.model, (each.power_limit_w, each.highest_limit_w)) for each in gpus)
    zone = registration.zone or default_zone
    async with database.transaction() as connection:
        await admit(connection, registration, secret)
        before = await connection.fetchrow(_BEFORE, registration.node_id)
        if before is not None and before["zone"] != zone:
            was = before["zone"]
            await connection.execute(_CHANGE_ZONE, registration.node_id, before["registered_at"], was, zone)
            await audit.note(connection, None, "node.zone_changed", registration.node_id, before=was, after=zone)
        protections = [each.model_dump(mode="json") for each in registration.protections]
        told = (getattr(registration, name) for name in _TOLD)
        await connection.execute(
            _REGISTER, registration.node_id, sha256(token), zone, devices, protections, most_gpu_w, *told
        )
        await connection.execute(gpu_health.REPLACED, registration.node_id)


async def reporters(database: Database, tokens: Mapping[str, str]) -> dict[str, Reporter]:
    """Return the nodes whose tokens these are, by name."""
    hashes = [sha256(token) for token in tokens.values()]
    rows = await database.run(fetch_rows, Reporter, _REPORTERS, [*tokens], hashes, UNKNOWN_HOST_W)
    return {row.node_id: row for row in rows}


async def nodes(
    database: Database,
    node_id: str | None = None,
    *,
    after: str | None = None,
    limit: int | None = None,
    clocks: bool = True,
) -> list[tuple[Record, Record | None]]:
    """Return all nodes, one node, or at most ``limit`` after the one named ``after``, with power states, by name.

    The columns are fields of ``contracts.nodes.Node``, and ``leased``: whether its lease holds. Without ``clocks``,
    which are most of what there is to read, devices do not state theirs.
    """
    async with database.connection() as connection:
        power = {row["node_id"]: row for row in await connection.fetch(NODE_POWER, node_id)}
        found = await connection.fetch(_NODES, node_id, after, limit, clocks)
    return [(row, power.get(row["id"])) for row in found]


async def set_draining(database: Database, node_id: str, draining: bool, operator: Identity) -> bool:
    """Drain a node or return it to service, and record who did; return whether that changed anything."""
    action = "node.drain" if draining else "node.resume"
    async with database.transaction() as connection:
        changed = await connection.fetchval(_DRAIN, node_id, draining)
        if changed:
            await audit.note(connection, operator, action, node_id)
    return changed is not None


async def want_partition(database: Database, node_id: str, gpu: int, sizes: Sequence[int], operator: Identity) -> bool:
    """Have a GPU cut, and record who asked for it; return False if it is reserved for a fleet."""
    async with database.transaction() as connection:
        if not await gpu_partitions.want(connection, node_id, gpu, sizes, None):
            return False
        await audit.note(connection, operator, "node.partition", node_id, gpu=gpu, sizes=list(sizes))
    return True
